"The notebook tests themselves: a small project in which each kind of fault is made, and found."
import json,shutil
from pathlib import Path
import pytest
from fastcore.xtras import working_directory
from nbdev.doclinks import nbdev_export

pytest_plugins = 'pytester'
here = Path(__file__).parent

pyproject = '''
[project]
name = "mini"
version = "0.0.1"
[tool.nbdev]
title = "mini"
[tool.pytest.ini_options]
testpaths = ["tests", "nbs"]
'''

def cell(source, id, kind='code', **kw):
    code = dict(execution_count=None, outputs=[]) if kind=='code' else {}
    return dict(cell_type=kind, id=id, metadata={}, source=source.splitlines(True), **code, **kw)

core = [cell('#| default_exp core', 'a1'), cell('#| export\ndef double(x): return 2*x', 'a2'), cell('from mini.core import double\nassert double(2)==4', 'a3')]

def write(path, cells):
    title = cell(f'# {path.stem}\n\n> Made for a test', 'title', 'markdown')
    nb = dict(cells=[title, *cells], metadata={}, nbformat=4, nbformat_minor=5)
    path.write_text(json.dumps(nb, sort_keys=True, indent=1)+'\n', encoding='utf-8')

def export(path):
    with working_directory(path): nbdev_export()

@pytest.fixture
def project(pytester):
    "An exported, clean project with one module, and the notebook tests of this one"
    path = pytester.path
    for d in 'mini','nbs','tests': (path/d).mkdir()
    (path/'pyproject.toml').write_text(pyproject)
    (path/'mini/__init__.py').write_text('__version__ = "0.0.1"\n')
    shutil.copy(here.parent/'conftest.py', path)
    shutil.copy(here/'test_notebooks.py', path/'tests')
    write(path/nb, core)
    export(path)
    return pytester

def check(project, *failures, args=()):
    "Run the tests of `project` and see that `failures`, and nothing else, fail; returns what passed, and all that was printed"
    lines = project.runpytest_subprocess('-rA', '-p', 'no:cacheprovider', *args).outlines
    def _ids(*kinds): return {o.split()[1] for o in lines if o.startswith(kinds)}
    assert _ids('FAILED ','ERROR ')==set(failures), '\n'.join(lines)
    return _ids('PASSED '), '\n'.join(lines)

nb = 'nbs/00_core.ipynb'
checks = {f'{nb}::{o}' for o in ('sync','clean','run')}
index,orphans,titles = (f'tests/test_notebooks.py::{o}' for o in ('test_index','test_every_module_has_a_notebook','test_title_cells'))

def test_good_project(project):
    "All pass; notebooks that nbdev ignores are ignored; nothing is written, whatever a notebook does in its folder"
    (project.path/'nbs/.ipynb_checkpoints').mkdir()
    for o in '_draft.ipynb','.ipynb_checkpoints/00_core-checkpoint.ipynb': write(project.path/'nbs'/o, [cell('1/0', 'b0')])
    write(project.path/nb, core+[cell('from pathlib import Path\nfor o in "new.txt","00_core.ipynb": Path(o).write_text("x")', 'a4')])
    def _state(): return {o: o.read_bytes() for d in ('mini','nbs') for o in (project.path/d).rglob('*') if o.suffix not in ('','.pyc')}
    before = _state()
    assert check(project)[0] == checks | {index,orphans,titles}
    assert _state()==before

def test_one_notebook_or_one_check(project):
    write(project.path/'nbs/01_other.ipynb', [cell('1/0', 'b0')])
    assert check(project, args=[nb])[0]==checks
    assert check(project, args=[f'{nb}::sync'])[0]=={f'{nb}::sync'}

def test_broken_notebooks(project):
    "An error, a crash, and a failed check in a subfolder"
    (project.path/'nbs/tutorials').mkdir()
    write(project.path/nb, core+[cell('double(2)/0', 'a4')])
    write(project.path/'nbs/01_crash.ipynb', [cell('import os\nos.abort()', 'b0')])
    write(project.path/'nbs/tutorials/a.ipynb', [cell('from mini.core import *\nassert double(2)==5, "not five"', 'b0')])
    _,out = check(project, f'{nb}::run', 'nbs/01_crash.ipynb::run', 'nbs/tutorials/a.ipynb::run')
    assert 'ZeroDivisionError' in out and 'not five' in out

def test_stale_export(project):
    write(project.path/nb, [core[0], cell('#| export\ndef double(x): return x+x', 'a2'), core[2]])
    _,out = check(project, f'{nb}::sync')
    assert 'return x+x' in out and 'nbdev-export' in out

def test_files_changed_by_hand(project):
    "A module, the index, and a module that no notebook exports"
    for f,old,new in ('core.py','2*x','2 * x'), ('_modidx.py','double','triple'):
        f = project.path/'mini'/f
        f.write_text(f.read_text().replace(old, new))
    (project.path/'mini/old.py').write_text('x = 1\n')
    check(project, f'{nb}::sync', index, orphans)

def test_renamed_module(project):
    write(project.path/nb, [cell('#| default_exp centre', 'a1'), *core[1:]])
    check(project, f'{nb}::sync', index, orphans)

def test_syntax_error(project):
    "It is blamed on its notebook, not on others"
    write(project.path/'nbs/01_other.ipynb', [cell('#| default_exp other', 'b0'), cell('#| export\ndef f(:', 'b1')])
    check(project, 'nbs/01_other.ipynb::sync', 'nbs/01_other.ipynb::run', index)

def test_prose_in_a_title_cell(project):
    f = project.path/nb
    f.write_text(f.read_text().replace('> Made for a test', '> Made for a test\\nThis would be lost'))
    check(project, titles)

def test_dirty_notebooks(project):
    out = dict(output_type='execute_result', execution_count=None, metadata={}, data={'text/plain': ['<object object at 0x7f00>']})
    dirt = dict(count=dict(execution_count=3), metadata=dict(metadata=dict(scrolled=True)), address=dict(outputs=[out]))
    for name,kw in dirt.items(): write(project.path/f'nbs/{name}.ipynb', [cell('2', 'b0')|kw])
    _,out = check(project, *(f'nbs/{o}.ipynb::clean' for o in dirt))
    assert 'nbdev-clean' in out
