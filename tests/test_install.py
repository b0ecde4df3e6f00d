"What an install brings and what an import loads; the names of `fastseqprep.all`."
import configparser,importlib,json,os,re,shutil,subprocess,sys,zipfile
from importlib.metadata import distribution,PackageNotFoundError
from pathlib import Path
import pytest
from conftest import root
from packaging.requirements import Requirement

heavy = {'torch','fastai','pandas','matplotlib'}
cfg = configparser.ConfigParser()
cfg.read(root/'settings.ini')
cfg = cfg['DEFAULT']

def without(names):
    "Code for a process in which these packages are not installed"
    return f'''
import sys
from importlib.machinery import PathFinder
class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split('.')[0] in {set(names)} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Hide
'''

dev = {'nbdev','execnb','IPython'} # what only those have who work on the notebooks
hide = without(heavy|{'torchvision'}|dev) # no torch, no fastai, nothing that comes with them

def fresh(code, *args):
    "What `code` prints in a process of its own, read as JSON"
    env = {**os.environ, 'PYTHONPATH': str(root)}
    res = subprocess.run([sys.executable, '-c', code, *args], capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL)
    assert res.returncode==0, res.stderr
    return json.loads(res.stdout.splitlines()[-1])

loaded = f'\nimport json,sys; print(json.dumps(sorted({heavy} & set(sys.modules))))'

def test_import_loads_nothing_heavy():
    assert fresh('import fastseqprep'+loaded)==[]

def test_help_loads_nothing_heavy():
    code = '''
import sys
from fastseqprep.cli import main
sys.argv = ['fastseqprep','--help']
try: main()
except SystemExit as e: assert not e.code, e.code
'''
    assert fresh(code+loaded)==[]

def test_the_command_is_installed():
    exe = shutil.which('fastseqprep', path=os.pathsep.join([str(Path(sys.executable).parent), os.environ['PATH']]))
    assert exe, 'the command fastseqprep is not on the path'
    out = subprocess.run([exe, '--help'], capture_output=True, text=True, check=True).stdout
    assert 'demo' in out

def test_plain_install_brings_nothing_heavy():
    "All that the plain requirements require in turn, as installed here"
    todo,seen = [Requirement(o) for o in cfg['requirements'].split()], set()
    while todo:
        req = todo.pop()
        name = re.sub('[-_.]+', '-', req.name).lower()
        for extra in {'', *req.extras}:
            if (name,extra) in seen: continue
            seen.add((name,extra))
            try: needs = distribution(name).requires or []
            except PackageNotFoundError: continue
            todo += [r for r in map(Requirement, needs) if r.marker is None or r.marker.evaluate({'extra': extra})]
    assert not heavy & {name for name,_ in seen}
    assert {'polars','pyarrow','numpy'} <= {name for name,_ in seen}

def test_wheel(tmp_path):
    "The package as it is sent out: the modules, the licence, the command, and the metadata of settings.ini"
    src = tmp_path/'src'
    shutil.copytree(root/'fastseqprep', src/'fastseqprep', ignore=shutil.ignore_patterns('__pycache__'))
    for o in 'settings.ini','setup.py','pyproject.toml','README.md','LICENSE': shutil.copy2(root/o, src)
    cmd = [sys.executable, '-m', 'pip', 'wheel', '-q', '--no-deps', '--no-build-isolation', '-w', str(tmp_path), str(src)]
    res = subprocess.run(cmd, capture_output=True, text=True)
    assert res.returncode==0, res.stderr
    wheel = next(tmp_path.glob('*.whl'))
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        info = next(o.split('/')[0] for o in names if '.dist-info/' in o)
        meta,entry = (z.read(f'{info}/{o}').decode() for o in ('METADATA','entry_points.txt'))
    mods = {o.relative_to(root).as_posix() for o in (root/'fastseqprep').glob('*.py')}
    assert mods == {o for o in names if '.dist-info/' not in o}
    assert f'{info}/licenses/LICENSE' in names
    assert cfg['console_scripts'].replace('=', ' = ', 1) in entry and '_modidx:d' in entry
    lines = set(meta.splitlines())
    assert {f'Name: {cfg["name"]}', f'License-Expression: {cfg["license"]}', f'Requires-Python: >={cfg["min_python"]}',
        f'Summary: {cfg["description"]}'} <= lines
    plain = {Requirement(o.split(': ',1)[1]).name for o in lines if o.startswith('Requires-Dist') and 'extra ==' not in o}
    assert plain == {Requirement(o).name for o in cfg['requirements'].split()}
    extras = {o.removeprefix('Provides-Extra: ') for o in lines if o.startswith('Provides-Extra')}
    assert extras == {'torch','fastai','fast','dask','ray','s3','plot','dev'}

def modules():
    "The modules whose names `fastseqprep.all` gives: all but itself and the command"
    return sorted(o.stem for o in (root/'fastseqprep').glob('*.py') if o.stem[0]!='_' and o.stem not in ('all','cli'))

def test_all_gives_every_public_name():
    everything = importlib.import_module('fastseqprep.all')
    listed = [(importlib.import_module(f'fastseqprep.{m}'), m) for m in modules()]
    listed = {(n,m): getattr(mod, n) for mod,m in listed for n in mod.__all__}
    missing = [f'{n} of {m}' for (n,m),o in listed.items() if getattr(everything, n, None) is not o]
    assert not missing, f'not what fastseqprep.all calls by this name: {missing}'
    assert sorted(everything.__all__)==sorted({n for n,_ in listed}), 'fastseqprep.all gives names that no module lists'
    assert not {'SLICE','TEXTS'} & set(everything.__all__), 'a name that says so little is in the way of those of a user'

def test_all_without_torch():
    "Without torch and fastai the other modules are all there"
    got = fresh(hide+'from fastseqprep.all import *\nfrom fastseqprep.all import __all__\nimport json\nprint(json.dumps(__all__))')
    assert {'DataSource','PRAGMADataset'} <= set(got) and 'pragma_dls' not in got

def test_every_module_without_nbdev():
    "With torch and fastai, but without what is for notebooks only"
    mods = sorted(o.stem for o in (root/'fastseqprep').glob('*.py') if o.stem!='_modidx')
    code = without(dev)+f'import importlib,json\nfor m in {mods}: importlib.import_module(f"fastseqprep.{{m}}")\nprint(json.dumps(len(sys.modules)))'
    assert fresh(code)>len(mods)

def test_modules_hold_no_hidden_cells():
    "A cell whose first line is not recognised would be exported with the one before"
    bad = re.compile(r'^#\| *(hide|eval|exec_doc)|^ *(import|from) (nbdev|execnb|fastcore\.test)\b|^(import|from) IPython\b', re.M)
    found = {o.name: m[0] for o in (root/'fastseqprep').glob('*.py') if o.stem!='_modidx' for m in bad.finditer(o.read_text())}
    assert not found

def test_plain_modules_load_nothing_heavy():
    plain = fresh(hide+'import fastseqprep.all,json\nprint(json.dumps([o for o in sys.modules if o.startswith("fastseqprep.")]))')
    plain = [o for o in plain if o!='fastseqprep.all']
    assert 'fastseqprep.events' in plain
    assert fresh(f'import {",".join(plain)}'+loaded)==[]
