"""Renders the documentation without Quarto: the site into `_docs/`, and `index.ipynb` into `README.md`.

    python tools/docs.py              # both
    python tools/docs.py --readme     # only README.md

The notebooks are processed by nbdev as for Quarto (`_proc/`), in the order and under the page names that Quarto would
give them, and rendered by nbconvert. The pages need no network and no server: open `_docs/index.html`.
"""
import posixpath,re,shutil
from html import escape
from pathlib import Path
from urllib.parse import urlsplit

import nbformat,yaml
from bs4 import BeautifulSoup
from fastcore.script import call_parse
from nbconvert import HTMLExporter,MarkdownExporter
from nbconvert.preprocessors import TagRemovePreprocessor
from nbdev.config import get_config,nbpath2html
from nbdev.quarto import nbdev_sidebar,refresh_quarto_yml
from nbdev.serve import proc_nbs
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

here = Path(__file__).parent

frame = '''<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><link rel="stylesheet" href="{up}style.css"></head>
<body><nav>{nav}</nav><main>{main}</main></body></html>
'''

def plain(nb):
    "Carry out the Quarto directives of a processed notebook's cells, and take them and Quarto's Markdown marks away"
    cells = []
    for cell in nb.cells:
        cell.pop('has_sd', None) # a mark of nbdev's, not of notebooks
        cell.metadata = nbformat.NotebookNode()
        if cell.cell_type=='code':
            head = re.match(r'(?:[ \t]*#\|.*(?:\n|$))*', cell.source)[0]
            opts = dict(re.findall(r'#\|\s*([\w-]+)\s*:?\s*(.*?)\s*$', head, re.M))
            cell.source = cell.source[len(head):]
            if opts.get('include')=='false': continue
            if opts.get('output')=='false': cell.outputs = []
            if opts.get('echo')=='false': cell.metadata.tags = ['echo-false']
            for out in cell.outputs:
                md = out.get('data', {}).get('text/markdown')
                if md: out.data['text/markdown'] = plain_md(md)
        elif cell.cell_type=='markdown': cell.source = plain_md(cell.source)
        cells.append(cell)
    nb.cells = cells
    return nb

def plain_md(md):
    "Markdown without Pandoc's link attributes and fenced blocks (`::: {.callout-note}`), which become divisions"
    md = re.sub(r'(\]\([^)\s]*\))\{[^}\n]*\}', r'\1', md)
    def _div(m): return f'\n<div class="{" ".join(re.findall(r"[.]([^ .}]+)", m[1]))}">\n' if m[1].strip() else '\n</div>\n'
    return re.sub(r'^:{3,}(.*)$', _div, md, flags=re.M)

def hide_inputs(exporter):
    "Have `exporter` leave out the source of the cells that `plain` marked"
    exporter.register_preprocessor(TagRemovePreprocessor(remove_input_tags={'echo-false'}), enabled=True)
    return exporter

class Page:
    "A processed notebook, its place in the site and what its front matter says"
    def __init__(self, proc, rel):
        self.rel,self.url,self.nb = rel,nbpath2html(rel).as_posix(),plain(nbformat.read(proc/rel, 4))
        meta = {}
        if self.nb.cells and self.nb.cells[0].cell_type=='raw':
            meta = next(yaml.safe_load_all(self.nb.cells.pop(0).source.strip()))
        self.title,self.description = meta.get('title') or Path(self.url).stem, meta.get('description') or ''

def link(href, page, urls):
    "Where `href`, found on `page`, leads within the site: `(path from the site's root, fragment)`; None if elsewhere"
    url = urlsplit(href)
    if url.scheme or url.netloc or not url.path: return None
    path = posixpath.normpath(posixpath.join('/', posixpath.dirname(page.url), url.path))[1:]
    if m := re.fullmatch(r'blob/[^/]+/(.+)\.py', path): return f'source/{m[1]}.html',url.fragment # nbdev's link to the source
    return urls.get(path, path),url.fragment

def relative(path, page): return posixpath.relpath(path, posixpath.dirname(page) or '.')

def contents(tree, page, pages, toc):
    "The sidebar: the pages in the order of the notebooks, and under the one shown its headings"
    items = []
    for o in tree:
        if isinstance(o, dict):
            name = escape(o['section'].replace('_', ' ').capitalize())
            if 'href' in o: name = f'<a href="{relative(pages[o["href"]].url, page)}">{name}</a>'
            items.append(f'<li><span>{name}</span>{contents(o["contents"], page, pages, toc)}</li>')
        elif o in pages:
            p = pages[o]
            here,sub = (' class="here"',toc) if p.url==page else ('','')
            items.append(f'<li><a{here} href="{relative(p.url, page)}">{escape(p.title)}</a>{sub}</li>')
    return f'<ul>{"".join(items)}</ul>'

def body(page, urls, exporter):
    "The page's HTML: headings get the ids that nbdev's links use, and links lead to pages of the site"
    html,_ = exporter.from_notebook_node(page.nb)
    soup = BeautifulSoup(html, 'html.parser')
    seen = {}
    for h in soup(re.compile('^h[1-6]$')):
        slug = re.sub(r'\s+', '-', re.sub(r'[^\w\s.-]', '', h.get_text().strip().lower())) or 'section'
        seen[slug] = seen.get(slug, -1)+1
        h['id'] = f'{slug}-{seen[slug]}' if seen[slug] else slug
    for a in soup('a', href=True):
        if to := link(a['href'], page, urls):
            path,frag = to
            if path.startswith('source/'): a['class'],frag = 'source', re.sub(r'^L(\d+)$', r'L-\1', frag)
            a['href'] = relative(path, page.url)+(f'#{frag}' if frag else '')
    title = f'<header><h1>{escape(page.title)}</h1><p>{escape(page.description)}</p></header>'
    toc = ''.join(f'<li><a href="#{h["id"]}">{escape(h.get_text())}</a></li>' for h in soup('h2'))
    return title+str(soup), f'<ul>{toc}</ul>' if toc else ''

def process(**kw):
    "The folder of processed notebooks, and the sidebar's tree of all notebooks"
    cfg = get_config()
    refresh_quarto_yml()
    nbdev_sidebar(force=True)
    proc = proc_nbs(**kw)
    tree = yaml.safe_load((cfg.nbs_path/'sidebar.yml').read_text())['website']['sidebar']['contents']
    return proc,tree

def flat(tree):
    "The notebooks in a sidebar's tree, in order"
    files = [f for o in tree for f in ([o.get('href', ''), *flat(o['contents'])] if isinstance(o, dict) else [o])]
    return [o for o in files if o.endswith('.ipynb')]

def page_urls(tree): return {o: nbpath2html(o).as_posix() for o in flat(tree)}

def render_site(proc, tree, dest):
    "Write the pages of the notebooks in `tree`, and of the modules' source, to `dest`"
    cfg = get_config()
    shutil.rmtree(dest, ignore_errors=True)
    shutil.copytree(proc, dest, ignore=shutil.ignore_patterns('*.ipynb', '*.yml', '*.qmd', '_*', '.*', 'llms.txt')) # images
    urls,pages = page_urls(tree), {o: Page(proc, o) for o in flat(tree)}
    exporter = hide_inputs(HTMLExporter(template_name='basic', exclude_input_prompt=True, exclude_output_prompt=True, exclude_anchor_links=True))
    exporter.register_filter('clean_html', lambda html: html) # the outputs are our own, and cleaning them takes longer than all else
    style = HtmlFormatter(style='default', linenos='inline', lineanchors='L', anchorlinenos=True, wrapcode=True)
    (dest/'style.css').write_text((here/'docs.css').read_text()+style.get_style_defs('.highlight'))

    def _write(url, title, main, toc=''):
        f = dest/url
        f.parent.mkdir(parents=True, exist_ok=True)
        full = title if title==cfg.title else f'{title} – {cfg.title}'
        f.write_text(frame.format(title=escape(full), up='../'*url.count('/'), nav=contents(tree, url, pages, toc), main=main), encoding='utf-8')

    order = list(pages.values())
    for i,page in enumerate(order):
        main,toc = body(page, urls, exporter)
        ends = [(o, arrow) for o,arrow in ((order[i-1] if i else None, '← {}'), (order[i+1] if i+1<len(order) else None, '{} →'))]
        foot = ''.join(f'<a href="{relative(o.url, page.url)}">{arrow.format(escape(o.title))}</a>' if o else '<span></span>' for o,arrow in ends)
        _write(page.url, page.title, f'{main}<footer>{foot}</footer>', toc)
    for py in sorted(cfg.lib_path.rglob('*.py')):
        rel = py.relative_to(cfg.config_path)
        _write(f'source/{rel.with_suffix(".html").as_posix()}', rel.as_posix(),
            f'<header><h1>{rel.as_posix()}</h1></header>{highlight(py.read_text(encoding="utf-8"), PythonLexer(), style)}')
    return [dest/p.url for p in order]

def render_readme(proc, tree, dest):
    "Write the README from its processed notebook: links lead to the notebooks, pictures lie beside it"
    cfg = get_config()
    page,urls = Page(proc, cfg.readme_nb), page_urls(tree)
    notebooks = {v:k for k,v in urls.items()}
    exporter = hide_inputs(MarkdownExporter())
    exporter.display_data_priority = ['text/markdown', 'image/svg+xml', 'image/png', 'text/plain']
    page.nb.metadata.language_info = dict(name='python')
    pictures = 'README_files'
    text,res = exporter.from_notebook_node(page.nb, resources=dict(output_files_dir=pictures))
    shutil.rmtree(dest.parent/pictures, ignore_errors=True)
    for name,data in res['outputs'].items():
        (dest.parent/pictures).mkdir(exist_ok=True)
        (dest.parent/name).write_bytes(data)
    nbs = cfg.nbs_path.relative_to(cfg.config_path).as_posix()

    def _link(m):
        to = link(m[1], page, urls)
        if not to or m[1] in res['outputs']: return m[0]
        path,frag = to
        if path.startswith('source/'): path,frag = f'{path[7:-5]}.py', frag and f'#{frag}'
        else: path,frag = f'{nbs}/{notebooks.get(path, path)}', ''
        return f']({path}{frag})'

    def _links(block): return block if block.startswith('```') else re.sub(r'(?m)^(?! {4}).*', _line, block)
    def _line(m): return re.sub(r'\]\(([^)\s]+)\)', _link, m[0])
    text = ''.join(map(_links, re.split(r'(?ms)(^```.*?^```$)', text))) # code stays as it is
    text = re.sub(r'\n{3,}', '\n\n', re.sub(r'[ \t]+$', '', text, flags=re.M))
    head = f'# {page.title}\n\n'+(f'> {page.description}\n\n' if page.description else '')
    dest.write_text(head+text.strip()+'\n', encoding='utf-8')
    return dest

@call_parse
def main(
    readme:bool=False, # Only README.md?
    n_workers:int=2,   # Processes that process notebooks; 0 for none but this one
):
    "Render the documentation site into `_docs/`, and README.md"
    cfg = get_config()
    proc,tree = process(n_workers=n_workers, **(dict(file_glob=cfg.readme_nb) if readme else {}))
    if not readme:
        pages = render_site(proc, tree, cfg.doc_path)
        print(f'{len(pages)} pages; open {pages[0]}')
    if cfg.readme_nb in flat(tree): print(render_readme(proc, tree, cfg.config_path/'README.md'))
