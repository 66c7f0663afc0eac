"""Build the site in _docs: `python .ci/docs.py` builds it, `--preview [PORT]` also serves it on this machine.

notebooks --nbdev and minivllm.pages--> _proc --smalldocs--> pages --this file--> a site that asks no other host for anything.
Needs `pip install -e '.[dev]'` and npm, which fetches four pinned packages the first time. (With Quarto: `nbdev_preview`.)"""
import argparse, gzip, hashlib, html, http.server, json, os, re, shutil, subprocess, sys, tarfile, tempfile, zipfile
from functools import partial
from pathlib import Path

import yaml
from nbdev.config import get_config
from nbdev.serve import proc_nbs

root = Path(__file__).resolve().parent.parent
packages = {'katex': '0.16.11', 'mermaid': '11.4.1', 'pyodide': '314.0.7', '@fontsource-variable/source-sans-3': '5.3.1', 'axe-core': '4.14.1'}
npm = root/'node_modules'


def fetch():
    "Unpack the pinned npm packages, and nothing they depend on, into node_modules."
    missing = [f'{p}@{v}' for p, v in packages.items()
               if not (f := npm/p/'package.json').exists() or json.loads(f.read_text(encoding='utf-8'))['version'] != v]
    if not missing: return
    with tempfile.TemporaryDirectory() as tmp:
        subprocess.run(['npm', 'pack', '--silent', '--pack-destination', tmp, *missing], check=True, stdout=subprocess.DEVNULL)
        for file in Path(tmp).glob('*.tgz'):
            with tarfile.open(file) as t: t.extractall(Path(tmp)/file.stem, filter='data')
            top = next((Path(tmp)/file.stem).iterdir())
            dest = npm/json.loads((top/'package.json').read_text(encoding='utf-8'))['name']
            shutil.rmtree(dest, ignore_errors=True)
            shutil.copytree(top, dest)


# --- notebooks to pages

def svg_texts(svg):
    "Words in a drawing, numbers left out: what there is to say about a figure that has no `fig-alt`."
    words = [html.unescape(re.sub(r'<[^>]+>', '', t)).strip() for t in re.findall(r'<text[^>]*>(.*?)</text>', svg, re.S)]
    return ', '.join(dict.fromkeys(w for w in words if re.search(r'[^\W\d_]{2}', w)))[:300]


def stage(cache, dst):
    "Copy what nbdev made to where smalldocs reads it: pages under their `output-file` names, drawings in files of their own."
    shutil.copytree(cache, dst, ignore=shutil.ignore_patterns('*.ipynb', '_quarto.yml', '_docs'))
    books = {f: json.loads(f.read_text(encoding='utf-8')) for f in sorted(cache.glob('*.ipynb'))}
    names = {}
    for f, nb in books.items():
        m = re.search(r'output-file: (\S+)\.html', ''.join(nb['cells'][0]['source']))
        names[f.name] = f'{m[1] if m else f.stem}.ipynb'
    def renamed(text): return re.sub(r'[\w-]+\.ipynb', lambda m: names.get(m[0], m[0]), text)
    (dst/'figures').mkdir()
    for f, nb in books.items():
        for c in nb['cells']:
            c['source'] = renamed(re.sub(r'^output-file: .*\n', '', ''.join(c['source']), flags=re.M)) if c['cell_type'] != 'code' else ''.join(c['source'])
            alt = re.search(r'^#\|\s*fig-alt:\s*"?(.*?)"?\s*$', c['source'], re.M)
            for o in c.get('outputs', ()):
                data = o.get('data', {})
                if 'image/svg+xml' not in data: continue
                svg = ''.join(data.pop('image/svg+xml'))
                size = re.search(r'<svg[^>]*?width="([\d.]+)pt"[^>]*?height="([\d.]+)pt"|<svg[^>]*?height="([\d.]+)pt"[^>]*?width="([\d.]+)pt"', svg)
                w, h = (size[1], size[2]) if size[1] else (size[4], size[3])
                name = f'figures/{Path(names[f.name]).stem}-{hashlib.sha256(svg.encode()).hexdigest()[:8]}.svg'
                (dst/name).write_text(svg, encoding='utf-8')
                text = alt[1] if alt else 'Figure: ' + svg_texts(svg)
                data['text/html'] = f'<img class="mv-figure" src="{name}" alt="{html.escape(text)}" width="{float(w)*4/3:.0f}" height="{float(h)*4/3:.0f}" loading="lazy">'
        (dst/names[f.name]).write_text(json.dumps(nb, ensure_ascii=False), encoding='utf-8')
    cfg = yaml.safe_load(renamed((root/'_quarto.yml').read_text(encoding='utf-8')))
    cfg['project']['resources'] = [*cfg['project'].get('resources', ()), 'figures/**']
    (dst/'_quarto.yml').write_text(yaml.safe_dump(cfg, allow_unicode=True, sort_keys=False), encoding='utf-8')


# --- everything served from here

def split_rules(css):
    "`(prelude, block or None)` of each rule of a stylesheet."
    i = 0
    while i < len(css):
        j = min((k for k in (css.find('{', i), css.find(';', i)) if k >= 0), default=len(css))
        if j == len(css) or css[j] == ';':
            if css[i:j].strip(): yield css[i:j].strip() + ';', None
            i = j + 1
            continue
        depth, k = 1, j + 1
        while depth: depth, k = depth + (css[k] == '{') - (css[k] == '}'), k + 1
        yield css[i:j].strip(), css[j+1:k-1]
        i = k


def slim(css, words):
    "A stylesheet without the rules for classes that no page and no script mentions."
    out = []
    for prelude, block in split_rules(re.sub(r'/\*.*?\*/|@import url\([^)]*\);?|@import "[^"]*";?', '', css, flags=re.S)):
        if block is None: out.append(prelude)
        elif prelude.startswith(('@media', '@supports')):
            if inner := slim(block, words): out.append(f'{prelude}{{{inner}}}')
        elif prelude.startswith('@'): out.append(f'{prelude}{{{block}}}')
        else:
            keep = [s for s in prelude.split(',') if all(w in words for w in re.findall(r'[.#]((?:[\w-]|\\.)+)', re.sub(r'\([^)]*\)', '', s)))]
            if keep: out.append(f'{",".join(keep)}{{{block}}}')
    return ''.join(out)


def icon_font(lib):
    "Leave only the icons that the slimmed stylesheet still mentions in the icon font."
    from fontTools import subset
    css = (lib/'bootstrap-icons.min.css').read_text(encoding='utf-8')
    codes = [int(c, 16) for c in re.findall(r'content: ?"\\([0-9a-f]+)"', css + (lib.parent/'smalldocs.css').read_text(encoding='utf-8'))]
    options = subset.Options(flavor='woff')
    font = subset.load_font(str(lib/'fonts/bootstrap-icons.woff'), options)
    cut = subset.Subsetter(options)
    cut.populate(unicodes=codes)
    cut.subset(font)
    subset.save_font(font, str(lib/'fonts/icons.woff'), options)
    for f in lib.glob('fonts/bootstrap-icons.*'): f.unlink()
    css = re.sub(r'src:url\([^;}]*', 'src:url("fonts/icons.woff") format("woff")', css, count=1)
    (lib/'bootstrap-icons.min.css').write_text(css, encoding='utf-8')


def pure_modules():
    "Files of minivllm and fastcore that `minivllm.scheduler` needs, found by importing it in a fresh Python."
    code = ("import sys, json, minivllm.lab; print(json.dumps([(n, m.__file__) for n, m in sys.modules.items() "
            "if n.split('.')[0] in ('minivllm', 'fastcore') and getattr(m, '__file__', None)]))")
    out = subprocess.run([sys.executable, '-c', code], check=True, capture_output=True, text=True, cwd=root, env={**os.environ, 'PYTHONPATH': str(root)}).stdout
    for name, file in sorted(json.loads(out)):
        yield name.replace('.', '/') + ('/__init__.py' if file.endswith('__init__.py') else '.py'), Path(file).read_bytes()


def vendor(site, base):
    "Take every other host out of the pages and serve what they need from `site_libs`."
    lib = site/'site_libs'
    for folder, files in {'katex': ['katex.min.css', 'katex.min.js', 'contrib/auto-render.min.js', *(f'fonts/{f.name}' for f in (npm/'katex/dist/fonts').glob('*.woff2'))],
                          'mermaid': ['mermaid.min.js']}.items():
        for f in files:
            (lib/folder/f).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(npm/folder/'dist'/f, lib/folder/f)
    (lib/'pyodide').mkdir()
    for f in ('pyodide.mjs', 'pyodide.asm.mjs', 'pyodide.asm.wasm', 'python_stdlib.zip', 'pyodide-lock.json'): shutil.copy(npm/'pyodide'/f, lib/'pyodide')
    with zipfile.ZipFile(lib/'minivllm.zip', 'w', zipfile.ZIP_DEFLATED) as z:
        for name, data in pure_modules(): z.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data)
    (lib/'fonts').mkdir()
    for f in (npm/'@fontsource-variable/source-sans-3/files').glob('source-sans-3-latin-wght-*.woff2'): shutil.copy(f, lib/'fonts')
    for page in site.rglob('*.html'):
        up = '../' * (len(page.relative_to(site).parts) - 1)
        text = page.read_text(encoding='utf-8')
        text = re.sub(r'https://cdn\.jsdelivr\.net/npm/katex@[\d.]+/dist', f'{up}site_libs/katex', text)
        text = re.sub(r'<script type="module">import mermaid from .*?</script>', '', text, flags=re.S)    # site.js draws diagrams when they come into view
        text = text.replace(f'href="{base}/', f'href="{up or "./"}')
        page.write_text(text, encoding='utf-8')
    words = set(re.findall(r'[\w-]+', ' '.join(f.read_text(encoding='utf-8') for f in [*site.rglob('*.html'), *lib.glob('*.js'), *lib.glob('bootstrap/*.js'), *site.glob('assets/*.js')])))
    for f in [*lib.glob('themes/*.css'), lib/'bootstrap-icons/bootstrap-icons.min.css']: f.write_text(slim(f.read_text(encoding='utf-8'), words), encoding='utf-8')
    icon_font(lib/'bootstrap-icons')


def check_hosts(site):
    "Nothing that a page loads may come from another host."
    for f in [*site.rglob('*.html'), *site.rglob('*.css')]:
        text = f.read_text(encoding='utf-8')
        loads = re.findall(r'<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)="(?:https?:)?//[^"]*"|url\(["\']?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*|import[^;]*from ["\']https?:[^"\']*', text)
        bad = [x for x in loads if not re.match(r'<link[^>]*rel="canonical"', x)]
        if bad: sys.exit(f'{f.relative_to(site)} loads from another host: {bad[0][:200]}')


def build():
    cfg = get_config()
    fetch()
    cache = proc_nbs(n_workers=0, force=True)
    with tempfile.TemporaryDirectory() as tmp:
        dst = Path(tmp)/'site'
        stage(cache, dst)
        subprocess.run([str(Path(sys.executable).with_name('smalldocs')), 'render', '--strict', str(dst)], check=True)
        shutil.rmtree(cfg.doc_path, ignore_errors=True)
        shutil.copytree(dst/'_docs', cfg.doc_path)
    vendor(cfg.doc_path, cfg.doc_host + cfg.doc_baseurl)
    check_hosts(cfg.doc_path)
    (cfg.doc_path/'.nojekyll').touch()
    print(f'built {cfg.doc_path.relative_to(root)}')
    return cfg.doc_path


# --- serving it

class Handler(http.server.SimpleHTTPRequestHandler):
    "Serve a folder as GitHub Pages does: compressed, with the right types."
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, '.mjs': 'text/javascript', '.js': 'text/javascript', '.wasm': 'application/wasm',
                      '.html': 'text/html; charset=utf-8', '.md': 'text/markdown; charset=utf-8', '.txt': 'text/plain; charset=utf-8'}
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        if path.is_dir() and self.path.endswith('/'): path /= 'index.html'
        if not path.is_file(): return super().do_GET()
        data, small = path.read_bytes(), path.suffix in ('.html', '.css', '.js', '.mjs', '.json', '.svg', '.md', '.txt', '.wasm')
        if small := small and 'gzip' in self.headers.get('Accept-Encoding', ''): data = gzip.compress(data, 6, mtime=0)
        self.send_response(200)
        self.send_header('Content-Type', self.guess_type(str(path)))
        self.send_header('Content-Length', str(len(data)))
        self.send_header('Cache-Control', 'no-cache')
        if small: self.send_header('Content-Encoding', 'gzip')
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args): pass


def serve(site, port=0):
    "A server for `site` on this machine only; port 0: any free one."
    return http.server.ThreadingHTTPServer(('127.0.0.1', port), partial(Handler, directory=str(site)))


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--preview', nargs='?', type=int, const=0, metavar='PORT', help='serve the site afterwards (any free port if none is given)')
    args = parser.parse_args()
    os.chdir(root)
    site = build()
    if args.preview is not None:
        server = serve(site, args.preview)
        print(f'http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)', flush=True)
        try: server.serve_forever()
        except KeyboardInterrupt: server.server_close()
