"The same results from every engine, and what happens when workers die, tasks fail or someone presses Ctrl-C"
import functools, os, signal, subprocess, sys, time, types
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import polars as pl
import pytest

from fastseqprep.resume import Notes
from fastseqprep.runner import Runner, RayExecutor, WorkerDied, run_tasks

run_tasks = functools.partial(run_tasks, progress=False)
Runner = functools.partial(Runner, progress=False)


# tasks, which workers import from this module

def squares(spec):
    "The last task is done first"
    number,total = spec
    time.sleep(.002*(total-number))
    return dict(number=number, frame=pl.DataFrame(dict(x=[number])).select(pl.col('x')**2).item())

def sizes_of_pools(spec):
    from fastseqprep.runner import _n_cpus
    return os.getpid(), pl.thread_pool_size(), _n_cpus()

def die_until(spec):
    "Kill the process until `folder` holds `times` files for this number"
    folder,number,times = spec
    n = len(list(Path(folder).glob(f'{number}_*')))
    if n<times:
        (Path(folder)/f'{number}_{n}').touch()
        os.kill(os.getpid(), signal.SIGKILL) if n%2==0 else os._exit(3)
    return number

class BadRow(ValueError):
    "An error with a field of its own"
    def __init__(self, message, row=None):
        super().__init__(message)
        self.row = row

class Unportable(Exception):
    "Pickles, but cannot be rebuilt"
    def __init__(self, file, row): super().__init__(f'{file}, row {row}')

def fail(spec):
    folder,number,bad = spec
    (Path(folder)/f'began_{number}').touch()
    if number!=bad: time.sleep(30); return number
    raise BadRow(f'number {number} is bad', row=7)

def fail_strangely(spec): raise Unportable('a.csv', spec)
def fail_with_lambda(spec): raise ValueError('a.csv', lambda: spec)
def stop(spec): raise SystemExit(3)

def read_size(path): return dict(bytes=os.path.getsize(path))

def leave_mark(spec):
    folder,seconds = spec
    (Path(folder)/f'pid_{os.getpid()}').touch()
    time.sleep(seconds)


# engines

@pytest.fixture(scope='module')
def dask_executor():
    distributed = pytest.importorskip('distributed')
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        with distributed.Client(cluster) as client: yield client.get_executor()

specs = [(i, 20) for i in range(20)]
expected = [dict(number=i, frame=i*i) for i in range(20)]

@pytest.mark.parametrize('n', [0, 1, 2])
def test_processes_give_results_in_order(n): assert run_tasks(squares, specs, n_workers=n)==expected

def test_any_executor_does(dask_executor):
    with ThreadPoolExecutor(3) as ex:
        assert run_tasks(squares, specs, executor=ex)==expected
        assert run_tasks(squares, specs[:1], executor=ex)==expected[:1]  # it stays open
    assert run_tasks(squares, specs, executor=dask_executor)==expected
    assert run_tasks(squares, [], executor=dask_executor)==[]

def test_dask_raises_the_tasks_error(dask_executor, tmp_path):
    with pytest.raises(BadRow, match='number 0 is bad'): run_tasks(fail, [(str(tmp_path), 0, 0)], executor=dask_executor)

def test_dask_survives_a_dead_worker(dask_executor, tmp_path):
    assert run_tasks(die_until, [(str(tmp_path), i, i==1) for i in range(4)], executor=dask_executor)==[0, 1, 2, 3]

def test_workers_share_the_cores_and_are_not_forked():
    here = os.environ.get('POLARS_MAX_THREADS')
    found = run_tasks(sizes_of_pools, range(6), n_workers=2)
    assert os.environ.get('POLARS_MAX_THREADS')==here
    assert os.getpid() not in {pid for pid,_,_ in found}
    for _,threads,cpus in found: assert threads==int(here or max(1, cpus//2))

def test_users_thread_count_is_kept(monkeypatch):
    monkeypatch.setenv('POLARS_MAX_THREADS', '3')
    assert run_tasks(sizes_of_pools, [0], n_workers=1)[0][1]==3

def test_a_pool_serves_several_phases():
    with Runner(1) as runner: pids = {runner.run(sizes_of_pools, [0])[0][0] for _ in range(3)}
    assert len(pids)==1

def test_only_a_limited_number_is_under_way():
    class Counting(ThreadPoolExecutor):
        now,most = 0,0
        def submit(self, *args):
            self.now += 1
            self.most = max(self.most, self.now)
            return super().submit(*args)
    with Counting(2) as ex:
        results = Runner(executor=ex, max_pending=5).iter(squares, specs)
        for i,_ in enumerate(results):
            ex.now -= 1
            if i==3: time.sleep(.2)  # a slow taker does not let the others run ahead
    assert ex.most==5

def test_functions_without_a_name_are_refused():
    def inner(x): return x
    for fn in (inner, lambda x: x):
        with pytest.raises(TypeError, match='top level of a module'): run_tasks(fn, [1], n_workers=1)
        assert run_tasks(fn, [1])==[1]

def test_an_executor_that_forks_is_refused():
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(1, mp_context=get_context('fork')) as ex:
        with pytest.raises(ValueError, match='spawn'): run_tasks(squares, specs, executor=ex)
    with ProcessPoolExecutor(1, mp_context=get_context('spawn')) as ex: assert run_tasks(squares, specs[:3], executor=ex)==[dict(number=i, frame=i*i) for i in range(3)]


# workers that die

def test_tasks_of_dead_workers_are_done_again(tmp_path):
    "Several die, some twice, and every result is there once and in its place"
    times = {3: 1, 4: 2, 11: 1}
    assert run_tasks(die_until, [(str(tmp_path), i, times.get(i, 0)) for i in range(16)], n_workers=2)==list(range(16))

def test_a_task_that_always_kills_is_named(tmp_path):
    with pytest.raises(WorkerDied, match=r'task 5 of 8 ended its worker process 2 times.*, 5, 99\)'):
        run_tasks(die_until, [(str(tmp_path), i, 99 if i==5 else 0) for i in range(8)], n_workers=2, retries=1)

def test_after_a_death_the_runner_goes_on(tmp_path):
    with Runner(1, retries=0) as runner:
        with pytest.raises(WorkerDied): runner.run(die_until, [(str(tmp_path), 0, 1)])
        assert runner.run(die_until, [(str(tmp_path), 0, 1)])==[0]

def test_an_executor_of_someone_else_that_breaks_is_reported(tmp_path):
    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(1, mp_context=get_context('spawn')) as ex:
        with pytest.raises(WorkerDied, match='lost its workers'): run_tasks(die_until, [(str(tmp_path), 0, 9)], executor=ex)


def test_long_specs_do_not_block_the_end(tmp_path):
    "A spec that does not fit into a pipe is still being handed over when workers are stopped"
    long = ' '*5_000_000
    with pytest.raises(OSError): run_tasks(read_size, [str(tmp_path/'gone'), *[str(tmp_path/'x')+long]*20], n_workers=2)


# tasks that fail

@pytest.mark.parametrize('n', [0, 2])
def test_the_tasks_own_error_ends_the_job_at_once(n, tmp_path):
    start = time.monotonic()
    with pytest.raises(BadRow, match='number 0 is bad') as e: run_tasks(fail, [(str(tmp_path), i, 0) for i in range(50)], n_workers=n)
    assert e.value.row==7
    assert time.monotonic()-start<20  # the others sleep for 30 seconds
    assert len(list(tmp_path.iterdir()))<15

@pytest.mark.parametrize('fn', [fail_strangely, fail_with_lambda])
def test_errors_that_cannot_travel_keep_their_words(fn):
    with pytest.raises(Exception, match='a.csv'): run_tasks(fn, [3], n_workers=1)

def test_a_task_that_exits_is_an_error():
    with pytest.raises((SystemExit, WorkerDied)): run_tasks(stop, [0], n_workers=1, retries=0)

def test_notes_carry_a_failed_job_on(tmp_path):
    files = [str(tmp_path/f'{i}.txt') for i in range(6)]
    for f in files[:4]: Path(f).write_text('x')
    notes = Notes(tmp_path/'notes')
    with pytest.raises(FileNotFoundError, match='4.txt'): run_tasks(read_size, files, notes=notes)
    for f in files[:4]: Path(f).unlink()  # would fail if they were read again
    for f in files[4:]: Path(f).write_text('xx')
    assert run_tasks(read_size, files, n_workers=2, notes=notes)==[dict(bytes=1)]*4+[dict(bytes=2)]*2


# processes that must not stay

def alive(pid):
    "Whether a process runs (one that has ended and waits for its parent to look does not)"
    try: return Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0]!='Z'
    except FileNotFoundError: return False

def start_script(tmp_path, guard=False):
    "A plain script, without a `__main__` guard, that runs two sleeping tasks in two workers"
    (tmp_path/'marks').mkdir()
    (tmp_path/'script.py').write_text(f'''
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be inherited as ignored
sys.path.insert(0, {str(Path(__file__).parent)!r})
from fastseqprep.runner import run_tasks
from test_runner import leave_mark
print('begin', flush=True)
run_tasks(leave_mark, [({str(tmp_path/'marks')!r}, 60)]*2, n_workers=2)
''')
    p = subprocess.Popen([sys.executable, str(tmp_path/'script.py')], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while len(pids := [int(f.name[4:]) for f in (tmp_path/'marks').iterdir()])<2:
        assert p.poll() is None, p.stderr.read()
        time.sleep(.02)
    return p,pids

def all_gone(pids, seconds=10):
    "Whether all processes end within some seconds"
    end = time.monotonic()+seconds
    while any(alive(p) for p in pids) and time.monotonic()<end: time.sleep(.05)
    return not any(alive(p) for p in pids)

@pytest.mark.skipif(not Path('/proc').exists(), reason='looks into /proc')
@pytest.mark.parametrize('to_all', [False, True])
def test_ctrl_c_leaves_no_process(tmp_path, to_all):
    "Ctrl-C in a terminal goes to all processes of the group; `kill -INT` to one"
    p,pids = start_script(tmp_path)
    os.killpg(p.pid, signal.SIGINT) if to_all else p.send_signal(signal.SIGINT)
    out,err = p.communicate(timeout=20)
    assert p.returncode!=0 and err.count('KeyboardInterrupt')==1
    assert out=='begin\n'  # the script ran once, not again in each worker
    assert all_gone(pids)

@pytest.mark.skipif(not Path('/proc').exists(), reason='looks into /proc')
def test_workers_follow_a_killed_parent(tmp_path):
    p,pids = start_script(tmp_path)
    p.kill(); p.communicate()
    assert all_gone(pids)

def test_progress_is_for_terminals_only(tmp_path):
    code = "import os; from fastseqprep.runner import run_tasks; run_tasks(abs, [-1]*5, desc='counting')"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout==''
    import pty
    master,slave = pty.openpty()
    subprocess.run([sys.executable, '-c', code], stdout=slave, check=True)
    os.close(slave)
    seen = os.read(master, 100_000).decode()
    os.close(master)
    assert '5/5' in seen and 'counting' in seen


# Ray's interface, played by a stand-in: a task's handle offers `.future()`

def test_ray_adapter(monkeypatch):
    class Remote:
        def __init__(self, fn): self.fn = fn
        def remote(self, *args):
            f = Future()
            try: f.set_result(self.fn(*args))
            except Exception as e: f.set_exception(e)
            return types.SimpleNamespace(future=lambda: f)
    begun = []
    stand_in = types.SimpleNamespace(is_initialized=lambda: bool(begun), init=lambda: begun.append(1), remote=lambda fn=None, **kw: Remote(fn) if fn else Remote)
    monkeypatch.setitem(sys.modules, 'ray', stand_in)
    for options in ({}, dict(num_cpus=1)):
        assert run_tasks(squares, specs, executor=RayExecutor(**options))==expected
        with pytest.raises(Exception, match='a.csv, row 3'): run_tasks(fail_strangely, [3], executor=RayExecutor(**options))
    assert begun==[1]
