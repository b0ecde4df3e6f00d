"What holds for all notebooks together; what holds for each of them is collected by `conftest.py` of the top folder."
import json,re
import pytest
from conftest import root

def test_index(mirror):
    "The package's index and docstring, and its map for language models, are what exporting gives"
    fresh = mirror.exported
    if 'index' in mirror.errors: pytest.fail(f'The index cannot be made: {mirror.errors["index"]!r}', pytrace=False)
    files = mirror.lib/'_modidx.py', mirror.lib/'__init__.py', 'nbs/llms.txt'
    diffs = '\n'.join(filter(None, (mirror.diff(root/o, fresh/o) for o in files)))
    if diffs: pytest.fail(f'Not what exporting the notebooks gives; run `nbdev-export`.\n{diffs}', pytrace=False)

def test_every_module_has_a_notebook(mirror):
    fresh = mirror.exported
    stale = sorted(map(str, mirror.modules(root)-mirror.modules(fresh)))
    if stale: pytest.fail(f'No notebook exports these modules of {mirror.lib}; delete them: {", ".join(stale)}', pytrace=False)

def test_title_cells(mirror):
    "nbdev takes the first cell as title and description, and drops what else is in it from the site"
    def _rest(nb):
        cell = json.loads(nb.read_text(encoding='utf-8'))['cells'][0]
        lines = ''.join(cell['source']).splitlines()
        return [o for o in lines if o.strip() and not re.match(r'# |> |- \S+:', o)] or (len([o for o in lines if o.startswith('> ')])!=1 and ['description'])
    bad = [o.relative_to(root).as_posix() for o in mirror.notebooks if _rest(o)]
    if bad: pytest.fail('The first cell has to be `# Title` and one line `> description`, with prose in a cell after it: '+', '.join(bad), pytrace=False)
