"""Make README.md from nbs/index.ipynb, as `nbdev_readme` does where Quarto is installed: `python .ci/readme.py`"""
import re
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

root = Path(__file__).resolve().parent.parent
nb = nbformat.read(root / 'nbs/index.ipynb', 4)
nb.cells = [c for c in nb.cells if not re.match(r'#\|\s*hide', c.source)]
body, _ = MarkdownExporter().from_notebook_node(nb)
body = re.sub(r'\]\((\w+\.ipynb)', r'](nbs/\1', body)                      # links to chapters, as seen from the top of the repository
body = re.sub(r'[ \t]+$', '', body, flags=re.M)
(root / 'README.md').write_text('<!-- made from nbs/index.ipynb by .ci/readme.py: edit that -->\n\n' + body.strip() + '\n', encoding='utf-8')
