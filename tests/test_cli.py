"The command: what it prints and writes, how it fails, what it needs."
import json, os, re, subprocess, sys, time
from pathlib import Path

import polars as pl, pytest

from conftest import root
from test_install import fresh, hide, loaded
from fastseqprep import __version__
from fastseqprep.cli import commands, main
from fastseqprep.store import open_store

@pytest.fixture(scope='module')
def made(tmp_path_factory):
    "A folder with a demo of 60 people that stopped before training"
    out = tmp_path_factory.mktemp('cli')/'demo'
    assert main(['demo', '--out', str(out), '--users', '60', '--no-train']) == 0
    return out

def said(capsys, *args):
    "Exit code, output and error output"
    capsys.readouterr()
    code = main(list(map(str, args)))
    return code, *capsys.readouterr()

def contents(folder): return {o.name: o.read_bytes() for o in Path(folder).glob('[!.]*') if o.is_file()}

def test_demo_tells_everything(tmp_path, capsys):
    code, out, err = said(capsys, 'demo', '--out', tmp_path/'d', '--users', 60, '--no-train')
    assert (code, err) == (0, '')
    for part in ('users', 'ratings', 'min_time', 'Keys: 11, Vals: ', 'read   kept', 'event_tokens', 'event_labels', 'int64', 'history_offsets', 'occupation', '[MASK] → ',
                 'manifest.json', str(tmp_path/'d'/'shards')): assert part in out, part
    assert 'epoch of training' not in out
    store = open_store(tmp_path/'d'/'shards', deep=True)
    assert len(store.shards) == 4 and store.unlisted() == []
    assert {o.name for o in (tmp_path/'d').iterdir()} == {'sample', 'shards', '.fastseqprep-demo'}

def test_demo_again(made, capsys):
    before = contents(made/'shards')
    assert said(capsys, 'demo', '--out', made, '--users', 60, '--no-train')[0] == 0
    assert contents(made/'shards') == before
    assert said(capsys, 'demo', '--out', made, '--users', 40, '--no-train')[0] == 0
    assert open_store(made/'shards', deep=True).manifest.facts['records'] == 40
    assert said(capsys, 'demo', '--out', made, '--users', 60, '--no-train')[0] == 0
    assert contents(made/'shards') == before

def test_demo_leaves_other_folders_alone(tmp_path, capsys):
    (tmp_path/'mine.txt').write_text('mine')
    for out in (tmp_path, tmp_path/'mine.txt'):
        code, out, err = said(capsys, 'demo', '--out', out)
        assert code == 2 and err.count('\n') == 1 and '--out' in err
    assert [o.name for o in tmp_path.iterdir()] == ['mine.txt']

def test_demo_of_nobody(tmp_path, capsys):
    code, _, err = said(capsys, 'demo', '--out', tmp_path/'d', '--users', 0)
    assert code == 2 and 'n_users is 0' in err

def run(*args, without=(), cwd=None):
    "Run the command in a process of its own, `without` some packages"
    code = re.sub(r'in \{.*\} else', f'in {set(without)!r} else', hide) + 'from fastseqprep.cli import main\nsys.exit(main())'
    env = {**os.environ, 'PYTHONPATH': str(root)}
    return subprocess.run([sys.executable, '-c', code, *map(str, args)], capture_output=True, text=True, env=env, cwd=cwd, stdin=subprocess.DEVNULL)

def test_demo_without_torch(tmp_path):
    res = run('demo', '--users', 30, without=['torch', 'fastai', 'torchvision', 'pandas', 'matplotlib'], cwd=tmp_path)
    assert res.returncode == 0, res.stderr
    assert "pip install 'fastseqprep[torch]'" in res.stdout and 'read   kept' in res.stdout and 'event_tokens' not in res.stdout
    assert (tmp_path/'fastseqprep-demo'/'shards'/'manifest.json').exists()

def test_demo_without_fastai(tmp_path):
    res = run('demo', '--users', 60, without=['fastai'], cwd=tmp_path)
    assert res.returncode == 0, res.stderr
    assert "pip install 'fastseqprep[fastai]'" in res.stdout and 'event_labels' in res.stdout

def test_demo_in_full(tmp_path):
    start = time.perf_counter()
    res = run('demo', cwd=tmp_path)
    assert res.returncode == 0, res.stderr
    assert time.perf_counter()-start < 60 # 30 on an idle machine
    assert 'Traceback' not in res.stderr
    counting, before, after = map(float, re.search(r'loss.*counting ([\d.]+), .*before training ([\d.]+) and after ([\d.]+)', res.stdout).groups())
    assert after < min(counting, before)-.05

def test_inspect(made, capsys):
    code, out, err = said(capsys, 'inspect', made/'shards', '--rows', 2, '--events', 3)
    assert (code, err) == (0, '')
    assert out.count('entity ') == 2 and out.count('event ') == 6 and 'occupation' in out
    first = pl.read_parquet(made/'shards'/'shard_0.parquet')
    occupation = first.filter(pl.col('key') == 'occupation')['value'][0]
    assert f'entity {first["user_id"][0]}' in out and f'occupation {occupation}' in out
    one = said(capsys, 'inspect', made/'shards'/'shard_0.parquet', '--rows', 2, '--events', 3)
    assert one == (0, out, '')

def test_inspect_with_a_tokenizer_elsewhere(made, tmp_path, capsys):
    shard = tmp_path/'shard_0.parquet'
    shard.write_bytes((made/'shards'/'shard_0.parquet').read_bytes())
    code, _, err = said(capsys, 'inspect', shard)
    assert code == 2 and 'tokenizer.json' in err
    assert said(capsys, 'inspect', shard, '--tok', made/'shards'/'tokenizer.json')[0] == 0

def test_verify(made, tmp_path, capsys):
    code, out, err = said(capsys, 'verify', made/'shards')
    assert (code, err) == (0, '') and '4 shards' in out and 'ratings' in out
    for f in contents(made/'shards'): (tmp_path/f).write_bytes((made/'shards'/f).read_bytes())
    (tmp_path/'notes.txt').touch()
    assert 'notes.txt' in said(capsys, 'verify', tmp_path)[1]
    data = bytearray((tmp_path/'shard_1.parquet').read_bytes())
    data[len(data)//2] ^= 1
    (tmp_path/'shard_1.parquet').write_bytes(data)
    (tmp_path/'shard_2.parquet').unlink()
    code, out, err = said(capsys, 'verify', tmp_path)
    assert code == 2 and err.count('\n') == 1
    assert 'shard_1.parquet has another content' in err and 'shard_2.parquet is missing' in err

def test_verify_without_a_manifest(made, tmp_path, capsys):
    (tmp_path/'shard_0.parquet').write_bytes((made/'shards'/'shard_0.parquet').read_bytes())
    code, _, err = said(capsys, 'verify', tmp_path)
    assert code == 2 and 'no manifest.json' in err

@pytest.mark.parametrize('args,words', [
    (['dmeo'], "did you mean 'demo'?"), (['inspct', 'x'], "did you mean 'inspect'?"), (['frob'], 'demo, preprocess, text, '), (['demo', '--user', '3'], "did you mean '--users'?"),
    (['demo', '--users', 'many'], "invalid int value: 'many'"), (['verify'], 'FOLDER'), (['inspect', 'a', 'b'], "'b'"), (['--versoin'], "did you mean '--version'?"),
    (['verify', 'no/such/folder'], 'no/such/folder does not exist'), (['inspect', 'no/such.parquet'], 'does not exist')])
def test_mistakes_are_told_in_one_line(args, words, capsys):
    code, out, err = said(capsys, *args)
    assert (code, out) == (2, '') and err.count('\n') == 1 and err.startswith('fastseqprep: ') and words in err

def test_debug_shows_where(tmp_path):
    for args in (['--debug', 'verify', tmp_path], ['verify', tmp_path, '--debug']):
        res = run(*args)
        assert res.returncode and 'Traceback' in res.stderr and 'open_store' in res.stderr
    res = run('verify', tmp_path)
    assert res.returncode == 2 and 'Traceback' not in res.stderr

def test_version_and_help(capsys):
    for args, text in ((['--version'], f'fastseqprep {__version__}\n'), (['--help'], 'demo'), (['demo', '--help'], '--no-train'), (['inspect', '-h'], '--rows')):
        with pytest.raises(SystemExit) as e: main(args)
        assert not e.value.code and text in capsys.readouterr().out
    assert said(capsys)[0] == 0

def test_every_parameter_has_help():
    from fastseqprep.cli import make_parser
    for name, sub in make_parser().subs.items():
        assert commands[name].__doc__ and all(o.help for o in sub._actions), name

@pytest.mark.parametrize('args', [['--help'], ['demo', '--help'], ['--version'], ['dmeo']])
def test_quick_answers_load_nothing_heavy(args):
    code = f'import sys,io\nfrom contextlib import redirect_stdout,redirect_stderr\nfrom fastseqprep.cli import main\nwith redirect_stdout(io.StringIO()),redirect_stderr(io.StringIO()):\n try: main({args!r})\n except SystemExit: pass'
    assert fresh(code+loaded) == []
    assert fresh(code+'\nimport json\nprint(json.dumps([o for o in ("polars","pyarrow","numpy") if o in sys.modules]))') == []

def test_verify_and_inspect_need_no_torch(made):
    code = f'from fastseqprep.cli import main\nassert main(["verify",sys.argv[1]])==0 and main(["inspect",sys.argv[1]])==0'
    assert fresh(hide+code+loaded, str(made/'shards')) == []

def test_output_into_a_closed_pipe(made):
    code = 'from fastseqprep.cli import main; import sys; sys.exit(main(sys.argv[1:]))'
    proc = subprocess.Popen([sys.executable, '-c', code, 'inspect', str(made/'shards'), '--rows', '60', '--events', '999'], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, 'PYTHONPATH': str(root)})
    proc.stdout.close()
    err = proc.stderr.read().decode()
    assert proc.wait() == 0 and 'Traceback' not in err and 'BrokenPipe' not in err


@pytest.mark.parametrize('args, code', [(['--version'], 0), (['inspect', 'nowhere'], 2), (['frobnicate'], 2)])
@pytest.mark.parametrize('thread', [False, True])
def test_the_command_ends_at_once_and_whole(args, code, thread):
    "What was printed arrives, what waits for the end of the process is done, and a thread that still runs is waited for"
    program = f'''
import atexit, sys, threading, time
from fastseqprep.cli import console
atexit.register(print, 'the end')
def late(): time.sleep(.5); print('late')
if {thread}: threading.Thread(target=late).start()
sys.argv = ['fastseqprep', *{args!r}]
console()
'''
    p = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=120)
    assert p.returncode == code, p.stderr
    assert p.stdout.split('\n')[-2] == 'the end' and ('late' in p.stdout) == thread
    assert ('fastseqprep 0' in p.stdout) == (code == 0) and bool(p.stderr) == (code != 0)


@pytest.mark.skipif(os.name == 'nt', reason='needs a shell of POSIX')
@pytest.mark.parametrize('args, closed, code', [('preprocess --nope', '>&-', 2), ('preprocess --nope', '2>&-', 2), ('verify nowhere', '>&- 2>&-', 2), ('--version', '>&-', 0)])
def test_closed_output(args, closed, code, tmp_path):
    "Exit codes do not depend on whether anybody reads"
    p = subprocess.run(f'"{sys.executable}" -m fastseqprep.cli {args} {closed}', shell=True, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert p.returncode == code and 'Traceback' not in p.stdout+p.stderr
