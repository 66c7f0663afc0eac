"Make the drawings stored in the notebooks smaller: `python .ci/slim.py`. Coordinates get two decimals, metadata and line breaks go; nothing that can be seen changes."
import re
from pathlib import Path

from execnb.nbio import read_nb, write_nb


def slim(svg):
    svg = re.sub(r'<metadata>.*?</metadata>|<!--.*?-->', '', svg, flags=re.S)
    svg = re.sub(r'(\d\.\d\d)\d+', r'\1', svg)
    return re.sub(r'\s*\n\s*', ' ', svg).replace('> <', '><').strip()


before = after = 0
for file in sorted((Path(__file__).resolve().parent.parent/'nbs').glob('*.ipynb')):
    nb, changed = read_nb(file), False
    for out in (o for c in nb.cells for o in c.get('outputs', ())):
        data = out.get('data', {})
        if 'image/svg+xml' not in data: continue
        old = ''.join(data['image/svg+xml'])
        new = slim(old)
        if new != old: data['image/svg+xml'], changed = [new], True
    before += file.stat().st_size
    if changed: write_nb(nb, file)
    after += file.stat().st_size
print(f'{before:,} -> {after:,} bytes')
