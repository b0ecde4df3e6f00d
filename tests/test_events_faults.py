"""Bad input gives one clear error and writes nothing; a killed run leaves no half file and is finished by running again."""
import datetime as dt, hashlib, json, os, shutil, signal, subprocess, sys, textwrap
from pathlib import Path

import polars as pl, pytest

from events_tables import make_frames, run_job, write_files
from fastseqprep.resume import Addition
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
    'a name that the sign of another source needs': (lambda p: (profile(conts=['age'], signed_conts=['age']), [events(visits(age_sign=['a'] * 3), cats=['age_sign'])]), ['age_sign', 'visits', 'users', 'rename']),
    'the same the other way round': (lambda p: (profile(users(secs_sign=['a'] * 3), cats=['secs_sign']), [events(signed_conts=['secs'])]), ['secs_sign', 'visits', 'users', 'rename']),
    'numbers wider than 64 bits': (lambda p: (profile(users(age=pl.Series([1, 2, 3], dtype=pl.Int128))), [events()]), ['age', 'users', 'Int128', 'Float64']),
    'categories wider than 64 bits': (lambda p: (profile(users(city=pl.Series([1, 2, 3], dtype=pl.UInt128))), [events()]), ['city', 'users', 'UInt128', 'String']),
    'negative ids beside large ones': (lambda p: (profile(users(id=pl.Series([1, 2, 2**63], dtype=pl.UInt64))), [events(visits(id=[1, -1, 2]))]), ['id', 'visits', '-1', 'users', 'UInt64', 'text']),
    'years written as text': (lambda p: (profile(), [events(visits(at=['2022', '2023', '2024']))]), ['at', 'visits', '2022', "'%Y'"]),
    'years written as categories': (lambda p: (profile(), [events(visits(at=pl.Series(['2022', '2023', '2024'], dtype=pl.Categorical)))]), ['at', 'visits', '2022', "'%Y'"]),
    'a year of birth': (lambda p: (profile(users(born=['1980', None, '1999']), lifelong=['born']), [events()]), ['born', 'users', '1980', "'%Y'"]),
    'objects among words': (lambda p: (None, [file_source(a_file(p, 'visits.jsonl', '{"id":1,"page":"x","at":1}\n{"id":1,"page":{"n":"x"},"at":2}\n'))]), ['visits.jsonl', 'page', 'row 2', 'object']),
    'words among objects': (lambda p: (None, [file_source(a_file(p, 'visits.jsonl', '{"id":1,"page":{"n":"x"},"at":1}\n{"id":1,"page":"x","at":2}\n'))]), ['visits.jsonl', 'page', 'row 1', 'object']),
    'objects among numbers': (lambda p: (None, [file_source(a_file(p, 'visits.jsonl', '{"id":1,"page":"x","secs":1,"at":1}\n{"id":1,"page":"x","secs":{"s":1},"at":2}\n'), conts=['secs'])]), ['visits.jsonl', 'secs', 'row 2', 'object']),
    'lists among numbers': (lambda p: (None, [file_source(a_file(p, 'visits.jsonl', '{"id":1,"page":"x","secs":1,"at":1}\n{"id":1,"page":"x","secs":[1],"at":2}\n'), conts=['secs'])]), ['visits.jsonl', 'secs', 'row 2', 'list']),
    'an object for an id': (lambda p: (None, [file_source(a_file(p, 'visits.jsonl', '{"id":"a","page":"x","at":1}\n{"id":{"n":1},"page":"x","at":2}\n'))]), ['visits.jsonl', 'id', 'row 2', 'object']),
    'an object late in the file': (lambda p: (None, [file_source(a_file(p, 'visits.jsonl', '{"id":1,"page":"x","at":1}\n' * 11_000 + '\n{"id":1,"page":{"n":"x"},"at":2}\n'))]), ['visits.jsonl', 'page', 'row 11,001', 'object']),
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


@pytest.mark.parametrize('inside', ['', 'deeper/out'])
def test_an_output_path_that_is_a_file(inside, tmp_path):
    f = a_file(tmp_path, 'file', 'precious')
    with pytest.raises(StoreError) as e: PRAGMADataset(profile(), [events()], 'id', f/inside if inside else f, progress=False)
    check_message(e, [str(f), 'is a file', 'folder'])
    assert f.read_text() == 'precious' and written(tmp_path) == ['file']


def test_a_file_that_takes_the_place_of_the_folder(tmp_path):
    ds = PRAGMADataset(profile(), [events()], 'id', tmp_path/'out', progress=False)
    f = a_file(tmp_path, 'out', 'precious')
    with pytest.raises(StoreError, match='is a file'): ds.fit_tokenizer()
    assert f.read_text() == 'precious'


# ---------------------------------------------------------------- what is read right
def test_text_that_looks_like_json_is_text(tmp_path):
    lines = ['{"id":1,"page":"{x}","at":1}', '', '{"id":1,"page":"[\\"a\\"]","at":2}', '{"id":1,"page":"{\\"n\\":1}","at":3}', '{"id":1,"page":5,"at":4}', '{"id":1,"page":null,"at":5}']
    got = file_source(a_file(tmp_path, 'visits.jsonl', '\n'.join(lines)))
    assert [v for *_, df in got.chunks(2) for v in df['page']] == ['{x}', '["a"]', '{"n":1}', '5', None]


def test_years_and_seconds_by_declaration(tmp_path):
    def times(**kw): return Tokenizer().fit([s := events(visits(at=['2022', '2023', '1970']), **kw)]).encode_source(s)['time'].unique().sort().to_list()
    assert times(time_format='%Y') == [0, 1640995200, 1672531200]
    assert times(time_format='%Y', time_zone='Europe/Warsaw') == [-3600, 1640995200 - 3600, 1672531200 - 3600]
    assert times(time_format='%s', time_zone='Europe/Warsaw') == [1970, 2022, 2023]
    with pytest.warns(UserWarning, match='years'): assert Tokenizer().fit([s := events(visits(at=[2022, 2023, 1970]))]).encode_source(s)['time'].max() == 2023
    mixed = events(visits(at=['2022', '12', '1970']))
    assert Tokenizer().fit([mixed]).encode_source(mixed)['time'].max() == 2022


def test_numbers_that_are_not_finite_are_no_categories(tmp_path):
    score = visits(page=[1.5, float('nan'), float('inf')])
    for source in events(score), events(score, cats=[], texts=['page']):
        tok = Tokenizer().fit([source])
        assert {'1.5', ''} <= set(tok.val_vocab) and not {'NaN', 'inf'} & set(tok.val_vocab)
    assert Tokenizer().fit([events(score)]).encode_source(events(score)).filter(key='page')['value'].to_list() == ['1.5', '', '']
    null = Tokenizer(null_token=True).fit([events(score)])
    assert null.encode_source(events(score)).filter(key='page').select('value', 'val_id').rows()[1:] == [('[NULL]', 3)] * 2 and '' not in null.val_vocab
    words = events(visits(page=['NaN', 'inf', 'x']))
    assert {'NaN', 'inf'} <= set(Tokenizer().fit([words]).val_vocab)


def test_wide_and_negative_integers_of_one_key(tmp_path):
    "UInt64 in one file or source and negative Int64 in another: both are what they are"
    big, small = pl.DataFrame({'id': [1], 'page': [2**64 - 1], 'at': [1]}, schema_overrides={'page': pl.UInt64}), pl.DataFrame({'id': [1], 'page': [-5], 'at': [2]})
    big.write_parquet(tmp_path/'a.parquet'); small.write_parquet(tmp_path/'b.parquet')
    for role in 'cats', 'conts':
        kw = {'cats': [], role: ['page']}
        files, two = [file_source(tmp_path/'*.parquet', **kw)], [file_source(tmp_path/f'{n}.parquet', name=n, **kw) for n in 'ab']
        tok = Tokenizer(num_buckets=2).fit(files)
        assert Tokenizer(num_buckets=2).fit(two).hash == tok.hash
        assert tok.encode_source(files[0])['value'].to_list() == [str(2**64 - 1), '-5']
        if role == 'conts': assert tok.encode_source(files[0])['val_id'].to_list() == [tok.val_vocab['<bucket_2>'], tok.val_vocab['<bucket_1>']]


# ---------------------------------------------------------------- milestones and empty rows in the ledger
def ledger(out): return open_store(out).manifest.ledger


def values(out): return [tuple(r) for r in pl.read_parquet(out/'shard_0.parquet').select('id', 'value').rows()]


def test_unreadable_milestones_are_counted(tmp_path):
    kw = dict(lifelong=['joined', 'left'], bad_time='null')
    people = users(joined=['2020-01-01', 'soon', ''], left=['never', 'soon', None])
    PRAGMADataset(profile(people, **kw), [events()], 'id', tmp_path/'a', progress=False).write_kv('2021-01-01', 1)
    assert ledger(tmp_path/'a')['users'] == dict(read=3, kept=3, dropped={}, counts={'unreadable milestones': 3})
    people.write_csv(tmp_path/'people.csv')
    src = DataSource.from_file(tmp_path/'people.csv', cats=['city'], entity_col='id', is_profile=True, name='users', **kw)
    PRAGMADataset(src, [events()], 'id', tmp_path/'b', progress=False).write_kv('2021-01-01', 1)
    assert ledger(tmp_path/'b')['users']['counts'] == {'unreadable milestones': 3}
    with pytest.raises(ValueError, match="column 'joined', row 2: 'soon'"): PRAGMADataset(profile(people, lifelong=['joined']), [events()], 'id', tmp_path/'c', progress=False).write_kv('2021-01-01', 1)


def test_rows_without_a_token_are_not_kept(tmp_path):
    people = DataSource(users(joined=[dt.date(2020, 1, 1), dt.date(2030, 1, 1), None]), lifelong='joined', entity_col='id', is_profile=True, name='people')
    bare = DataSource(visits(), time_col='at', entity_col='id', name='bare')
    PRAGMADataset(people, [bare, events()], 'id', tmp_path, progress=False).write_kv('2021-01-01', 1)
    assert ledger(tmp_path)['people'] == dict(read=3, kept=1, dropped={'no token': 2}, counts={'milestones after the evaluation time': 1})
    assert ledger(tmp_path)['bare'] == dict(read=3, kept=0, dropped={'no token': 3}, counts={})
    assert ledger(tmp_path)['visits']['kept'] == 3 and (1, 'joined') in values(tmp_path)


def test_events_without_fields_do_not_move_the_clock(tmp_path):
    "They are no events, so `logsec` is not measured from them"
    bare = DataSource(visits(at=[1000, 1000, 1000]), time_col='at', entity_col='id', name='bare')
    PRAGMADataset(None, [bare, events()], 'id', tmp_path, progress=False).write_kv(None, 1)
    assert pl.read_parquet(tmp_path/'shard_0.parquet').filter(id=2)['logsec'].unique().to_list() == [0.]


def test_a_milestone_is_cut_to_the_instant(tmp_path):
    def at(us): return dt.datetime(2024, 1, 1, 0, 0, 0, us)
    people = DataSource(users(joined=[at(0), at(500_000), None]), lifelong='joined', entity_col='id', is_profile=True, name='people')
    PRAGMADataset(people, entity_col='id', out_path=tmp_path, progress=False).write_kv('2024-01-01', 1)
    assert values(tmp_path) == [(1, 'joined')]
    assert ledger(tmp_path)['people']['counts'] == {'milestones after the evaluation time': 1}


def test_a_milestone_of_a_later_event_is_not_known_before_it(tmp_path):
    src = events(visits(began=[5, 6, None]), lifelong=['began'])
    PRAGMADataset(None, [src], 'id', tmp_path/'one', progress=False).write_kv(15, 1)
    assert values(tmp_path/'one') == [(1, 'began'), (1, 'x'), (1, '1.5')] # of the event at 10, not of that at 20
    assert ledger(tmp_path/'one')['visits']['counts'] == {'milestones after the evaluation time': 1}
    PRAGMADataset(None, [src], 'id', tmp_path/'all', progress=False).write_kv(15, 1, after_eval='keep')
    assert [v for _, v in values(tmp_path/'all')].count('began') == 2


def test_points_of_unknown_entities_are_counted(tmp_path):
    points = pl.DataFrame(dict(id=[1, 8, 9], t=[100, 100, 100]))
    PRAGMADataset(profile(), [events()], 'id', tmp_path, progress=False).write_kv(points, 2)
    assert ledger(tmp_path)['evaluation points'] == dict(read=3, kept=1, dropped={'entity without rows': 2}, counts={})


def test_the_order_of_points_does_not_matter(tmp_path):
    points = pl.DataFrame(dict(id=[1, 2, 1], t=[100, 100, 15]))
    for p in points, points[::-1]: PRAGMADataset(profile(), [events()], 'id', tmp_path, progress=False).write_kv(p, 2) # the second finds all done
    with pytest.raises(ValueError, match='has ids of type Float64'): PRAGMADataset(profile(), [events()], 'id', tmp_path, progress=False).write_kv(points.cast({'id': pl.Float64}), 2)


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


TAPS = [1704067200.4, 1704067201., 1704067202.7, 1704067202.700001]
def _stamp(x): return dt.datetime(2024, 1, 1) + dt.timedelta(microseconds=round((x - 1704067200) * 1e6))
WRITTEN = { # the same instants, as events and as evaluation points
    'float': pl.Series(TAPS), 'us': pl.Series([_stamp(x) for x in TAPS], dtype=pl.Datetime('us')), 'ns': pl.Series([_stamp(x) for x in TAPS], dtype=pl.Datetime('ns')) + dt.timedelta(microseconds=0),
    'zoned': pl.Series([_stamp(x) for x in TAPS], dtype=pl.Datetime('us')).dt.replace_time_zone('UTC').dt.convert_time_zone('Asia/Tokyo'),
    'text': pl.Series([_stamp(x).isoformat() + 'Z' for x in TAPS]), 'nano text': pl.Series([f'{_stamp(x).isoformat(timespec="microseconds")}000Z' for x in TAPS])}


def _seen(folder): return [''.join(r['value']) for r in pl.read_parquet(folder/'shard_0.parquet').group_by('record_idx', maintain_order=True).agg('value').to_dicts()]


@pytest.mark.parametrize('points', WRITTEN)
@pytest.mark.parametrize('events', WRITTEN)
def test_an_event_is_seen_at_its_own_instant(events, points, tmp_path):
    "Also where several lie in one second, whatever the two columns are written as"
    when, at = WRITTEN[events], WRITTEN[points]
    if 'float' in (events, points): when, at = when[:3], at[:3] # the last differs from the one before by less than floats tell reliably
    source = DataSource(pl.DataFrame(dict(id=[1] * len(when), t=when, a=list('abcd')[:len(when)])), cats='a', time_col='t', entity_col='id', name='taps')
    PRAGMADataset(events=source, entity_col='id', out_path=tmp_path, progress=False).write_kv(pl.DataFrame(dict(id=[1] * len(at), w=at)), n_shards=1)
    assert _seen(tmp_path) == ['a', 'ab', 'abc', 'abcd'][:len(at)]
    assert pl.read_parquet(tmp_path/'shard_0.parquet')['eval_time'].unique().sort().to_list() == [1704067200, 1704067201, 1704067202]
    assert len(open_store(tmp_path).manifest.ledger['evaluation points']['dropped']) == 0


def test_nanoseconds_are_told_apart(tmp_path):
    when = pl.Series([0, 1, 2]).cast(pl.Datetime('ns'))
    source = DataSource(pl.DataFrame(dict(id=[1] * 3, t=when, a=list('abc'))), cats='a', time_col='t', entity_col='id', name='taps')
    PRAGMADataset(events=source, entity_col='id', out_path=tmp_path, progress=False).write_kv(pl.DataFrame(dict(id=[1] * 3, w=when[::-1])), n_shards=1)
    assert _seen(tmp_path) == ['a', 'ab', 'abc']


@pytest.mark.parametrize('eval_time', [1704067200.5, '2024-01-01T00:00:00.5Z', '2024-01-01 00:00:00.500', dt.datetime(2024, 1, 1, 0, 0, 0, 500_000), dt.datetime(2024, 1, 1, 1, 0, 0, 500_000, tzinfo=dt.timezone(dt.timedelta(hours=1)))])
@pytest.mark.parametrize('written', ['float', 'us', 'ns', 'text'])
def test_one_evaluation_time_cuts_to_the_instant(eval_time, written, tmp_path):
    people = DataSource(pl.DataFrame(dict(id=[1], joined=['2024-01-01T00:00:00.5Z'], left=['2024-01-01T00:00:00.6Z'])), lifelong=['joined', 'left'], entity_col='id', is_profile=True, name='people')
    source = DataSource(pl.DataFrame(dict(id=[1] * 4, t=WRITTEN[written], a=list('abcd'))), cats='a', time_col='t', entity_col='id', name='taps')
    PRAGMADataset(people, source, entity_col='id', out_path=tmp_path, progress=False).write_kv(eval_time, n_shards=1)
    assert _values(tmp_path) == ['joined', 'a']
    assert open_store(tmp_path).manifest.ledger['taps']['dropped'] == {'after the evaluation time': 3}


def test_evaluation_times_within_a_second_are_different_runs(tmp_path):
    job = lambda: PRAGMADataset(events=_visits(), entity_col='id', out_path=tmp_path, progress=False)
    job().write_kv('2024-01-01T00:00:00.5', n_shards=1)
    before = (tmp_path/'shard_0.parquet').stat().st_mtime_ns
    job().write_kv(1704067200.5, n_shards=1)
    assert (tmp_path/'shard_0.parquet').stat().st_mtime_ns == before
    with pytest.raises(StoreError, match='another config .eval_time.'): job().write_kv('2024-01-01', n_shards=1)


def test_times_of_all_ages_are_cut_rightly(tmp_path):
    "Nanoseconds, microseconds and seconds side by side, also where nanoseconds do not reach"
    years = [1500, 1650, 1900, 2200, 2240, 2500, 9000]
    when = pl.Series([dt.datetime(y, 6, 1) for y in years], dtype=pl.Datetime('us'))
    ids = [1] * len(years)
    source = DataSource(pl.DataFrame(dict(id=ids, t=when, a=list('abcdefg'))), cats='a', time_col='t', entity_col='id', name='old')
    PRAGMADataset(events=source, entity_col='id', out_path=tmp_path/'points', progress=False).write_kv(pl.DataFrame(dict(id=ids, t=when)), n_shards=1)
    assert _seen(tmp_path/'points') == ['abcdefg'[:i+1] for i in range(7)]
    for i, y in enumerate(years):
        PRAGMADataset(events=source, entity_col='id', out_path=tmp_path/str(y), progress=False).write_kv(f'{y}-05-31T23:59:59.999999', n_shards=1)
        assert ''.join(_values(tmp_path/str(y))) == 'abcdefg'[:i]


def test_points_that_give_no_record_are_no_records(tmp_path):
    "The ledger keeps as many points as there are records"
    points = pl.DataFrame(dict(id=[1, 1, 1, 9], t=['2023-12-31', '2024-01-01', '2025-01-01', '2025-01-01']))
    PRAGMADataset(events=_visits(), entity_col='id', out_path=tmp_path, progress=False).write_kv(points, n_shards=2)
    manifest = open_store(tmp_path).manifest
    assert manifest.ledger['evaluation points'] == dict(read=4, kept=2, dropped={'entity without rows': 1, 'no events before it': 1}, counts={})
    assert manifest.facts['records'] == 2 == len(PRAGMADataLoader(tmp_path, entity_col='id', max_tokens=100, shuffle=False).recs)


def test_nothing_before_the_evaluation_time_is_said(tmp_path):
    with pytest.warns(UserWarning, match="source 'visits': all 3 rows lie after the evaluation time"):
        PRAGMADataset(events=_visits(), entity_col='id', out_path=tmp_path, progress=False).write_kv('2020-01-01', n_shards=1)
    assert _values(tmp_path) == []


def test_json_lines_with_a_byte_order_mark(tmp_path):
    "As Windows writes them; they are read like those without, and like a marked CSV file"
    import gzip
    rows = [dict(id=1, page='é', at=10), dict(id=2, page='x', at=20), dict(id=2, page='[y]', at=30)]
    text = ''.join(json.dumps(r, ensure_ascii=False) + '\r\n' for r in rows)
    (tmp_path/'plain.jsonl').write_bytes(text.encode())
    (tmp_path/'marked.jsonl').write_bytes(text.encode('utf-8-sig'))
    (tmp_path/'packed.jsonl.gz').write_bytes(gzip.compress(text.encode('utf-8-sig')))
    (tmp_path/'marked.csv').write_bytes(('id,page,at\r\n' + ''.join('{id},{page},{at}\r\n'.format(**r) for r in rows)).encode('utf-8-sig'))
    for name in 'plain.jsonl', 'marked.jsonl', 'packed.jsonl.gz', 'marked.csv':
        source = file_source(tmp_path/name, name='visits')
        assert source.df.collect().select('id', 'page', 'at').rows() == [(1, 'é', 10), (2, 'x', 20), (2, '[y]', 30)] and source.head(1)['id'].to_list() == [1]
        PRAGMADataset(events=source, entity_col='id', out_path=tmp_path/f'{name}.out', progress=False).write_kv(n_shards=1)
        assert _values(tmp_path/f'{name}.out') == ['é', 'x', '[y]']
    a_file(tmp_path, 'nested.jsonl', '\ufeff{"id":1,"page":"x","at":1}\n{"id":1,"page":{"a":1},"at":2}\n')
    with pytest.raises(ValueError, match='row 2.*is an object'): list(file_source(tmp_path/'nested.jsonl').chunks())


def test_inputs_that_lie_among_what_is_replaced(tmp_path):
    "A run that replaces another never takes its own inputs away"
    out = tmp_path/'out'
    out.mkdir()
    visits().write_parquet(out/'shard_7.parquet')
    source = DataSource.from_file(out/'shard_7.parquet', cats=['page'], time_col='at', entity_col='id')
    data = PRAGMADataset(events=source, entity_col='id', out_path=out, overwrite=True, progress=False)
    with pytest.raises(ValueError, match=r'shard_7.parquet lies where .* would be replaced'): data.write_kv(100, 2)
    assert pl.read_parquet(out/'shard_7.parquet').equals(visits())
    (out/'shard_7.parquet').rename(out/'visits.parquet')
    source = DataSource.from_file(out/'visits.parquet', cats=['page'], time_col='at', entity_col='id')
    PRAGMADataset(events=source, entity_col='id', out_path=out, overwrite=True, progress=False).write_kv(100, 2)
    assert (out/'visits.parquet').exists() and open_store(out, deep=True).manifest.job == 'events'


def test_damaged_manifests_of_an_addition(tmp_path):
    "What is half added is added again; a folder whose own manifest is damaged says what to do"
    job(tmp_path/'out', lambda: (profile(), [events()]))
    users().with_columns(id=pl.col('id')+10).write_parquet(tmp_path/'users.parquet')
    visits().with_columns(id=pl.col('id')+10).write_parquet(tmp_path/'visits.parquet')
    def add(out):
        prof = DataSource.from_file(tmp_path/'users.parquet', cats=['city'], conts=['age'], entity_col='id', is_profile=True, name='users')
        PRAGMADataset(prof, [file_source(tmp_path/'visits.parquet', conts=['secs'], name='visits')], 'id', out, tok=Tokenizer.load(out), progress=False).write_kv(100, 2, append=True)
    for o in ('whole', 'torn', 'bad'): shutil.copytree(tmp_path/'out', tmp_path/o)
    add(tmp_path/'whole')
    def killed(self, manifest): raise KeyboardInterrupt
    with pytest.MonkeyPatch.context() as m:
        m.setattr(Addition, '_publish', killed)
        with pytest.raises(KeyboardInterrupt): add(tmp_path/'torn')
    (tmp_path/'torn'/'.run'/'manifest.json').write_text('{"format":')
    add(tmp_path/'torn')
    left = [{o.name: o.read_bytes() for o in (tmp_path/k).iterdir() if o.is_file()} for k in ('whole', 'torn')]
    assert left[0] == left[1] and not (tmp_path/'torn'/'.run').exists()
    (tmp_path/'bad'/'manifest.json').write_text('{}')
    with pytest.raises(StoreError, match='restore it, or write the folder anew with overwrite=True'): add(tmp_path/'bad')
