"""Bad input gives one clear error and writes nothing; a killed run leaves no half file and is finished by running again."""
import datetime as dt, hashlib, json, os, signal, subprocess, sys, textwrap
from pathlib import Path

import polars as pl, pytest

from events_tables import make_frames, run_job, write_files
from fastseqprep.source import DataSource
from fastseqprep.tokenizer import Tokenizer
from fastseqprep.events import PRAGMADataset
from fastseqprep.store import StoreError, open_store
from fastseqprep.dataloader import PRAGMADataLoader

HERE = Path(__file__).parent


def users(**cols): return pl.DataFrame({'id': [1, 2, 3], 'city': ['a', 'b', None], 'age': [20, 30, None], **cols}, strict=False)
def visits(**cols): return pl.DataFrame({'id': [1, 1, 2], 'page': ['x', 'y', 'x'], 'secs': [1.5, None, 0.], 'at': [10, 20, 30], **cols}, strict=False)


def profile(df=None, **kw):
    return DataSource(users() if df is None else df, **{**dict(cats=['city'], conts=['age'], entity_col='id', is_profile=True, name='users'), **kw})


def events(df=None, **kw):
    return DataSource(visits() if df is None else df, **{**dict(cats=['page'], conts=['secs'], time_col='at', entity_col='id', name='visits'), **kw})


def file_source(path, **kw): return DataSource.from_file(path, **{**dict(cats=['page'], time_col='at', entity_col='id'), **kw})


def job(out, make, eval_time=100, entity_col='id'):
    prof, evs = make()
    ds = PRAGMADataset(prof, evs, entity_col, out, progress=False)
    ds.fit_tokenizer()
    ds.write_kv(eval_time, 2)


def a_file(tmp_path, name, text):
    (tmp_path/name).write_text(text)
    return tmp_path/name


def files(folder, **texts):
    for name, text in texts.items(): a_file(folder, name + '.csv', text)
    return folder/'*.csv'


# name: (what makes the sources, given a folder for input files; words that the message must hold)
BAD = {
    'missing column': (lambda p: (profile(), [events(cats=['page', 'pagee'])]), ['pagee', 'visits', 'page']),
    'missing entity column': (lambda p: (profile(), [events(visits().rename({'id': 'user'}))]), ['id', 'visits', 'user']),
    'missing time column': (lambda p: (profile(), [events(time_col='when')]), ['when', 'visits']),
    'no time column declared': (lambda p: (profile(), [events(time_col=None)]), ['time_col', 'visits']),
    'several problems at once': (lambda p: (profile(), [events(cats=['page', 'nope'], conts=['secs', 'page'])]), ['nope', 'page', 'cats', 'conts']),
    'column in two roles': (lambda p: (profile(), [events(texts=['page'])]), ['page', 'cats', 'texts']),
    'column twice in a role': (lambda p: (profile(cats=['city', 'city']), [events()]), ['city', 'cats']),
    'entity column as a feature': (lambda p: (profile(cats=['city', 'id']), [events()]), ['id', 'cats']),
    'time column as a feature': (lambda p: (profile(), [events(conts=['secs', 'at'])]), ['at', 'conts']),
    'signed outside conts': (lambda p: (profile(), [events(signed_conts=['page'])]), ['page', 'signed_conts', 'conts']),
    'a feature called lifelong': (lambda p: (profile(), [events(visits(lifelong=['a'] * 3), cats=['lifelong'])]), ['lifelong']),
    'duplicate profile ids': (lambda p: (profile(pl.concat([users(), users()[1:2]])), [events()]), ['2', 'users', 'id']),
    'null entity ids': (lambda p: (profile(), [events(visits(id=[1, None, None]))]), ['id', 'visits', '2', 'null']),
    'null profile ids': (lambda p: (profile(users(id=[1, None, 3])), [events()]), ['id', 'users', '1', 'null']),
    'float entity ids': (lambda p: (profile(), [events(visits(id=[1., 1., 2.]))]), ['id', 'visits', 'Float64']),
    'lists for a category': (lambda p: (profile(), [events(visits(page=[['x'], ['y'], ['x']]))]), ['page', 'visits', 'List']),
    'lists for a number': (lambda p: (profile(users(age=[[1], [2], [3]])), [events()]), ['age', 'users', 'List']),
    'words for times': (lambda p: (profile(), [events(visits(at=['10', '20', 'soon']))]), ['at', 'visits', 'soon']),
    'dates that do not exist': (lambda p: (profile(), [events(visits(at=['2020-01-01', '2020-02-31', '2020-03-01']))]), ['at', 'visits', '2020-02-31']),
    'null times': (lambda p: (profile(), [events(visits(at=[10, None, 30]))]), ['at', 'visits', '1', 'null_time']),
    'bools for times': (lambda p: (profile(), [events(visits(at=[True, False, True]))]), ['at', 'visits', 'Boolean']),
    'durations for times': (lambda p: (profile(), [events(visits(at=pl.Series([1, 2, 3]).cast(pl.Duration('us'))))]), ['at', 'visits', 'Duration']),
    'a flag for a milestone': (lambda p: (profile(users(joined=[True, False, None]), lifelong=['joined']), [events()]), ['joined', 'users', 'Boolean']),
    'words for a milestone': (lambda p: (profile(users(joined=['2020-01-01', 'later', None]), lifelong=['joined']), [events()]), ['joined', 'users', 'later']),
    'an empty csv file': (lambda p: (None, [file_source(a_file(p, 'visits.csv', ''))]), ['visits.csv', 'empty']),
    'an empty parquet file': (lambda p: (None, [file_source(a_file(p, 'visits.parquet', ''))]), ['visits.parquet']),
    'a file that is no parquet': (lambda p: (None, [file_source(a_file(p, 'visits.parquet', 'id,page,at\n1,x,10\n'))]), ['visits.parquet']),
    'a missing file': (lambda p: (None, [file_source(p/'gone.csv')]), ['gone.csv']),
    'a glob without files': (lambda p: (None, [file_source(p/'*.csv')]), ['*.csv']),
    'files of different columns': (lambda p: (None, [file_source(files(p, a='id,page,at\n1,x,10\n', b='id,pages,at\n1,x,10\n'))]), ['b.csv', 'page']),
    'files of different types': (lambda p: (None, [file_source(files(p, a='id,page,at\n1,x,10\n', b='id,page,at\n1,x,soon\n'))]), ['a.csv', 'b.csv', 'at']),
    'unparsable times in one file of many': (lambda p: (None, [file_source(files(p, a='id,page,at\n1,x,2020-01-01\n', b='id,page,at\n1,x,soon\n'))]), ['b.csv', 'at', 'soon']),
    'a source without rows': (lambda p: (profile(), [events(visits()[:0])]), ['visits', 'rows']),
    'a file with a header only': (lambda p: (None, [file_source(a_file(p, 'visits.csv', 'id,page,at\n'))]), ['visits', 'rows']),
    'a profile without rows': (lambda p: (profile(users()[:0]), [events()]), ['users', 'rows']),
    'nothing at all': (lambda p: (None, []), ['profile', 'events']),
    'an event source as the profile': (lambda p: (events(), []), ['visits', 'is_profile']),
    'a profile among the events': (lambda p: (None, [profile()]), ['users', 'is_profile']),
    'two sources of one name': (lambda p: (None, [events(), events()]), ['visits']),
    'other entity columns': (lambda p: (profile(), [events(visits().rename({'id': 'user'}), entity_col='user')]), ['id', 'user', 'visits']),
    'entity ids of two types': (lambda p: (profile(), [events(visits(id=['1', '1', '2']))]), ['id', 'String', 'Int64']),
}


@pytest.mark.parametrize('name', BAD)
def test_bad_input(name, tmp_path):
    make, words = BAD[name]
    (tmp_path/'in').mkdir()
    out = tmp_path/'out'
    with pytest.raises((ValueError, TypeError, FileNotFoundError)) as e: job(out, lambda: make(tmp_path/'in'))
    check_message(e, words)
    assert written(out) == []


def check_message(e, words):
    said = str(e.value)
    missing = [w for w in words if w not in said]
    assert not missing, f'{missing} not in: {said}'
    assert len(said) < 1000 and 'Traceback' not in said


def written(out): return sorted(str(p.relative_to(out)) for p in out.rglob('*')) if out.exists() else []


@pytest.mark.parametrize('eval_time,words', [(None, ['eval_time', 'users']), ('soon', ['eval_time', 'soon']), ('2020-02-31', ['eval_time', '2020-02-31']), (float('nan'), ['eval_time'])])
def test_bad_eval_time(eval_time, words, tmp_path):
    out = tmp_path/'out'
    ds = PRAGMADataset(profile(users(joined=['2020-01-01', None, None]), lifelong=['joined']), [events()], 'id', out)
    ds.fit_tokenizer()
    before = written(out)
    with pytest.raises((ValueError, TypeError)) as e: ds.write_kv(eval_time, 2)
    check_message(e, words)
    assert written(out) == before


@pytest.mark.parametrize('n', [0, -1, 1.5])
def test_bad_shard_count(n, tmp_path):
    ds = PRAGMADataset(profile(), [events()], 'id', tmp_path/'out')
    ds.fit_tokenizer()
    before = written(tmp_path/'out')
    with pytest.raises((ValueError, TypeError), match='n_shards'): ds.write_kv(100, n)
    assert written(tmp_path/'out') == before


# ---------------------------------------------------------------- folders with something in them
@pytest.fixture(scope='module')
def bank(tmp_path_factory): return write_files(tmp_path_factory.mktemp('bank'), make_frames(60, seed=1), parts=2)


@pytest.fixture(scope='module')
def whole(bank, tmp_path_factory):
    "What an undisturbed run writes"
    return run_job(bank, tmp_path_factory.mktemp('whole'))


def test_a_folder_of_another_run_is_refused(bank, whole, tmp_path):
    job(tmp_path, lambda: (profile(), [events()]))
    before = {p: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises((ValueError, FileExistsError)) as e: run_job(bank, tmp_path)
    check_message(e, [str(tmp_path)])
    assert {p: p.read_bytes() for p in tmp_path.iterdir()} == before
    assert written(tmp_path) == sorted(p.name for p in before)


def test_running_again_gives_the_same(bank, whole, tmp_path):
    assert run_job(bank, tmp_path) == whole
    assert run_job(bank, tmp_path) == whole


def test_fewer_shards_leave_no_stale_ones(bank, tmp_path):
    "Another number of shards is another run: refused, or all of the old one is gone"
    run_job(bank, tmp_path, n_shards=4)
    try: run_job(bank, tmp_path, n_shards=2)
    except (ValueError, FileExistsError): want = 4
    else: want = 2
    assert sorted(p.name for p in tmp_path.glob('shard_*.parquet')) == [f'shard_{i}.parquet' for i in range(want)]
    assert all_uids(tmp_path) == entities(bank)


def entities(globs): return sorted(pl.read_parquet(globs['customers'])['cust'])


def all_uids(folder):
    uids = [u for b in PRAGMADataLoader.from_path(folder, entity_col='cust', mask=False) for u in b['uids']]
    assert len(uids) == len(set(uids))
    return sorted(uids)


def test_stale_files_are_never_read(bank, tmp_path):
    run_job(bank, tmp_path)
    df = pl.read_parquet(tmp_path/'shard_0.parquet').with_columns(pl.format('stale{}', pl.col('cust')).alias('cust'))
    df.write_parquet(tmp_path/'shard_9.parquet')
    df.write_parquet(tmp_path/'shard_0.parquet.tmp')
    assert all_uids(tmp_path) == entities(bank)


def test_a_changed_shard_is_noticed(bank, tmp_path):
    run_job(bank, tmp_path)
    pl.read_parquet(tmp_path/'shard_1.parquet')[:-5].write_parquet(tmp_path/'shard_1.parquet')
    with pytest.raises(ValueError, match='shard_1.parquet'): all_uids(tmp_path)


def test_a_missing_shard_is_noticed(bank, tmp_path):
    run_job(bank, tmp_path)
    (tmp_path/'shard_2.parquet').unlink()
    with pytest.raises((ValueError, FileNotFoundError), match='shard_2.parquet'): all_uids(tmp_path)


def test_a_tokenizer_of_other_data_is_refused(bank, tmp_path):
    run_job(bank, tmp_path/'a')
    job(tmp_path/'b', lambda: (profile(), [events()]))
    other = Tokenizer.load(tmp_path/'b'/'tokenizer.json')
    with pytest.raises(ValueError) as e: next(iter(PRAGMADataLoader.from_path(tmp_path/'a', entity_col='cust', tok=other)))
    check_message(e, ['tokenizer'])
    shards = sorted((tmp_path/'a').glob('shard_*.parquet'))
    with pytest.raises(ValueError): next(iter(PRAGMADataLoader(shards, 'cust', tok=other, mask=True)))
    (tmp_path/'a'/'tokenizer.json').write_bytes((tmp_path/'b'/'tokenizer.json').read_bytes())
    with pytest.raises(ValueError) as e: next(iter(PRAGMADataLoader.from_path(tmp_path/'a', entity_col='cust')))
    check_message(e, ['tokenizer'])


def test_a_tokenizer_that_knows_a_field_otherwise_is_refused(tmp_path):
    tok = Tokenizer().fit([events(visits(page=[1, 2, 3]), cats=[], conts=['page', 'secs'])])
    with pytest.raises(ValueError) as e: PRAGMADataset(None, [events()], 'id', tmp_path/'out', tok=tok, progress=False).write_kv(100, 2)
    check_message(e, ['page', 'visits', 'cat', 'num'])
    assert written(tmp_path/'out') == []


def test_an_edited_tokenizer_is_noticed(bank, tmp_path):
    run_job(bank, tmp_path)
    f = tmp_path/'tokenizer.json'
    d = json.loads(f.read_text())
    d['num_bounds']['age'][0] += 1
    f.write_text(json.dumps(d))
    with pytest.raises(ValueError) as e: Tokenizer.load(f)
    check_message(e, ['tokenizer.json'])


# ---------------------------------------------------------------- killed runs
KILLED = textwrap.dedent('''
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from events_tables import run_job
    seen, real = 0, os.replace
    def dying(*a, **kw):
        global seen
        seen += 1
        if seen == {n} and {before}: os.kill(os.getpid(), signal.SIGKILL)
        out = real(*a, **kw)
        if seen == {n}: os.kill(os.getpid(), signal.SIGKILL)
        return out
    os.replace = dying
    run_job({globs!r}, {out!r}, overwrite={overwrite})
''')


def run_and_kill(bank, out, n, before, overwrite=False):
    "A run in a process of its own that dies at its n-th rename"
    code = KILLED.format(tests=str(HERE), globs=bank, out=str(out), n=n, before=before, overwrite=overwrite)
    return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120)


# An undisturbed run of four shards makes 21 renames: tokenizer, notes and shards in its scratch folder, then 15 to 21 put all in place, the manifest last.
@pytest.mark.parametrize('n,before', [(1, True), (4, True), (9, False), (14, False), (15, False), (17, True), (20, False), (21, True)])
def test_killed_at_a_rename(n, before, bank, whole, tmp_path):
    "The process dies (kill -9) just before or after it gives a finished file its name"
    p = run_and_kill(bank, tmp_path, n, before)
    assert p.returncode == -signal.SIGKILL, p.stderr[-2000:]
    check_killed(tmp_path, whole)
    assert run_job(bank, tmp_path) == whole
    assert all_uids(tmp_path) == entities(bank)
    assert all_of_ours(tmp_path)


@pytest.mark.parametrize('n', [9, 16, 20])
def test_killed_while_replacing_another_run(n, bank, whole, tmp_path):
    "What is left is the old run, or is refused by the reader; never a mixture"
    old = run_job(bank, tmp_path, n_shards=3)
    p = run_and_kill(bank, tmp_path, n, True, overwrite=True)
    assert p.returncode == -signal.SIGKILL, p.stderr[-2000:]
    try: assert all_uids(tmp_path) == entities(bank) and {k: v for k, v in digests_of(tmp_path).items() if k in old} == old
    except (ValueError, FileNotFoundError): pass
    assert run_job(bank, tmp_path, overwrite=True) == whole
    assert all_uids(tmp_path) == entities(bank)
    assert all_of_ours(tmp_path)


def test_killed_at_any_moment(bank, whole, tmp_path):
    "The process dies while it works, at a moment that nobody chose"
    code = f'import sys; sys.path.insert(0, {str(HERE)!r}); import fastseqprep.events; from events_tables import run_job; print("go", flush=True); run_job({bank!r}, {str(tmp_path)!r})'
    for wait in .05, .15, .3:
        p = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
        p.stdout.readline()
        try: p.wait(wait)
        except subprocess.TimeoutExpired: os.kill(p.pid, signal.SIGKILL)
        p.wait()
        p.stdout.close()
        check_killed(tmp_path, whole)
    assert run_job(bank, tmp_path) == whole
    assert all_uids(tmp_path) == entities(bank)
    assert all_of_ours(tmp_path)


def all_of_ours(folder):
    "Nothing in the folder but what the manifest lists, and the cache of compiled records"
    listed = {o['name'] for o in json.loads((folder/'manifest.json').read_text())['outputs']} | {'manifest.json'}
    return {f for f in written(folder) if not f.startswith('.cache')} == listed


def check_killed(folder, whole):
    "Every file that bears a final name is whole"
    there = digests_of(folder)
    assert all(there.get(name, h) == h for name, h in whole.items())
    if (folder/'manifest.json').exists(): json.loads((folder/'manifest.json').read_text())


def digests_of(folder):
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir() if f.is_file()}


# ---------------------------------------------------------------- the evaluation time, to the instant

def _visits(**kw):
    df = pl.DataFrame(dict(id=[1, 1, 1], t=[dt.datetime(2024, 1, 1, 0, 0, 0, us) for us in (0, 200_000, 900_000)], a=['at', 'after', 'later']))
    return DataSource(df, cats='a', time_col='t', entity_col='id', name='visits', **kw)


def _values(folder): return pl.read_parquet(folder/'shard_0.parquet')['value'].to_list()


def test_a_part_of_a_second_after_the_evaluation_time_is_after_it(tmp_path):
    PRAGMADataset(events=_visits(), entity_col='id', out_path=tmp_path/'one', progress=False).write_kv('2024-01-01', n_shards=1)
    assert _values(tmp_path/'one') == ['at']
    points = pl.DataFrame(dict(id=[1], t=['2024-01-01']))
    PRAGMADataset(events=_visits(), entity_col='id', out_path=tmp_path/'points', progress=False).write_kv(points, n_shards=1)
    assert _values(tmp_path/'points') == ['at']


def test_a_local_evaluation_time_means_what_it_means_to_the_events(tmp_path):
    night = DataSource(pl.DataFrame(dict(id=[1], t=['2024-06-01T03:00:00'], a=['x'])), cats='a', time_col='t', entity_col='id', name='tokyo', time_zone='Asia/Tokyo')
    people = DataSource(pl.DataFrame(dict(id=[1], g=['m'])), cats='g', entity_col='id', is_profile=True, name='people')
    PRAGMADataset(people, night, entity_col='id', out_path=tmp_path/'one', progress=False).write_kv('2024-06-01', n_shards=1)
    assert _values(tmp_path/'one') == ['m'] # three in the morning lies after that day's beginning there
    both = PRAGMADataset(people, [night, _visits()], entity_col='id', out_path=tmp_path/'two', progress=False)
    with pytest.raises(ValueError, match='different time zones.*with an offset'): both.write_kv('2024-06-01', n_shards=1)
    both.write_kv('2024-06-01T00:00:00Z', n_shards=1)


def test_evaluation_points_with_ids_of_another_type_are_refused(tmp_path):
    ds = PRAGMADataset(events=_visits(), entity_col='id', out_path=tmp_path/'out', progress=False)
    with pytest.raises(ValueError, match='has ids of type String, the sources have integers'): ds.write_kv(pl.DataFrame(dict(id=['1'], t=['2024-01-01'])), n_shards=1)


def test_what_does_not_fit_a_finished_folder_is_not_added_to_it(tmp_path):
    out = tmp_path/'out'
    PRAGMADataset(events=_visits(), entity_col='id', out_path=out, progress=False).write_kv(n_shards=1)
    before = {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()}
    def add(source, **kw): PRAGMADataset(events=source, entity_col='id', out_path=out, tok=Tokenizer.load(out), progress=False).write_kv(append=True, n_shards=1, **kw)
    frame = pl.DataFrame(dict(id=['b'], t=[1], a=['at']))
    with pytest.raises(StoreError, match='has ids of type int64, this dataset string'): add(DataSource(frame, cats='a', time_col='t', entity_col='id', name='visits'))
    with pytest.raises(StoreError, match="no event source called .'others'"): add(DataSource(frame.with_columns(id=pl.lit(7, dtype=pl.Int64)), cats='a', time_col='t', entity_col='id', name='others'))
    with pytest.raises(StoreError, match='evaluation points'): add(_visits(), eval_time=pl.DataFrame(dict(id=[1], t=['2025-01-01'])))
    assert {p.name: p.read_bytes() for p in out.iterdir() if p.is_file()} == before


def test_a_finished_folder_stays_whole_until_the_new_output_is_there(tmp_path):
    out = tmp_path/'out'
    PRAGMADataset(events=_visits(), entity_col='id', out_path=out, progress=False).write_kv(n_shards=1)
    other = DataSource(pl.DataFrame(dict(id=[1], t=[1], b=['x'])), cats='b', time_col='t', entity_col='id', name='other')
    job = PRAGMADataset(events=other, entity_col='id', out_path=out, overwrite=True, progress=False)
    job.fit_tokenizer()
    open_store(out, deep=True)
    job.write_kv(n_shards=1)
    assert _values(open_store(out, deep=True).folder) == ['x']


def test_the_split_stays_with_the_tokenizer(tmp_path):
    df = pl.DataFrame(dict(id=range(40), t=range(40), a=[f'v{i}' for i in range(40)]))
    source = DataSource(df, cats='a', time_col='t', entity_col='id', name='visits')
    PRAGMADataset(events=source, entity_col='id', out_path=tmp_path/'fit', progress=False).fit_tokenizer(fit_on='train', valid_pct=.3, seed=7)
    PRAGMADataset(events=source, entity_col='id', out_path=tmp_path/'out', tok=Tokenizer.load(tmp_path/'fit'), progress=False).write_kv(n_shards=1)
    assert open_store(tmp_path/'out').manifest.split == dict(method='stable_hash', valid_pct=.3, seed=7, hash_version=1)
    with pytest.raises(ValueError, match='valid_pct is 1.5'): PRAGMADataset(events=source, entity_col='id', out_path=tmp_path/'no', progress=False).fit_tokenizer(fit_on='train', valid_pct=1.5)


def test_a_source_without_fields_gives_no_tokens(tmp_path):
    plain = DataSource(pl.DataFrame(dict(id=[1], t=[1])), time_col='t', entity_col='id', name='plain')
    PRAGMADataset(events=plain, entity_col='id', out_path=tmp_path/'out', progress=False).write_kv(n_shards=1)
    assert _values(tmp_path/'out') == []
