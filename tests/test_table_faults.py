"""A killed run of the table job leaves no half file under a final name, and running again gives the bytes of a run that nobody disturbed."""
import json, os, random, shutil, signal, subprocess, sys, textwrap, time
from pathlib import Path

import numpy as np, polars as pl, pytest, yaml

from table_windows import stored

HERE = Path(__file__).parent
COMMAND = ['preprocess', '--config-path', 'configs/preprocess.yaml']
CONFIG = dict(project_root='.', read_format='parquet', split_ratios=[.8, .1, .1], window_length=20, window_stride=10, cardinality_config=dict(word=dict(top_k=50, hashing=dict(num_buckets=8))), n_cores=1)
JOBS = {
    'one file': dict(preprocessing_data_path='input/t.parquet'),
    'shards of one file': dict(preprocessing_data_path='input/t.parquet', write_format='pt', merge_output=False, batches_per_file=60),
    'shards of a folder': dict(preprocessing_data_path='input/t', merge_output=False, batches_per_file=60),
    'two workers': dict(preprocessing_data_path='input/t', write_format='pt', merge_output=False, batches_per_file=60, n_cores=2),
}
DYING = textwrap.dedent('''
    import itertools, os, signal, sys
    seen = itertools.count(1) # several threads rename
    def dying(real):
        def f(*a, **kw):
            mine = next(seen)
            if mine == {n} and {before}: os.kill(os.getpid(), signal.SIGKILL)
            out = real(*a, **kw)
            if mine == {n}: os.kill(os.getpid(), signal.SIGKILL)
            return out
        return f
    os.replace, os.rename = dying(os.replace), dying(os.rename)
    from fastseqprep.cli import main
    code = main({args!r})
    print('renames', next(seen)-1)
    sys.exit(code)
''')


@pytest.fixture(scope='module')
def inputs(tmp_path_factory):
    "One table, as a file and as a folder whose files share sequences"
    folder, rng = tmp_path_factory.mktemp('inputs'), np.random.default_rng(0)
    (folder/'input'/'t').mkdir(parents=True)
    ids = rng.permutation(np.repeat(rng.permutation(10_000)[:400], 50))
    df = pl.DataFrame(dict(sequenceId=ids)).with_columns(itemPosition=pl.int_range(pl.len()).over('sequenceId'), word=pl.Series([f'w{i}' for i in rng.zipf(1.3, len(ids)) % 500]), amount=pl.Series(rng.normal(size=len(ids))))
    df.write_parquet(folder/'input'/'t.parquet')
    for i in range(4): df[i*5000:(i+1)*5000].write_parquet(folder/'input'/'t'/f'{i}.parquet')
    return folder


def project(inputs, root, job, **more):
    "A project with these inputs and a configuration"
    shutil.copytree(inputs, root, dirs_exist_ok=True)
    (root/'configs').mkdir(exist_ok=True)
    (root/'configs'/'preprocess.yaml').write_text(yaml.safe_dump({**CONFIG, **JOBS[job], **more}))
    return root


def run(root, n=0, before=False):
    "The command in a process of its own, which dies at its n-th rename"
    return subprocess.run([sys.executable, '-c', DYING.format(n=n, before=before, args=COMMAND)], cwd=root, capture_output=True, text=True, timeout=300)


def left(root):
    "Every file below data/ and configs/metadata_configs/, with its bytes"
    return {f.relative_to(root).as_posix(): f.read_bytes() for d in ('data', 'configs/metadata_configs') for f in sorted((root/d).rglob('*')) if f.is_file()}


@pytest.fixture(scope='module')
def whole(inputs, tmp_path_factory):
    "What undisturbed runs leave, and their number of renames: {job: (files, renames)}"
    res = {}
    for job in JOBS:
        root = project(inputs, tmp_path_factory.mktemp('whole'), job)
        done = run(root)
        assert done.returncode == 0, done.stderr
        res[job] = left(root), int(done.stdout.rsplit('renames', 1)[1])
        assert sum(map(len, stored(root).splits['t', 0])) > 1000
    return res


def final(name):
    "Is this the name of a finished file: of a split, or of a data set's metadata?"
    parts = name.split('/')
    return parts[1].startswith('t-split') or parts[-1] == 't.json'


def check_killed(root, want):
    "Every file under a final name is whole"
    for name, data in left(root).items():
        if name in want and final(name): assert data == want[name], f'{name} is half or of another run'
    if (root/'configs'/'metadata_configs'/'t.json').exists():
        missing = [n for n in want if final(n) and not (root/n).exists()]
        assert not missing, f'metadata is there, but not {missing[:3]}'


@pytest.mark.parametrize('job', JOBS)
def test_two_runs_leave_the_same(job, inputs, whole, tmp_path):
    root = project(inputs, tmp_path, job)
    assert run(root).returncode == 0 and left(root) == whole[job][0]
    assert run(root).returncode == 0 and left(root) == whole[job][0]


@pytest.mark.parametrize('part,before', [(0, True), (.25, False), (.5, True), (.75, False), (1, True), (1, False)])
@pytest.mark.parametrize('job', ['one file', 'shards of a folder', 'two workers'])
def test_killed_at_a_rename(job, part, before, inputs, whole, tmp_path):
    "The process dies (kill -9) just before or after it gives a file or folder its name"
    want, renames = whole[job]
    root = project(inputs, tmp_path, job)
    p = run(root, 1 + round(part*(renames-1)), before)
    assert p.returncode == -signal.SIGKILL, p.stderr[-2000:]
    check_killed(root, want)
    again = run(root)
    assert again.returncode == 0, again.stderr
    assert left(root) == want


@pytest.mark.parametrize('part', [.5, .8, 1])
@pytest.mark.parametrize('job', ['shards of one file', 'two workers'])
def test_continued(job, part, inputs, whole, tmp_path):
    "With continue_preprocessing, what was finished is not made again, and the bytes are the same"
    want, renames = whole[job]
    root = project(inputs, tmp_path, job)
    assert run(root, 1 + round(part*(renames-1)), True).returncode == -signal.SIGKILL
    times = lambda: {f.name: f.stat().st_mtime_ns for f in (root/'data').rglob('t-split*-*.pt')}
    kept = times()
    project(inputs, root, job, continue_preprocessing=True)
    again = run(root)
    assert again.returncode == 0, again.stderr
    shards = lambda files: {k: v for k, v in files.items() if k.endswith('.pt')}
    assert shards(left(root)) == shards(want)
    made = times()
    same = [f for f, t in kept.items() if made[f] == t]
    assert len(same) >= len(kept)/3, f'{len(kept)} shards were finished, {len(same)} of them were used again'


def test_continued_with_other_inputs_is_refused(inputs, whole, tmp_path):
    "Naming the file, and touching nothing"
    job = 'shards of a folder'
    root = project(inputs, tmp_path, job)
    assert run(root, 1 + round(.8*(whole[job][1]-1)), True).returncode == -signal.SIGKILL
    project(inputs, root, job, continue_preprocessing=True)
    f = root/'input'/'t'/'0.parquet'
    pl.read_parquet(f).with_columns(pl.col('amount')*2).write_parquet(f)
    before = left(root)
    p = run(root)
    assert p.returncode in (1, 2) and '0.parquet' in p.stderr, (p.returncode, p.stderr)
    assert left(root) == before


def test_continued_with_another_seed_is_refused(inputs, tmp_path):
    "Naming the key"
    more = dict(split_method='between_sequence')
    root = project(inputs, tmp_path, 'shards of a folder', **more)
    assert run(root, 20, True).returncode == -signal.SIGKILL
    project(inputs, root, 'shards of a folder', continue_preprocessing=True, seed=7, **more)
    p = run(root)
    assert p.returncode in (1, 2) and 'seed' in p.stderr, (p.returncode, p.stderr)


def run_of(files, old, new, where):
    "Which of two runs these files are of; fails on a mixture"
    for name, want in dict(old=old, new=new).items():
        if all(want.get(f) == d for f, d in files.items()): return name
    raise AssertionError(f'{where} describes a mixture of two runs: {[(f, "old" if old.get(f) == d else "new" if new.get(f) == d else "?") for f, d in files.items()][:6]}')


@pytest.mark.parametrize('part', [.5, .7, .9, 1])
@pytest.mark.parametrize('job', ['one file', 'shards of one file'])
def test_killed_while_replacing_another_run(job, part, inputs, whole, tmp_path):
    "Where there is metadata, of a split or of the data set, all that it describes is of one run"
    want, renames = whole[job]
    root = project(inputs, tmp_path, job, window_length=15, batches_per_file=7)
    assert run(root).returncode == 0
    old = left(root)
    project(inputs, root, job)
    assert run(root, 1 + round(part*(renames-1)), True).returncode == -signal.SIGKILL
    now, found = left(root), []
    for k in range(3):
        here = f'data/t-split{k}/'
        if here+'metadata.json' not in now: continue
        listed = [here+f['path'] for f in json.loads(now[here+'metadata.json'])['batch_files']]
        found.append(run_of({f: now.get(f) for f in [here+'metadata.json', *listed]}, old, want, here+'metadata.json'))
    chief = 'configs/metadata_configs/t.json'
    if chief in now: run_of({f: d for f, d in now.items() if f == chief or f.startswith('data/t-split') and f.endswith(('.pt', '.parquet')) and f in (old if now[chief] == old[chief] else want)}, old, want, chief)
    assert run(root).returncode == 0 and left(root) == want


@pytest.mark.parametrize('job', ['shards of a folder', 'two workers'])
def test_killed_at_any_moment(job, inputs, whole, tmp_path):
    "The process and its workers die while they work, at moments that nobody chose"
    rng, want = random.Random(0), whole[job][0]
    root = project(inputs, tmp_path, job)
    code = f'import fastseqprep.preprocess; from fastseqprep.cli import main; print("go", flush=True); raise SystemExit(main({COMMAND!r}))'
    start = time.perf_counter()
    assert subprocess.run([sys.executable, '-c', code], cwd=project(inputs, tmp_path/'timing', job), capture_output=True, timeout=300).returncode == 0
    longest = time.perf_counter() - start
    for _ in range(5):
        p = subprocess.Popen([sys.executable, '-c', code], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
        p.stdout.readline()
        try: p.wait(rng.uniform(.02, longest))
        except subprocess.TimeoutExpired: pass
        try: os.killpg(p.pid, signal.SIGKILL)
        except ProcessLookupError: pass
        p.wait()
        p.stdout.close()
        check_killed(root, want)
    assert run(root).returncode == 0 and left(root) == want


def test_nothing_but_our_own_is_ever_deleted(inputs, whole, tmp_path):
    "Other things in data/, whatever they are called, stay"
    root = project(inputs, tmp_path, 'shards of one file')
    mine = {'data/temp/keep.txt': 'a', 'data/notes.txt': 'b', 'data/other-split0/x.pt': 'c', 'data/t/keep.txt': 'd', 'configs/metadata_configs/other.json': '{}'}
    for name, text in mine.items():
        (root/name).parent.mkdir(parents=True, exist_ok=True)
        (root/name).write_text(text)
    assert run(root, 2, True).returncode == -signal.SIGKILL
    assert run(root).returncode == 0
    got = left(root)
    for name, text in mine.items(): assert got.pop(name) == text.encode()
    assert got == whole['shards of one file'][0]


def test_a_failed_run_leaves_the_last_good_one(inputs, tmp_path):
    "Bad input is refused; what an earlier run wrote stays as it was"
    root = project(inputs, tmp_path, 'shards of a folder')
    assert run(root).returncode == 0
    before = left(root)
    f = root/'input'/'t'/'3.parquet'
    pl.read_parquet(f).with_columns(amount=pl.when(pl.int_range(pl.len()) == 17).then(float('nan')).otherwise('amount')).write_parquet(f)
    p = run(root)
    assert p.returncode == 1 and '3.parquet' in p.stderr and 'amount' in p.stderr and 'Traceback' not in p.stderr, p.stderr
    assert left(root) == before


@pytest.mark.parametrize('name', ['t.json', 'metadata.json'])
def test_metadata_that_cannot_be_written(inputs, whole, tmp_path, monkeypatch, name):
    "What is known of a run is written beside its windows: an error there is an error of the run, which can be gone on with"
    from fastseqprep.preprocess import preprocess
    import fastseqprep.preprocess as module
    root = project(inputs, tmp_path, 'shards of one file', n_cores=2)
    monkeypatch.chdir(root)
    config = yaml.safe_load((root/'configs'/'preprocess.yaml').read_text())
    def full(real):
        def f(path, *args):
            if Path(path).name == name: raise OSError(28, 'No space left on device', str(path))
            return real(path, *args)
        return f
    with monkeypatch.context() as m:
        for f in ('write_metadata', 'metadata_writer'): m.setattr(module, f, full(getattr(module, f)))
        with pytest.raises(OSError, match='No space left'): preprocess(config, progress=False)
    assert not [n for n in left(root) if final(n) and '.t.run' not in n]
    preprocess({**config, 'continue_preprocessing': True}, progress=False)
    assert left(root).keys() == whole['shards of one file'][0].keys()
    assert all(data == whole['shards of one file'][0][n] for n, data in left(root).items())


def test_two_data_sets_share_a_project(inputs, whole, tmp_path):
    "Each has its own outputs and its own scratch folder"
    root = project(inputs, tmp_path, 'one file')
    shutil.copyfile(root/'input'/'t.parquet', root/'input'/'u.parquet')
    (root/'configs'/'u.yaml').write_text(yaml.safe_dump({**CONFIG, 'preprocessing_data_path': 'input/u.parquet'}))
    ps = [subprocess.Popen([sys.executable, '-m', 'fastseqprep.cli', *COMMAND[:2], f'configs/{c}.yaml'], cwd=root, stderr=subprocess.PIPE, text=True) for c in ('preprocess', 'u')]
    for p in ps: assert p.wait(300) == 0, p.stderr.read()
    for p in ps: p.stderr.close()
    got = left(root)
    for name, data in whole['one file'][0].items():
        if 't-split' in name:
            assert got[name] == data
            assert got[name.replace('t-split', 'u-split')] == data
    assert json.loads(got['configs/metadata_configs/u.json'])['id_maps'] == json.loads(got['configs/metadata_configs/t.json'])['id_maps']
