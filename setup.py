"Everything a package needs to know is in settings.ini, which nbdev reads too; this file only hands it to setuptools."
import shlex
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist


class Sdist(sdist):
    "Put settings.ini into the source distribution: this file reads it."
    def make_distribution(self):
        self.filelist.append('settings.ini')
        super().make_distribution()


parser = ConfigParser(delimiters=['='])
parser.read('settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']
extras = {k.removesuffix('_requirements'): shlex.split(v) for k, v in cfg.items() if k.endswith('_requirements')}

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'].split(),
    long_description=Path('README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    author=cfg['author'], author_email=cfg['author_email'], url=cfg['git_url'], license='Apache-2.0',
    classifiers=['Development Status :: 3 - Alpha', 'Intended Audience :: Developers', 'Programming Language :: Python :: 3'],
    packages=find_packages(include=[cfg['lib_name'], cfg['lib_name'] + '.*']), include_package_data=True,
    python_requires='>=' + cfg['min_python'], install_requires=shlex.split(cfg['requirements']), extras_require=extras,
    zip_safe=False, cmdclass={'sdist': Sdist},
    entry_points={'console_scripts': cfg['console_scripts'].split(), 'nbdev': [f"{cfg['lib_name']}={cfg['lib_name']}._modidx:d"]},
)
