"""The site, as a reader meets it: built once, opened in headless Chromium, the lesson done by clicking and typing.

Needs Chromium and npm; without them the tests are skipped, unless MINIVLLM_BROWSER is set (as `.ci/run` does)."""
import html, importlib.util, json, os, re, shutil, sys, threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest
import yaml

root = Path(__file__).resolve().parent.parent
chromium = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
notebooks = sorted((root/'nbs').glob('*.ipynb'))
page_of = {f.name: re.sub(r'^\d+[a-z]*_', '', f.stem) + '.html' for f in notebooks}
pages = sorted(page_of.values())
WIDE, NARROW = dict(width=1280, height=900), dict(width=390, height=844)

if not (chromium and shutil.which('npm')) and not os.environ.get('MINIVLLM_BROWSER'):
    pytest.skip('the site is tested with Chromium and npm, and one of them is not installed', allow_module_level=True)


@pytest.fixture(scope='module')
def docs():
    spec = importlib.util.spec_from_file_location('docs', root/'.ci/docs.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='module')
def site(docs):
    "The folder with the built site."
    before = os.getcwd()
    os.chdir(root)
    try: return Path(docs.build())
    finally: os.chdir(before)


@pytest.fixture(scope='module')
def base(docs, site):
    server = docs.serve(site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_address[1]}/'
    server.shutdown()
    server.server_close()


@pytest.fixture(scope='module')
def browser():
    from playwright.sync_api import sync_playwright
    flags = '--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync'.split()
    with sync_playwright() as p:
        b = p.chromium.launch(executable_path=chromium, args=flags)
        yield b
        b.close()


class Visit:
    "A page and everything that went wrong on it."
    def __init__(self, browser, base, viewport=WIDE, scheme='light'):
        self.base, self.bad, self.asked, self.bytes = base, [], [], 0
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme)
        self.context.set_default_timeout(60_000)
        self.page = self.context.new_page()
        self.page.on('console', lambda m: self.bad.append(f'{m.type}: {m.text[:300]}') if m.type in ('error', 'warning') else None)
        self.page.on('pageerror', lambda e: self.bad.append(f'exception: {str(e)[:300]}'))
        self.page.on('requestfailed', lambda r: self.bad.append(f'failed: {r.url}') if r.failure != 'net::ERR_ABORTED' else None)   # aborted: by leaving the page
        self.page.on('response', lambda r: self.bad.append(f'{r.status}: {r.url}') if r.status >= 400 else None)
        self.page.on('request', lambda r: self.ask(r.url))
        cdp = self.context.new_cdp_session(self.page)
        cdp.send('Network.enable')
        cdp.on('Network.loadingFinished', lambda e: setattr(self, 'bytes', self.bytes + e['encodedDataLength']))

    def ask(self, url):
        self.asked.append(url)
        if not url.startswith((self.base, 'data:', 'blob:')): self.bad.append(f'another host: {url}')

    def open(self, name):
        self.page.goto(self.base + name, wait_until='load')
        self.page.wait_for_timeout(150)
        return self.page

    def __enter__(self): return self
    def __exit__(self, *error):
        self.context.close()
        if not any(error): assert not self.bad, '\n'.join(self.bad)


# --- files

def test_site_has_every_chapter(site):
    missing = [p for p in pages if not (site/p).is_file()]
    assert not missing
    listed = (site/'llms.txt').read_text(encoding='utf-8')
    searched = {e['href'].split('#')[0] for e in json.loads((site/'search.json').read_text(encoding='utf-8'))}
    for p in pages:
        text = (site/p).read_text(encoding='utf-8')
        assert p.replace('.html', '.llms.md') in listed and p in searched
        assert 'favicon.svg' in text and 'id="quarto-search"' in text and 'quarto-color-scheme-toggle' in text
    order = re.findall(r'[\w]+\.ipynb', json.dumps(yaml.safe_load((root/'_quarto.yml').read_text(encoding='utf-8'))['website']['sidebar']))
    assert sorted(order) == sorted(page_of), 'the sidebar of _quarto.yml does not list every notebook once'
    for before, after in zip(order, order[1:]):
        nav = (site/page_of[before]).read_text(encoding='utf-8').partition('nav-page-next')[2]
        assert page_of[after] in nav[:400], f'{before} does not lead to {after}'


def test_site_has_reference_tables_and_source_links(site):
    from minivllm.pages import definitions
    for f in notebooks:
        text = (site/page_of[f.name]).read_text(encoding='utf-8')
        sources = [''.join(c['source']) for c in json.loads(f.read_text(encoding='utf-8'))['cells'] if c['cell_type'] == 'code']
        names = [n for s in sources if re.search(r'^#\|\s*export\b', s, re.M) for n in definitions(s)]
        links = re.findall(r'blob/main/(minivllm/[\w/]+\.py)#L(\d+)-L(\d+)', text)
        assert len(links) >= len(names), f'{f.name}: {len(names)} public names, {len(links)} source links'
        for file, first, last in links:
            lines = (root/file).read_text(encoding='utf-8').splitlines()[int(first)-1:int(last)]
            assert any(re.match(r'\s*(async )?(def|class|@)', l) for l in lines[:1]), f'{file}#L{first} is not the beginning of a definition'


def test_site_shows_nothing_of_the_machine_that_built_it(site):
    "No folder of its Python and no address of an object, in any page or in what search and language models read."
    here = {str(root), sys.prefix, sys.executable, str(Path.home()/'.cache')}
    for f in (f for pattern in ('*.html', '*.json', '*.txt', '*.md') for f in site.glob(pattern)):
        text = f.read_text(encoding='utf-8')
        assert not (found := [p for p in here if p in text] + re.findall(r' at 0x[0-9a-f]{6,}', text)), f'{f.name} shows {found[0]}'


def test_site_links_lead_somewhere(site):
    ids, links = {}, []
    for f in site.rglob('*.html'):
        text, name = f.read_text(encoding='utf-8'), f.relative_to(site).as_posix()
        ids[name] = set(map(html.unescape, re.findall(r'\sid="([^"]+)"', text)))
        links += [(name, html.unescape(u)) for u in re.findall(r'\s(?:href|src)="([^"]+)"', text)]
    for page, url in links:
        if urlsplit(url).scheme or url.startswith('//'): continue
        target, fragment = urldefrag(urljoin(page, unquote(url)))
        assert (site/target).exists(), f'{page} links to {url}'
        if fragment and target in ids: assert fragment in ids[target], f'{page} links to {url}: no such place'


def test_site_python_is_pure(site):
    "What the page's Python gets has no torch, numpy or nbdev in it."
    import subprocess, tempfile
    with tempfile.TemporaryDirectory() as tmp:
        shutil.unpack_archive(site/'site_libs/minivllm.zip', tmp)
        code = "import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'nbdev', 'IPython', 'ipywidgets'])); from minivllm.lab import *; print(Experiment().say())"
        out = subprocess.run([sys.executable, '-I', '-S', '-c', f'import sys; sys.path.insert(0, {tmp!r}); {code}'], capture_output=True, text=True)
        assert out.returncode == 0 and out.stdout.startswith('Round 1'), out.stderr


# --- pages

def faults(page, code=True, **options):
    "Serious accessibility faults that axe-core finds; with `code=False` it does not look into highlighted code, of which there is much and always the same."
    if not page.evaluate('window.axe !== undefined'): page.add_script_tag(path=root/'node_modules/axe-core/axe.min.js')
    where = dict(exclude=[] if code else [['main pre > code']])
    found = page.evaluate('([where, options]) => axe.run(where, options)', [where, dict(resultTypes=['violations'], **options)])['violations']
    return [(f['id'], f['nodes'][0]['html'][:200], f['nodes'][0].get('failureSummary', '')[:300]) for f in found if f['impact'] in ('serious', 'critical')]


def too_wide(page): return page.evaluate('document.documentElement.scrollWidth - window.innerWidth') > 1


@pytest.mark.parametrize('name', pages)
def test_page(browser, base, name):
    "No error, nothing missing, no other host, light enough, accessible in light and dark, nothing wider than a phone; scrolled through, so that diagrams are drawn."
    with Visit(browser, base) as v:
        page = v.open(name)
        assert v.bytes < 300_000, f'{v.bytes:,} bytes before anything is touched'
        assert not any('pyodide' in u or 'mermaid' in u for u in v.asked)
        assert not too_wide(page)
        page.mouse.move(640, 450)
        for el in page.locator('pre.mermaid').all():
            el.scroll_into_view_if_needed()
            page.wait_for_function('e => e.classList.contains("drawn")', arg=el.element_handle())
        for el in page.locator('img').all(): el.scroll_into_view_if_needed()
        page.wait_for_function('[...document.images].every(i => i.complete && i.naturalWidth)')
        assert page.locator('.katex-error').count() == 0
        assert not re.search(r'(?<![`\w])@(fig|tbl|sec|eq)-|\{#(fig|sec)-|^:::', page.inner_text('main'), re.M), 'unrendered Markdown'
        code = name in ('index.html', 'sequence.html')
        assert not faults(page, code)
        page.evaluate('smalldocsToggleScheme()')
        page.wait_for_function('document.documentElement.classList.contains("quarto-dark")')
        page.wait_for_timeout(300)
        assert not faults(page, code, runOnly=['color-contrast']), 'in the dark'
        page.set_viewport_size(NARROW)
        page.wait_for_timeout(100)
        assert not too_wide(page), 'on a phone'


def top(page): return page.locator('pre.mermaid').first.evaluate('e => e.getBoundingClientRect().top + scrollY')


@pytest.mark.parametrize('name', [page_of[f.name] for f in notebooks if '```mermaid' in f.read_text(encoding='utf-8') and f.name != '14a_pages.ipynb'])
def test_diagrams_wait_for_the_reader(browser, base, name):
    "mermaid is fetched when a diagram is near the screen of somebody who does something there: not while fonts and images are late, and not by opening a page."
    with Visit(browser, base) as v:
        page, late = v.page, []
        def fetched():
            page.wait_for_timeout(300)
            return any('mermaid' in u for u in v.asked)
        page.route('**/*', lambda r: late.append(r) if r.request.resource_type in ('image', 'font') else r.continue_())
        page.goto(base + name, wait_until='domcontentloaded')
        assert not fetched() and late, 'while fonts and images are on their way'
        for r in late: r.continue_()
        page.unroute_all(behavior='ignoreErrors')
        page.wait_for_load_state('load')
        assert not fetched(), 'by opening the page'
        page.set_viewport_size(dict(width=1280, height=int(top(page)) + 100))
        assert not fetched(), 'by opening the page on a screen so tall that the diagram is on it'
        page.set_viewport_size(WIDE)
        page.mouse.move(640, 450)
        assert top(page) < WIDE['height'] + 200 or not fetched(), 'far from the diagram'
        page.locator('pre.mermaid').first.scroll_into_view_if_needed()
        page.locator('pre.mermaid.drawn').first.wait_for()


@pytest.mark.parametrize('name', ['index.html', 'scheduler.html'])
def test_page_on_a_phone(browser, base, name):
    with Visit(browser, base, NARROW) as v:
        page = v.open(name)
        assert not too_wide(page)
        page.get_by_role('button', name='Toggle sidebar navigation').click()
        page.locator('#quarto-sidebar').get_by_text('Sequence').first.click()
        page.wait_for_url(re.compile('sequence'))


def test_search_and_dark_mode(browser, base):
    with Visit(browser, base) as v:
        page = v.open('index.html')
        page.keyboard.press('/')
        page.keyboard.type('token budget')
        page.locator('.search-result').first.wait_for()
        page.keyboard.press('Enter')
        page.wait_for_url(lambda url: 'index' not in url)
        assert page.locator('h1.title').count() == 1
        page.locator('.quarto-color-scheme-toggle').first.click()
        page.wait_for_function('document.documentElement.classList.contains("quarto-dark")')
        v.open('sequence.html')
        assert page.evaluate('document.documentElement.classList.contains("quarto-dark")'), 'the choice is forgotten'


# --- the lesson

def lab(page, name): return page.locator(f'main .mv-lab[data-lab={name}]').first


def says(box, text): box.locator('.mv-say').filter(has_text=text).wait_for()


@pytest.mark.parametrize('viewport', [WIDE, NARROW], ids=['1280', '390'])
def test_lesson(browser, base, viewport):
    "As a reader does it: watch, predict, run, explain, again with B = 20, then the dilemma."
    with Visit(browser, base, viewport) as v:
        page = v.open('prefill_decode.html')
        assert not any('pyodide' in u for u in v.asked), 'Python is loaded before anybody wants it'

        film = lab(page, 'Animation')
        assert film.locator('.mv-tok').count() > 20 and film.get_attribute('data-live') is None      # the picture before
        film.get_by_role('button', name='Step', exact=False).click()
        says(film, 'Pass 1, step 1: prefill reads 20 prompt tokens')
        assert film.locator('.mv-row .mv-tok.new').count() == 20
        film.get_by_label('Speed').select_option('500')
        film.get_by_role('button', name='Play').click()
        says(film, 'Pass 2, step 2: decode feeds 2 last tokens')
        film.get_by_role('button', name='Pause').click()
        assert '[2, 1]' in film.locator('.mv-tensors').inner_text() and 'context_lens' in film.locator('.mv-tensors').inner_text()
        film.get_by_role('button', name='Play').click()
        says(film, 'Pass 7')
        film.get_by_role('button', name='Back').click()
        says(film, 'Pass 6')
        assert 'TPOT' in film.inner_text() and 'TTFT' in film.inner_text() and 'five, six' in film.inner_text()

        quiz = lab(page, 'Experiment')
        run, decode, check = (quiz.get_by_role('button', name=n) for n in ('Run prefill', 'Run one decode step', 'Check'))
        assert run.is_disabled() or not quiz.get_by_label('Tokens in prefill').input_value()
        quiz.get_by_label('Tokens in prefill').press_sequentially('24')
        quiz.get_by_label('Shape of input_ids').press_sequentially('[2, 1]')
        run.click()
        says(quiz, 'Prefill computed 20 tokens')
        assert '[20]' in quiz.locator('.mv-tensors').inner_text()
        decode.click()
        says(quiz, 'shape [2, 1]')
        check.click()
        says(quiz, '1 of 2')
        assert 'padded' in quiz.inner_text() and '8 + 12 = 20' in quiz.inner_text()
        quiz.get_by_role('button', name='Next: B = 20').click()
        says(quiz, 'Round 2')
        quiz.get_by_label('Tokens in prefill').press_sequentially('28')
        quiz.get_by_label('Shape of input_ids').press_sequentially('2, 1')
        run.click()
        says(quiz, 'Prefill computed 28 tokens')
        assert '[28]' in quiz.locator('.mv-tensors').inner_text()
        decode.click()
        says(quiz, 'shape [2, 1]')
        check.click()
        says(quiz, '2 of 2')
        quiz.get_by_text('Why may two requests with different histories share one [2, 1]?').click()
        assert quiz.get_by_text('attention reads each through its own table').is_visible()

        knobs = lab(page, 'Dilemma')
        knobs.get_by_label('Policy').select_option('decode_first')
        says(knobs, 'decode_first: the newcomer waits')
        budget = knobs.get_by_label('Budget per step')
        for _ in range(4): budget.press('ArrowLeft')                          # 512 -> 32, by keyboard
        says(knobs, 'more than')
        assert knobs.locator('.mv-chart > i').count() > 20
        knobs.get_by_label('Policy').select_option('balanced')
        says(knobs, 'balanced: the newcomer waits')
        assert not too_wide(page)
        if viewport is WIDE: assert not faults(page)


def test_lesson_by_keyboard(browser, base):
    "No mouse: the round is done with Tab, typing and Enter."
    with Visit(browser, base) as v:
        page = v.open('prefill_decode.html')
        quiz = lab(page, 'Experiment')
        quiz.get_by_label('Tokens in prefill').focus()
        page.keyboard.type('20')
        page.keyboard.press('Tab')
        page.keyboard.type('[2, 1]')
        quiz.locator('button[data-name=prefill]:enabled').wait_for()
        for text in ('Prefill computed 20', 'shape [2, 1]', '2 of 2'):
            page.keyboard.press('Tab')
            if page.evaluate('document.activeElement.textContent') == 'Run one decode step' and text == '2 of 2': page.keyboard.press('Tab')
            page.keyboard.press('Enter')
            says(quiz, text)


# --- the book

def test_book_is_light_and_explained(capsys):
    "The notebooks weigh little, and chapters explain and test what they export. `pytest -s` shows the table."
    from minivllm.pages import book_table, chapter_counts
    print(book_table())
    files = [f for f in (root/'nbs').rglob('*') if f.is_file() and '.ipynb_checkpoints' not in f.parts]
    assert sum(f.stat().st_size for f in files) < 2_000_000
    faults = []
    for f in notebooks:
        n = chapter_counts(f)
        if not n['exports']: continue                # the index and the glossary
        if n['tested'] * 2 < n['exports']: faults.append(f'{f.name}: {n["tested"]} tested cells for {n["exports"]} exported ones')
        if n['words'] < 6 * n['lines']: faults.append(f'{f.name}: {n["words"]} words for {n["lines"]} exported lines; 6 for each say why it is as it is')
    assert not faults, '\n'.join(faults)


def test_glossary_terms_are_in_their_chapters():
    "Each term of the glossary stands in the chapter it points to, with its Chinese name."
    rows = re.findall(r'^\| ([^|]+) \| ([^|]+) \| [^|]+ \| \[\w+\]\(([^)]+)\) \|$', '\n'.join(''.join(c['source']) for c in json.loads((root/'nbs/glossary.ipynb').read_text(encoding='utf-8'))['cells']), re.M)
    assert len(rows) > 40
    for term, chinese, file in rows:
        text = '\n'.join(''.join(c['source']) for c in json.loads((root/'nbs'/file).read_text(encoding='utf-8'))['cells'] if c['cell_type'] == 'markdown')
        assert f'{chinese} ({term.split(",")[0]})' in text, f'{file} does not name {term}, {chinese}'
    assert {'预填充', '解码', '调度器', '键值缓存', '块表', '首 token 延迟'} <= {chinese for _, chinese, _ in rows}
