"Make the drawings stored in the notebooks smaller: `python .ci/slim.py`. Coordinates get one decimal (a tenth of a point); groups, names and styles that say nothing go; nothing that can be seen changes."
import re
from pathlib import Path
from xml.etree import ElementTree as ET

from execnb.nbio import read_nb, write_nb

SVG, LINK = 'http://www.w3.org/2000/svg', 'http://www.w3.org/1999/xlink'
ET.register_namespace('', SVG)
ET.register_namespace('xlink', LINK)
DEFAULTS = {'stroke-linejoin:miter', 'stroke-linecap:butt', 'stroke-width:1', 'fill-opacity:1'}


def short(number): return f'{round(float(number), 1) + 0.:g}'


def path(d):
    "The same path with relative words: lines that go straight across or down need one number"
    out, x, y = [], None, None
    for letter, rest in re.findall(r'([A-Za-z])([^A-Za-z]*)', d):
        n = [short(v) for v in re.findall(r'-?[\d.]+(?:e-?\d+)?', rest)]
        if letter == 'L' and len(n) == 2 and (x, y) != (None, None):
            if (n[0], n[1]) == (x, y) and out[-1][0] != 'M': continue        # a line without length, unless it is a dot
            out.append(f'V{n[1]}' if n[0] == x else f'H{n[0]}' if n[1] == y else f'L{" ".join(n)}')
        else: out.append(letter + ' '.join(n))
        x, y = n[-2:] if letter in 'MLCQ' and len(n) > 1 else (None, None)
    return ''.join(out)


def style(s): return ';'.join(p for p in re.sub(r'\s*([:;])\s*', r'\1', s).strip(';').split(';') if p not in DEFAULTS)


def slim(text):
    root = ET.fromstring(re.sub(r'<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<!--.*?-->', '', text, flags=re.S))
    used = set(re.findall(r'#([\w.-]+)', text))
    markers = {p.get('id'): style(p.get('style', '')) for p in root.iter(f'{{{SVG}}}path') if p.get('id')}      # a marker's own style holds where it is used
    for parent in list(root.iter()):
        for name, value in list(parent.attrib.items()):
            if name == 'd': parent.set(name, path(value))
            elif name == 'style': parent.set(name, style(value))
            elif name in ('x', 'y', 'width', 'height') and re.fullmatch(r'-?[\d.]+', value): parent.set(name, short(value))
            elif name == 'transform' and re.match(r'rotate\(-?0[ )]', value): del parent.attrib[name]
            elif name == 'transform': parent.set(name, re.sub(r'-?\d+\.\d\d+', lambda m: f'{float(m[0]):.2f}', value))
            elif name == 'id' and value not in used: del parent.attrib[name]
            if parent.get('style') == '': del parent.attrib['style']
        if parent.tag.endswith('use') and parent.get('style') == markers.get(parent.get(f'{{{LINK}}}href', '')[1:]): parent.attrib.pop('style', None)
        if not parent.tag.endswith(('text', 'tspan', 'style')):
            parent.text = None
            for child in parent: child.tail = None
    changed = True
    while changed:
        changed = False
        for parent in root.iter():
            children = []
            for child in parent:
                plain = child.tag == f'{{{SVG}}}g' and not child.attrib
                children += list(child) if plain else [child]
                changed |= plain
            if len(children) != len(parent) or any(a is not b for a, b in zip(children, parent)): parent[:] = children
    return ET.tostring(root, encoding='unicode')


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
