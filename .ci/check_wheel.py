"The wheel holds every module of the package and nothing else: `python .ci/check_wheel.py WHEEL`"
import sys, zipfile
from pathlib import Path

root = Path(__file__).resolve().parent.parent
want = {str(f.relative_to(root)) for f in (root / 'minivllm').rglob('*.py')}
with zipfile.ZipFile(sys.argv[1]) as z:
    have = {n for n in z.namelist() if '.dist-info/' not in n}
    meta = next(z.read(n).decode() for n in z.namelist() if n.endswith('.dist-info/METADATA'))
    entry = next(z.read(n).decode() for n in z.namelist() if n.endswith('entry_points.txt'))
assert have == want, f'missing {sorted(want - have)}, unexpected {sorted(have - want)}'
assert 'minivllm = minivllm.cli:main' in entry.replace('minivllm=', 'minivllm = '), entry
for line in meta.splitlines():
    assert not line.startswith(('Requires-Dist: nbdev', 'Requires-Dist: pytest')) or 'extra' in line, f'for development only: {line}'
print(f'{len(have)} modules, and nothing else')
