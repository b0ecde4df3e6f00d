"Files, manifests and runs under bad luck: kills, hostile names, damaged files, two runs at once"
import itertools, json, os, signal, subprocess, sys, time
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings, strategies as st

from fastseqprep.files import *
from fastseqprep.resume import begin_run
from fastseqprep.store import *

places = itertools.count()


@pytest.fixture(params=['local', 'memory'])
def folder(request, tmp_path):
    "An empty output folder, local (with letters that mean something to a shell) or on an object store"
    return tmp_path/'out [1] *ü' if request.param=='local' else f'memory://test-store/{next(places)}'


def write(path, content=b'x'):
    with atomic_write(path) as f: f.write(content)


def job(folder, config=None, inputs=(), names=('shard_0.parquet', 'shard_1.parquet'), **kw):
    "A tiny job: writes its config into each of its files"
    config = config or {}
    with begin_run(folder, 'events', config, list(inputs), **kw) as run:
        if run.done: return False
        for n in names: write(run.path(n), f'{n} {config}'.encode())
        run.finish([run.output(n) for n in names])
    return True


def script(code, *args):
    "Run code in a process of its own"
    return subprocess.Popen([sys.executable, '-c', code, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(path, process):
    "Wait until a file is there"
    while not Path(path).exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(.01)


# files

def test_file_gets_the_usual_permissions(tmp_path):
    write(tmp_path/'a')
    (tmp_path/'b').write_bytes(b'x')
    assert (tmp_path/'a').stat().st_mode==(tmp_path/'b').stat().st_mode


def test_kill_while_writing_leaves_no_file(tmp_path):
    code = '''
import sys, time
from fastseqprep.files import atomic_write
from pathlib import Path
with atomic_write(sys.argv[1]+'/shard_0.parquet') as f:
    f.write(b'half'); f.flush()
    Path(sys.argv[1]+'/ready').touch()
    time.sleep(60)
'''
    p = script(code, tmp_path)
    wait_for(tmp_path/'ready', p)
    p.kill(); p.communicate()
    left = [n for n in os.listdir(tmp_path) if n!='ready']
    assert len(left)==1 and is_temp_name(left[0])
    assert job(tmp_path)
    assert sorted(os.listdir(tmp_path))==['manifest.json', 'ready', 'shard_0.parquet', 'shard_1.parquet']


@pytest.mark.parametrize('name', ['../x', '/x', 'a/../../x', 'a/./b', '..', '', 'C:/x', 'a\\..\\b', 's3://b/x', 'a\0b', 'a/'])
def test_no_name_leaves_the_folder(name, folder):
    with pytest.raises(StoreError, match='not a name inside'): safe_join(folder, name)
    with begin_run(folder, 'events', {}, []) as run:
        for f in (run.path, run.scratch):
            if name: pytest.raises(StoreError, f, name)


@given(st.text(max_size=30))
def test_safe_join_stays_inside(name):
    try: path = safe_join('/data/out', name)
    except StoreError: return
    assert os.path.normpath(path)==str(path) and Path(path).is_relative_to('/data/out') and path!=Path('/data/out')


def test_list_files_takes_folder_names_literally(folder):
    for n in ('shard_0.parquet', 'shard_1.parquet', 'shard_id=3/part.parquet', 'a/b/shard_9.parquet'): write(safe_join(folder, n))
    assert list_files(folder, 'shard_*.parquet')==['shard_0.parquet', 'shard_1.parquet']
    assert list_files(folder, 'shard_id=*/*.parquet')==['shard_id=3/part.parquet']


@pytest.mark.parametrize('dtype', ['int8', 'uint64', 'float32', 'bool', 'datetime64[s]', 'U3'])
def test_npy_round_trip(dtype, folder):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    write_npy(safe_join(folder, 'x.npy'), values)
    back = read_npy(safe_join(folder, 'x.npy'))
    assert back.dtype==values.dtype and np.array_equal(back, values)


# ledger

counts = st.dictionaries(st.sampled_from(['no time', 'after eval_time', 'no id']), st.integers(0, 1000))
parts = st.lists(st.tuples(st.sampled_from(['a', 'b']), st.integers(0, 1000), counts), max_size=8)

@given(parts, st.randoms())
def test_ledger_merges_in_any_order(parts, random):
    def total(parts):
        res = Ledger()
        for source,kept,dropped in parts: res.merge(Ledger().add(source, kept+sum(dropped.values()), kept, dropped, tokens=2*kept))
        return res.check()
    shuffled = random.sample(parts, len(parts))
    one,other = total(parts),total(shuffled)
    assert one==other and Ledger.from_dict(json.loads(json.dumps(one.to_dict())))==one


@given(parts, st.integers(-5, 5).filter(bool))
def test_ledger_finds_each_lost_row(parts, off):
    res = Ledger().add('c', read=10, kept=10+off)
    for source,kept,dropped in parts: res.add(source, kept+sum(dropped.values()), kept, dropped)
    with pytest.raises(StoreError, match=f'{abs(off)} rows {"too many" if off>0 else "missing"}'): res.check()


# manifest

def test_cut_off_or_changed_manifest_is_an_error(tmp_path):
    job(tmp_path, dict(n=1))
    text = (tmp_path/'manifest.json').read_text()
    for n in range(0, len(text)-2, 7):
        (tmp_path/'manifest.json').write_text(text[:n])
        with pytest.raises(StoreError): open_store(tmp_path)
    for bad in ('[]', '{}', 'null', '3', text.replace('"events"', '7'), text.replace('"n": 1', '"n": 2'), text.replace('"version": 1', '"version": "one"')):
        (tmp_path/'manifest.json').write_text(bad)
        with pytest.raises(StoreError, match='manifest.json'): open_store(tmp_path)
    (tmp_path/'manifest.json').write_text(text)
    open_store(tmp_path)


def test_manifest_is_the_same_wherever_the_work_is_done(tmp_path):
    for place in ('a', 'b/deep'):
        data = tmp_path/place/'data'
        for n in ('x.csv', 'y/x.csv'): write(data/n, n.encode())
        job(tmp_path/place/'out', dict(n=1), input_files([data/'y/x.csv', data/'x.csv']))
    a,b = ((tmp_path/p/'out'/'manifest.json').read_bytes() for p in ('a', 'b/deep'))
    assert a==b and str(tmp_path).encode() not in a


def test_evil_manifest_cannot_name_files_elsewhere(tmp_path):
    job(tmp_path/'out')
    write(tmp_path/'secret')
    raw = read_json(tmp_path/'out'/'manifest.json')
    raw['outputs'][0]['name'] = '../secret'
    write_json(tmp_path/'out'/'manifest.json', raw)
    with pytest.raises(StoreError, match='damaged'): open_store(tmp_path/'out')
    job(tmp_path/'out', overwrite=True)
    assert (tmp_path/'secret').exists()


frames = st.lists(st.tuples(st.none() | st.integers(-3, 3), st.none() | st.sampled_from(['', 'a', 'b'])), max_size=5)

@given(frames, frames)
def test_frame_hash_tells_frames_apart(a, b):
    a,b = (pl.DataFrame(x, schema=dict(n=pl.Int64, s=pl.String), orient='row') for x in (a, b))
    assert (input_frame('x', a)==input_frame('x', b))==a.equals(b)


@pytest.mark.parametrize('dtype', [pl.Int8, pl.UInt64, pl.Float64, pl.Boolean, pl.Date, pl.Datetime('us', 'UTC'), pl.Time, pl.Duration, pl.String, pl.Categorical, pl.Decimal(10, 2)])
def test_every_scalar_type_has_a_frame_hash(dtype):
    base = pl.Series('x', [0, 1, None])
    as_type = lambda s: (s.cast(pl.String) if dtype in (pl.String, pl.Categorical) else s).cast(dtype)
    hashes = {input_frame('x', as_type(s).to_frame()).sha256 for s in (base, base.reverse(), base.fill_null(0))}
    assert len(hashes)==3 and None not in hashes


# stores

def test_only_listed_files_are_read(folder):
    job(folder)
    for n in ('shard_2.parquet', 'shard_00.parquet', 'shard_id=0/x.parquet'): write(safe_join(folder, n))
    assert [str(p).rsplit('/')[-1] for p in open_store(folder, deep=True).shards]==['shard_0.parquet', 'shard_1.parquet']
    remove_file(safe_join(folder, 'shard_1.parquet'))
    with pytest.raises(StoreError, match='shard_1.parquet is missing'): open_store(folder)


# runs

def test_same_run_has_nothing_to_do(folder):
    assert job(folder, dict(n=1)) and not job(folder, dict(n=1))
    assert job(folder, dict(n=1), overwrite=True)


def test_other_config_job_or_input_is_refused_and_harmless(folder):
    job(folder, dict(n=1, m=1))
    before = read_bytes(safe_join(folder, 'manifest.json'))
    with pytest.raises(StoreError, match=r'another config \(m, n\).*overwrite=True'): job(folder, dict(n=2))
    with pytest.raises(StoreError, match='other inputs'): job(folder, dict(n=1, m=1), [InputFile(name='x', sha256='0')])
    with pytest.raises(StoreError, match='cannot be compared'): job(folder, dict(n=1, m=1), [InputFile(name='x')])
    with pytest.raises(StoreError, match='another job'): begin_run(folder, 'table', dict(n=1, m=1), [])
    assert read_bytes(safe_join(folder, 'manifest.json'))==before
    assert not exists(safe_join(folder, '.run'))
    open_store(folder, deep=True)


def test_tuples_and_lists_are_the_same_config(folder):
    job(folder, dict(a=(1, 2), n=1))
    assert not job(folder, dict(n=1, a=[1, 2]))
    with pytest.raises(StoreError, match=r'another config \(n\)'): job(folder, dict(a=(1, 2), n=2))


def test_overwrite_removes_our_files_only(folder):
    job(folder, names=('shard_0.parquet', 'shard_1.parquet', 'lengths.npy', 'sub/table.parquet'))
    for n in ('notes.txt', 'lengths.txt', 'my_shard_0.parquet', '.cache/0123456789abcdef/x.npy', '.cache/log-split0.0123abcd.0123456789abcdef/y.npy', '.cache/0123456789abcdef.lock', '.cache/mine/z.npy'): write(safe_join(folder, n))
    job(folder, dict(n=1), names=('shard_0.parquet',), overwrite=True)
    assert list_files(folder)==['lengths.txt', 'manifest.json', 'my_shard_0.parquet', 'notes.txt', 'shard_0.parquet']
    assert list_files(folder, 'sub/*')==[]
    if not is_remote(folder): assert list_files(folder, '.cache/*')+list_files(folder, '.cache/*/*')==['.cache/mine/z.npy'] # caches are kept on this machine only


def test_overwrite_does_not_follow_links(tmp_path):
    write(tmp_path/'elsewhere'/'table.parquet')
    job(tmp_path/'out', names=('sub/table.parquet',))
    (tmp_path/'out'/'sub'/'table.parquet').unlink()
    (tmp_path/'out'/'sub').rmdir()
    (tmp_path/'out'/'sub').symlink_to(tmp_path/'elsewhere')
    job(tmp_path/'out', dict(n=1), overwrite=True)
    assert (tmp_path/'elsewhere'/'table.parquet').exists()


def test_a_failed_overwrite_leaves_the_old_output(folder):
    job(folder, dict(n=1))
    with pytest.raises(ValueError, match='row 3'):
        with begin_run(folder, 'events', dict(n=2), [], overwrite=True) as run:
            write(run.path('shard_0.parquet'))
            raise ValueError('bad time in row 3')
    assert not job(folder, dict(n=1))
    open_store(folder, deep=True)


def test_unfinished_run_is_not_opened_and_not_mixed(folder):
    with pytest.raises(KeyboardInterrupt):
        with begin_run(folder, 'events', dict(n=1), []) as run:
            write(run.path('shard_0.parquet')); write(run.scratch('bucket_0'))
            raise KeyboardInterrupt
    with pytest.raises(StoreError, match='not finished'): open_store(folder)
    with begin_run(folder, 'events', dict(n=1), []) as run: assert exists(run.path('shard_0.parquet')) and exists(run.scratch('bucket_0'))
    with begin_run(folder, 'events', dict(n=2), []) as run: assert not exists(run.path('shard_0.parquet')) and not exists(run.scratch('bucket_0'))


def test_inputs_without_hash_are_never_taken_for_the_same(folder):
    unknown = [InputFile(name='frame')]
    with pytest.raises(KeyboardInterrupt):
        with begin_run(folder, 'events', {}, unknown) as run:
            write(run.path('shard_0.parquet'))
            raise KeyboardInterrupt
    with begin_run(folder, 'events', {}, unknown) as run: assert not exists(run.path('shard_0.parquet'))


def test_finish_wants_its_files(folder):
    with pytest.raises(StoreError, match='shard_1.parquet'):
        with begin_run(folder, 'events', {}, []) as run:
            write(run.path('shard_0.parquet'))
            o = run.output('shard_0.parquet')
            run.finish([o, o.model_copy(update=dict(name='shard_1.parquet'))])
    assert not has_manifest(folder)


KILLED = '''
import os, sys, signal
from pathlib import Path
from fastseqprep import files, resume
from fastseqprep.store import *

def step(f):
    "Count the calls of a file operation, and die in the one numbered `at`"
    def inner(*args, **kw):
        global steps
        steps += 1
        if steps==at: os.kill(os.getpid(), signal.SIGKILL)
        return f(*args, **kw)
    return inner

os.replace,Path.unlink = step(os.replace),step(Path.unlink)
for name in ('move_file', 'remove_file', 'remove_folder'): setattr(resume, name, step(getattr(files, name)))

def job(out, n, names):
    global steps
    steps = 0
    with resume.begin_run(out, 'events', {'n': n}, [], overwrite=True) as run:
        if run.done: return
        notes = run.notes('write')
        for name in names:
            if notes.get(name): continue
            with files.atomic_write(run.path(name)) as f: f.write(b'%d'%n + name.encode())
            notes.put(name, dict(outputs=[run.output(name).model_dump()]))
        run.finish([OutputFile(**notes.get(name)['outputs'][0]) for name in names])

def killed(*args):
    "Do a job in a child process; whether it was killed"
    if (pid := os.fork())==0:
        job(*args)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])

at = 0
tmp = Path(sys.argv[1])
old,new = ['a.parquet', 'shard_0.parquet', 'shard_2.parquet'],['shard_0.parquet', 'shard_1.parquet']
job(tmp/'whole', 3, old)
job(tmp/'whole', 2, new)
print(steps)
for n in range(1, steps+1):
    at = 0
    job(tmp/f'at{n}', 3, old)
    at = n
    assert killed(tmp/f'at{n}', 2, new), n
    at = 0
    try: open_store(tmp/f'at{n}', deep=True)  # old or new and whole, or an error
    except files.StoreError: pass
    job(tmp/f'at{n}', 2, new)
'''

def test_killed_at_any_step_the_next_run_gives_the_same_bytes(tmp_path):
    "Over an older output with other shards, kill -9 at each file operation in turn; then run again"
    out,err = script(KILLED, tmp_path).communicate()
    assert not err, err
    want = {p.name: p.read_bytes() for p in (tmp_path/'whole').iterdir()}
    assert sorted(want)==['manifest.json', 'shard_0.parquet', 'shard_1.parquet']
    assert int(out)>10
    for at in range(1, int(out)+1): assert {p.name: p.read_bytes() for p in (tmp_path/f'at{at}').iterdir()}==want, at


def test_two_runs_at_once_are_refused_and_a_kill_frees_the_folder(tmp_path):
    code = '''
import sys, time
from pathlib import Path
from fastseqprep.resume import begin_run
with begin_run(sys.argv[1], 'events', {}, []) as run:
    Path(sys.argv[1]+'/ready').touch()
    time.sleep(60)
'''
    p = script(code, tmp_path)
    wait_for(tmp_path/'ready', p)
    with pytest.raises(StoreError, match='another run is writing'): job(tmp_path)
    p.kill(); p.communicate()
    assert job(tmp_path)
