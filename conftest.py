"""Collects every notebook under `nbs/` as three tests, so that `pytest` is the one test command.

    nbs/09_ragged.ipynb::sync     its modules are what exporting it gives
    nbs/09_ragged.ipynb::clean    `nbdev-clean` would change nothing
    nbs/09_ragged.ipynb::run      every cell runs, in a process of its own

`pytest nbs/09_ragged.ipynb` runs the three of one notebook, `pytest nbs/09_ragged.ipynb::run` one of them, and
`pytest -k sync` that one for all notebooks. Nothing is written into the project: notebooks are exported, cleaned and
run in copies.
"""
import os,shutil,signal,subprocess,sys,tempfile
from contextlib import suppress
from difflib import unified_diff
from functools import cached_property
from pathlib import Path
import pytest

root = Path(__file__).parent.resolve()
if 'PYTEST_XDIST_WORKER' in os.environ: # workers share the cores; more threads than cores would wait for each other, busily
    for o in 'OMP_NUM_THREADS','MKL_NUM_THREADS': os.environ.setdefault(o, '1')
run_timeout = 900 # seconds for a whole notebook

def is_notebook(path):
    "Is `path` a notebook that nbdev looks at: under `nbs/`, and neither hidden nor underscored?"
    path,nbs = Path(path),root/'nbs'
    return path.suffix=='.ipynb' and path.is_relative_to(nbs) and not any(o[0] in '._' for o in path.relative_to(nbs).parts)

class NotebookError(Exception):
    "What is wrong with a notebook, in words for its author"

class Mirror:
    "Copies of the project in a temporary folder, in which notebooks are exported, cleaned and run"
    def __init__(self, tmp):
        self.tmp = Path(tmp).resolve()
        self.notebooks = sorted(filter(is_notebook, (root/'nbs').rglob('*.ipynb')), key=lambda o: o.name)

    def _copy(self, name):
        dest = self.tmp/name
        shutil.copytree(root/'nbs', dest/'nbs', ignore=shutil.ignore_patterns('.*', '_*'))
        for f in 'pyproject.toml','settings.ini':
            if (root/f).exists(): shutil.copy2(root/f, dest)
        return dest

    @cached_property
    def exported(self):
        "A copy with only the notebooks, exported afresh; what could not be exported is kept in `errors`"
        from fastcore.xtras import working_directory
        from nbdev.config import get_config
        from nbdev.doclinks import nbdev_export
        from nbdev.export import nb_export
        dest,self.errors = self._copy('exported'),{}
        self.lib = get_config(dest).lib_path.relative_to(dest)
        (dest/self.lib).mkdir()
        shutil.copy2(root/self.lib/'__init__.py', dest/self.lib)
        with working_directory(dest):
            for nb in self.notebooks:
                try: nb_export(dest/nb.relative_to(root), lib_path=dest/self.lib)
                except Exception as e: self.errors[nb] = e
            try: nbdev_export(path=dest/self.lib) # there is no notebook in it: this makes only the index
            except Exception as e: self.errors['index'] = e
        return dest

    @cached_property
    def cleaned(self): return self._copy('cleaned')

    @cached_property
    def runs(self): return self._copy('runs')

    def modules(self, base):
        "The modules of the package under `base`, relative to it"
        base = base/self.lib
        return {o.relative_to(base) for o in base.rglob('*.py') if o.name!='_modidx.py' and '.ipynb_checkpoints' not in o.parts}

    def diff(self, path, new):
        "Difference between the project's file `path` and `new`, which it should be; empty if there is none"
        def _lines(p): return p.read_text(encoding='utf-8').splitlines() if p.exists() else []
        name = path.relative_to(root).as_posix()
        lines = list(unified_diff(_lines(path), _lines(new), f'{name} (is)', f'{name} (should be)', lineterm=''))
        if not lines and path.exists()!=new.exists(): lines = [f'{name}: {"should not exist" if path.exists() else "is missing"}']
        return '\n'.join(lines[:60] + ['…']*(len(lines)>60))

    def check_sync(self, nb):
        fresh = self.exported
        if nb in self.errors: raise NotebookError(f'{nb.name} cannot be exported: {self.errors[nb]!r}')
        def _mine(base, mod):
            f = base/self.lib/mod
            return f.exists() and f'{os.path.relpath(base/nb.relative_to(root), f.parent)}'.replace(os.sep, '/') in f.read_text(encoding='utf-8')
        mods = sorted(o for o in self.modules(fresh)|self.modules(root) if _mine(fresh, o) or _mine(root, o))
        diffs = [o for o in (self.diff(root/self.lib/m, fresh/self.lib/m) for m in mods) if o]
        if diffs: raise NotebookError('\n\n'.join([f'Not what exporting {nb.name} gives; run `nbdev-export`.', *diffs]))

    def check_clean(self, nb):
        from fastcore.xtras import working_directory
        from nbdev.clean import nbdev_clean
        new = self.cleaned/nb.relative_to(root)
        with working_directory(self.cleaned): nbdev_clean(str(new))
        if diff := self.diff(nb, new): raise NotebookError(f'{nb.name} is not clean; run `nbdev-clean`.\n\n{diff}')

    def check_run(self, nb):
        from nbdev.config import get_config
        nb = self.runs/nb.relative_to(root)
        code = ("import sys; from nbdev.test import test_nb\n"
                "sys.exit(not test_nb(sys.argv[1], skip_flags=sys.argv[2].split(), profile=False)[0])")
        env = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, [str(root), os.environ.get('PYTHONPATH')]))}
        with tempfile.TemporaryFile('w+', encoding='utf-8', errors='replace') as log:
            proc = subprocess.Popen([sys.executable, '-c', code, str(nb), get_config(root).tst_flags], cwd=nb.parent, env=env,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try: res = proc.wait(run_timeout)
            except subprocess.TimeoutExpired: res = f'took longer than {run_timeout} seconds'
            finally: # nothing that a notebook started outlives it
                with suppress(ProcessLookupError, PermissionError): os.killpg(proc.pid, signal.SIGKILL)
                proc.wait()
            log.seek(0)
            if res!=0: raise NotebookError(f'{nb.name} failed ({res})\n{log.read()[-20_000:]}')

mirror_key = pytest.StashKey[Mirror]()

def pytest_configure(config):
    tmp = tempfile.TemporaryDirectory(prefix='notebooks-')
    config.add_cleanup(tmp.cleanup)
    config.stash[mirror_key] = Mirror(tmp.name)

@pytest.fixture(scope='session')
def mirror(pytestconfig):
    "Copies of the project in which notebooks are exported, cleaned and run"
    return pytestconfig.stash[mirror_key]

class NotebookItem(pytest.Item):
    def runtest(self): getattr(self.config.stash[mirror_key], f'check_{self.name}')(self.path)
    def reportinfo(self): return self.path, None, self.nodeid
    def repr_failure(self, excinfo):
        return str(excinfo.value) if isinstance(excinfo.value, NotebookError) else super().repr_failure(excinfo)

class NotebookFile(pytest.File):
    def collect(self): return [NotebookItem.from_parent(self, name=o) for o in ('sync','clean','run')]

def pytest_collect_file(file_path, parent):
    if is_notebook(file_path): return NotebookFile.from_parent(parent, path=file_path)
