"The documentation without Quarto: the whole site is rendered and looked at in a browser, and README.md is that of index.ipynb."
import functools,html,json,os,re,shutil,subprocess,sys,tempfile,threading
from http.server import SimpleHTTPRequestHandler,ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote,urldefrag,urlsplit
import nbformat,pytest
from conftest import root

names = 'chromium','chromium-browser','google-chrome','google-chrome-stable','chrome'
chromium = next(filter(None, map(shutil.which, names)), None)
needs_browser = pytest.mark.skipif(chromium is None, reason='no Chromium found')

flags = ['--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
    '--disable-component-update', '--disable-sync', '--dump-dom']

# All pages are opened side by side, so that the browser starts once; the page's text is what a reader would see.
opener = '''<!DOCTYPE html><title>opener</title><body>{frames}<pre id="seen"></pre><script>
window.onload = () => {{
  const seen = [...document.querySelectorAll('iframe')].map(f => {{
    const d = f.contentDocument, all = (q, g) => [...d.querySelectorAll(q)].map(g);
    return {{url: d.location.href, title: d.title, text: d.body.innerText,
      ids: all('[id]', e => e.id), links: all('a[href]', e => e.href),
      loads: all('img[src],script[src],link[href]', e => e.src || e.href),
      unseen: all('img', e => e).filter(e => !e.naturalWidth).map(e => e.src.slice(0, 99)),
      errors: all('.output_error', e => e.innerText)}};
  }});
  document.getElementById('seen').textContent = encodeURIComponent(JSON.stringify(seen));
}};
</script>'''

class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args): pass

def look(folder):
    "What a browser sees on each HTML page in `folder`, by its path"
    pages = sorted(o.relative_to(folder).as_posix() for o in folder.rglob('*.html'))
    frames = ''.join(f'<iframe src="{html.escape(o)}" width="1200" height="800"></iframe>' for o in pages)
    (folder/'opener.html').write_text(opener.format(frames=frames))
    server = ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f'http://127.0.0.1:{server.server_port}/'
    try:
        with tempfile.TemporaryDirectory() as profile:
            dom = subprocess.run([chromium, *flags, f'--user-data-dir={profile}', base+'opener.html'], capture_output=True, timeout=400).stdout
    finally:
        server.shutdown()
        server.server_close()
        (folder/'opener.html').unlink()
    seen = re.search(rb'<pre id="seen">(.+?)</pre>', dom)
    assert seen, f'the browser opened nothing: {dom[-2000:]}'
    return {o['url'].removeprefix(base): o for o in json.loads(unquote(seen[1].decode()))}, base

def faults(folder):
    "What is wrong on the pages in `folder`, each in a line"
    seen,base = look(folder)
    def _fault(o):
        for e in o['errors']: yield f'error output: {e[:200]}'
        if 'Traceback (most recent call last)' in o['text']: yield 'a traceback'
        for m in re.findall(r'^\s*(?:#\||:::).*$', o['text'], re.M): yield f'raw directive: {m.strip()}'
        for m in o['unseen']: yield f'picture that does not load: {m}'
        for m in o['loads']:
            if not m.startswith((base, 'data:')): yield f'loads from elsewhere: {m}'
        if not o['title'].strip(): yield 'no title'
        for href in o['links']:
            url,frag = urldefrag(href)
            if not href.startswith(base):
                if urlsplit(href).scheme not in ('http','https','mailto') or 'localhost' in href: yield f'broken link: {href}'
                continue
            path = unquote(url.removeprefix(base))
            if path not in seen:
                if not (folder/path).is_file(): yield f'broken link: {path}'
            elif frag and unquote(frag) not in seen[path]['ids']: yield f'broken link: {path}#{frag}'
    return sorted({f'{page}: {fault}' for page,o in seen.items() for fault in _fault(o)})

def render(folder):
    "Run tools/docs.py in `folder`"
    env = {**os.environ, 'PYTHONPATH': str(root)}
    res = subprocess.run([sys.executable, root/'tools/docs.py'], cwd=folder, env=env, capture_output=True, text=True)
    assert res.returncode==0, res.stdout+res.stderr

@pytest.fixture(scope='module')
def project(tmp_path_factory):
    "A copy of the project with its site and README rendered afresh"
    dest = tmp_path_factory.mktemp('docs')
    ignore = shutil.ignore_patterns('.*', '__pycache__')
    for o in 'nbs','fastseqprep': shutil.copytree(root/o, dest/o, ignore=ignore)
    for o in 'pyproject.toml','settings.ini': shutil.copy2(root/o, dest)
    render(dest)
    return dest

def test_every_notebook_has_a_page(project, mirror):
    from nbdev.config import nbpath2html
    pages = {nbpath2html(o.relative_to(root/'nbs')).as_posix() for o in mirror.notebooks}
    made = {o.relative_to(project/'_docs').as_posix() for o in (project/'_docs').rglob('*.html')}
    assert made>=pages and 'index.html' in made

def test_sidebar_order(project, mirror):
    from nbdev.config import nbpath2html
    order = sorted((o.relative_to(root/'nbs') for o in mirror.notebooks), key=lambda o: (len(o.parts), o.name!='index.ipynb', o))
    nav = re.search('<nav>.*?</nav>', (project/'_docs/index.html').read_text())[0]
    links = [o for o in re.findall('href="([^"#]+)"', nav)]
    assert links==[nbpath2html(o).as_posix() for o in order]

@needs_browser
def test_pages_in_a_browser(project):
    if found := faults(project/'_docs'): pytest.fail('\n'.join(found), pytrace=False)

@pytest.fixture(scope='module')
def small(tmp_path_factory):
    "A small project with what a notebook may hold, rendered"
    dest = tmp_path_factory.mktemp('small')
    (dest/'pyproject.toml').write_text('[project]\nname = "small"\nversion = "0.0.1"\n[tool.nbdev]\n')
    (dest/'small').mkdir()
    (dest/'small/__init__.py').write_text('__version__ = "0.0.1"\n')
    picture = dict(output_type='display_data', metadata={}, data={'image/svg+xml': ['<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>']})
    def _write(name, *cells):
        nb = nbformat.v4.new_notebook(cells=[getattr(nbformat.v4, f'new_{kind}_cell')(src, **kw) for kind,src,kw in cells])
        (dest/'nbs'/name).parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, dest/'nbs'/name)
    def _md(src): return 'markdown',src,{}
    def _code(src, *outputs): return 'code',src,dict(outputs=[nbformat.from_dict(o) for o in outputs])
    said = dict(output_type='stream', name='stdout', text='see [this](that.ipynb)\n')
    _write('index.ipynb', _md('# small\n\n> A small project'), _md('Read [core](00_core.ipynb#two-words) or [more](tutorials/a.ipynb).'),
        _code("#| echo: false\nprint('unseen')", said), _code("fns['x'](00_core.ipynb)"), _code('draw()', picture), _code('#| include: false\nsecret()'))
    _write('00_core.ipynb', _md('# Core'), _md('## Two words\n\n[up](index.ipynb){.button}\n\n::: {.callout-note}\nTake *care*\n:::'))
    _write('tutorials/index.ipynb', _md('# Tutorials'), _md('All of them'))
    _write('tutorials/a.ipynb', _md('# First steps'), _md('[back](../00_core.ipynb)'))
    render(dest)
    return dest

def test_small_readme(small):
    text = (small/'README.md').read_text()
    assert text.startswith('# small\n\n> A small project\n')
    for o in ('[core](nbs/00_core.ipynb)', '[more](nbs/tutorials/a.ipynb)', 'see [this](that.ipynb)', "fns['x'](00_core.ipynb)"): assert o in text
    for o in 'unseen','secret','#|': assert o not in text
    picture = re.search(r'!\[.*?\]\((README_files/.+?\.svg)\)', text)[1]
    assert '<svg' in (small/picture).read_text()

def test_small_pages(small):
    index,core,a = ((small/'_docs'/o).read_text() for o in ('index.html','core.html','tutorials/a.html'))
    assert 'href="core.html#two-words"' in index and 'svg' in index and 'unseen' not in index and 'secret' not in index
    assert 'id="two-words"' in core and '<div class="callout-note">' in core and '<em>care</em>' in core and '{.button}' not in core
    assert 'href="../core.html"' in a
    assert re.findall('href="([^"#]+)"', re.search('<nav>.*?</nav>', index)[0])==['index.html','core.html','tutorials/index.html','tutorials/a.html']

@needs_browser
def test_small_pages_in_a_browser(small): assert faults(small/'_docs')==[]

@needs_browser
def test_faults_are_found(tmp_path):
    page = '<!DOCTYPE html><title>{}</title><body>{}'
    good = '<h1 id="top">Fine</h1><a href="#top">up</a> <a href="b.html#there">b</a> <a href="https://pola.rs">polars</a>'
    (tmp_path/'a.html').write_text(page.format('a', good))
    (tmp_path/'b.html').write_text(page.format('b', '<p id="there"><code>x = 1 #| y</code>'))
    assert faults(tmp_path)==[]
    bad = ('<a href="gone.html">g</a><a href="b.html#gone">h</a><img src="no.png"><pre>#| echo: false</pre><p>::: {.callout-note}</p>'
        '<pre>Traceback (most recent call last)</pre><div class="output_error">KeyError: 3</div>'
        '<div style="display:none">#| hidden</div><script src="http://127.0.0.1:9/x.js"></script>')
    (tmp_path/'c.html').write_text(page.format('', bad))
    found = [o.removeprefix('c.html: ') for o in faults(tmp_path)]
    assert found==['a traceback', 'broken link: b.html#gone', 'broken link: gone.html', 'error output: KeyError: 3',
        'loads from elsewhere: http://127.0.0.1:9/x.js', 'no title', f'picture that does not load: {found[6][28:]}',
        'raw directive: #| echo: false', 'raw directive: ::: {.callout-note}']

def test_readme(project, mirror):
    diffs = [mirror.diff(root/'README.md', project/'README.md')]
    pictures = [{o.name: o.read_bytes() for o in (p/'README_files').glob('*')} for p in (root,project)]
    if pictures[0]!=pictures[1]: diffs.append('README_files differs')
    if any(diffs): pytest.fail('README.md is not that of index.ipynb; run `python tools/docs.py --readme`.\n'+'\n'.join(diffs), pytrace=False)
