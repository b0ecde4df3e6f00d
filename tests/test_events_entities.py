"""Fitting on some entities: nothing of the others reaches the tokenizer, and whom it was fitted on stays with the output. Adding data of entities that are there."""
import json
from pathlib import Path

import numpy as np, pandas as pd, polars as pl, pyarrow as pa, pytest

from events_tables import EVAL_TIME, digests, make_dataset, make_frames, write_files
from fastseqprep.events import PRAGMADataset
from fastseqprep.compiled import compile_records
from fastseqprep.hashing import ids_hash, shard_of, stable_hash
from fastseqprep.masking import record_keys
from fastseqprep.source import DataSource
from fastseqprep.store import StoreError, open_store
from fastseqprep.tokenizer import Tokenizer

TRAIN = [f'c{i:04d}' for i in range(0, 60, 3)]


@pytest.fixture(scope='module')
def frames(): return make_frames(60, seed=3)


def fit(globs, out, fit_on, n_shards=3, **kw):
    ds = make_dataset(globs, out, **kw)
    tok = ds.fit_tokenizer(8, 20, fit_on=fit_on)
    ds.write_kv(EVAL_TIME, n_shards)
    return tok


@pytest.fixture(scope='module')
def reference(frames, tmp_path_factory):
    folder = tmp_path_factory.mktemp('reference')
    tok = fit(write_files(folder/'in', frames), folder/'out', TRAIN)
    return folder/'out', tok


def manifest(folder): return json.loads((Path(folder)/'manifest.json').read_text())


def strangers(df, **cols):
    "The rows of all others with other words and numbers"
    mine = pl.col('cust').is_in(TRAIN)
    return df.with_columns(pl.when(mine).then(c).otherwise(pl.lit(v).cast(df[c].dtype)).alias(c) for c, v in cols.items())


def test_nothing_of_other_entities_leaks(frames, reference, tmp_path):
    "Vocabulary, bounds, byte pairs and which texts are short do not change with the rows of the others"
    customers, card, app = frames
    changed = (strangers(customers, region='nowhere', age=7, balance=-1e9, job='spy'), strangers(card, mcc=999, amount=1e12, memo='secretsecretsecret'), strangers(app, screen='hidden', seconds=1e6))
    tok = fit(write_files(tmp_path/'in', changed), tmp_path/'out', TRAIN)
    assert tok.hash == reference[1].hash
    gone = tuple(df.filter(pl.col('cust').is_in(TRAIN)) for df in frames)
    assert fit(write_files(tmp_path/'few', gone), tmp_path/'out_few', TRAIN).hash == tok.hash
    alone = make_dataset(write_files(tmp_path/'all', gone), tmp_path/'out_all').fit_tokenizer(8, 20)
    same = lambda t: {k: v for k, v in t.to_dict().items() if k != 'split'}
    assert same(alone) == same(tok)


def test_the_set_counts_not_its_order(frames, reference, tmp_path):
    "Nor the kind of thing that holds it, the layout of the files, the order of rows, or the number of workers"
    globs = write_files(tmp_path/'in', frames, parts=3, shuffle=5)
    assert fit(globs, tmp_path/'a', pl.Series(TRAIN[::-1] + TRAIN[:3])).hash == reference[1].hash
    assert digests(tmp_path/'a') == digests(reference[0])
    fit(globs, tmp_path/'b', pl.DataFrame({'n': range(len(TRAIN)), 'cust': TRAIN}), n_workers=2)
    assert digests(tmp_path/'b') == digests(reference[0])
    name = 'tokenizer.train_ids.parquet'
    assert (tmp_path/'b'/name).read_bytes() == (reference[0]/name).read_bytes()


@pytest.mark.parametrize('hold', [list, tuple, set, np.array, pd.Series, pl.Series, pa.array, lambda x: pl.Series(x, dtype=pl.Categorical), lambda x: pd.DataFrame({'cust': x}),
                                  lambda x: pl.LazyFrame({'any': x}), lambda x: pa.table({'cust': x}), dict.fromkeys])
def test_whatever_holds_the_ids(hold, frames, reference, tmp_path):
    globs = write_files(tmp_path/'in', frames)
    assert make_dataset(globs, tmp_path/'out').fit_tokenizer(8, 20, fit_on=hold(TRAIN)).hash == reference[1].hash


def test_the_manifest_says_whom(reference):
    out, tok = reference
    split = dict(method='ids', entities=len(TRAIN), ids=ids_hash(TRAIN), hash_version=1)
    assert manifest(out)['split'] == manifest(out)['config']['split'] == tok.split == Tokenizer.load(out).split == split
    assert [o['name'] for o in manifest(out)['outputs'] if o['kind'] == 'train_ids'] == ['tokenizer.train_ids.parquet']
    assert Tokenizer.load(out).train_ids.to_list() == TRAIN
    open_store(out, deep=True)
    assert not any(i in (out/'tokenizer.json').read_text() for i in TRAIN)


def test_another_set_is_another_run(frames, reference, tmp_path):
    globs = write_files(tmp_path/'in', frames)
    fit(globs, tmp_path/'out', TRAIN)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path/'out').glob('*.parquet')}
    fit(globs, tmp_path/'out', TRAIN[::-1])
    assert {p: p.stat().st_mtime_ns for p in (tmp_path/'out').glob('*.parquet')} == before # all was there
    with pytest.raises(StoreError, match='another tokenizer'): fit(globs, tmp_path/'out', TRAIN[1:])
    fit(globs, tmp_path/'out', TRAIN[1:], overwrite=True)
    assert Tokenizer.load(tmp_path/'out').train_ids.to_list() == TRAIN[1:]
    fit(globs, tmp_path/'out', 'all', overwrite=True)
    assert not (tmp_path/'out'/'tokenizer.train_ids.parquet').exists() and Tokenizer.load(tmp_path/'out').train_ids is None


def test_the_set_goes_with_the_tokenizer(frames, reference, tmp_path):
    "Encoding elsewhere, writing later from the saved tokenizer, and adding"
    globs = write_files(tmp_path/'in', frames)
    make_dataset(globs, tmp_path/'late').fit_tokenizer(8, 20, fit_on=TRAIN)
    make_dataset(globs, tmp_path/'late', tok=Tokenizer.load(tmp_path/'late')).write_kv(EVAL_TIME, 3)
    make_dataset(globs, tmp_path/'else', tok=Tokenizer.load(reference[0])).write_kv(EVAL_TIME, 3)
    for folder in tmp_path/'late', tmp_path/'else':
        assert digests(folder) == digests(reference[0]) and manifest(folder)['split'] == manifest(reference[0])['split']
        assert Tokenizer.load(folder).train_ids.to_list() == TRAIN
    new = pl.DataFrame({'cust': [TRAIN[0], 'new'], 'at': [1, 2], 'screen': ['home', 'pay'], 'seconds': [1., 2.]})
    more = DataSource(new, cats=['screen'], conts=['seconds'], time_col='at', entity_col='cust', name='app')
    PRAGMADataset(events=more, entity_col='cust', out_path=tmp_path/'else', tok=Tokenizer.load(tmp_path/'else'), progress=False).write_kv(EVAL_TIME, 1, append=True)
    assert manifest(tmp_path/'else')['split'] == manifest(reference[0])['split'] and Tokenizer.load(tmp_path/'else').train_ids.to_list() == TRAIN
    open_store(tmp_path/'else', deep=True)


@pytest.mark.parametrize('fit_on,words', [
    (['c0000', 'nobody', 'noone'], ['2 of 3', 'nobody', 'no rows in any source']), ([1, 2], ['Int64', 'text']), ([1., 2.], ['Float64']), ([True], ['Boolean']), ([], ['no ids']), (None, ['None', "'train'"]),
    (['c0000', None], ['1 null']), (['c0000', 1], ['one type']), ('c0000', ["'c0000'", "'train'"]), ([['c0000']], ['List']), (pl.DataFrame({'a': ['c0000'], 'b': [1]}), ['cust', "'a', 'b'"])])
def test_sets_that_are_refused(fit_on, words, frames, tmp_path):
    ds = make_dataset(write_files(tmp_path/'in', frames), tmp_path/'out')
    with pytest.raises(ValueError) as e: ds.fit_tokenizer(fit_on=fit_on)
    assert not [w for w in words if w not in str(e.value)], str(e.value)
    assert not (tmp_path/'out').exists() or list((tmp_path/'out').iterdir()) == []


def number_source(ids, dtype): return DataSource(pl.DataFrame({'id': pl.Series(ids, dtype=dtype), 'a': ['x', 'y'], 't': [1, 2]}), cats='a', time_col='t', entity_col='id', name='numbers')


def test_ids_of_any_width(tmp_path):
    "Integers are the same in every width; what does not fit is refused"
    ds = PRAGMADataset(events=number_source([5, 2**63 + 5], pl.UInt64), entity_col='id', out_path=tmp_path/'u', progress=False)
    assert 'y' in ds.fit_tokenizer(fit_on=[2**63 + 5]).val_vocab and 'x' not in ds.fit_tokenizer(fit_on=[2**63 + 5]).val_vocab
    with pytest.raises(ValueError, match='do not fit'): ds.fit_tokenizer(fit_on=[-1])
    small = PRAGMADataset(events=number_source([5, -6], pl.Int16), entity_col='id', out_path=tmp_path/'i', progress=False)
    assert 'y' in small.fit_tokenizer(fit_on=np.array([-6])).val_vocab


@pytest.mark.parametrize('kw', [dict(valid_pct=.3), dict(seed=1), dict(fit_on=[5], valid_pct=.3), dict(fit_on=[5], seed=0)])
def test_a_share_is_for_train_only(kw, tmp_path):
    ds = PRAGMADataset(events=number_source([5, 6], pl.Int64), entity_col='id', out_path=tmp_path/'out', progress=False)
    with pytest.raises(ValueError, match="say fit_on='train'"): ds.fit_tokenizer(**kw)


def test_a_lost_file_of_ids_is_told_from_a_wrong_one(frames, reference, tmp_path):
    globs = write_files(tmp_path/'in', frames)
    fit(globs, tmp_path/'out', TRAIN)
    tok = Tokenizer.load(tmp_path/'out')
    pl.DataFrame({'id': ['c0001']}).write_parquet(tmp_path/'out'/'tokenizer.train_ids.parquet')
    with pytest.raises(ValueError, match='other ids than'): tok.train_ids
    (tmp_path/'out'/'tokenizer.train_ids.parquet').unlink()
    assert Tokenizer.load(tmp_path/'out').train_ids is None


# ---------------------------------------------------------------- entities that are there already
def month(ids, page): return DataSource(pl.DataFrame({'id': ids, 'page': [page] * len(ids), 't': range(len(ids))}), cats='page', time_col='t', entity_col='id', name='visits')


def test_entities_seen_before_are_counted(tmp_path, capsys):
    PRAGMADataset(events=month([1, 2, 2, 3], 'a'), entity_col='id', out_path=tmp_path, progress=False).write_kv(n_shards=2)
    assert 'entities seen before' not in capsys.readouterr().out
    def add(ids): PRAGMADataset(events=month(ids, 'a'), entity_col='id', out_path=tmp_path, tok=Tokenizer.load(tmp_path), progress=False).write_kv(n_shards=1, append=True)
    add([2, 2, 3, 9])
    said = capsys.readouterr().out
    assert '2 entities have records here already' in said and 'entities seen before' in said
    assert manifest(tmp_path)['ledger']['visits'] == dict(read=8, kept=8, dropped={}, counts={'entities seen before': 2})
    assert manifest(tmp_path)['facts']['records'] == 6
    add([9, 10])
    assert manifest(tmp_path)['ledger']['visits']['counts'] == {'entities seen before': 3}
    add([9, 10]) # the same again is done
    assert manifest(tmp_path)['ledger']['visits']['counts'] == {'entities seen before': 3}


def adder(folder, source): return PRAGMADataset(events=source, entity_col='id', out_path=folder, tok=Tokenizer.load(folder), progress=False)


def hashes(folder):
    "{(shard, id): [record hashes]}"
    recs = compile_records(folder)
    res = {}
    for uid, h in zip(recs.uids, recs.record_hash): res.setdefault(int(uid), []).append(int(h))
    return res


def test_every_record_has_a_hash_of_its_own(tmp_path):
    "Those of records that were there stay, also of entities that get further ones; a shard alone gives the same"
    PRAGMADataset(events=month([1, 2, 3], 'a'), entity_col='id', out_path=tmp_path, progress=False).write_kv(n_shards=2)
    first = hashes(tmp_path)
    assert first == {i: [int(stable_hash([i])[0])] for i in (1, 2, 3)}
    adder(tmp_path, month([2, 3, 9], 'a')).write_kv(n_shards=2, append=True)
    second = hashes(tmp_path)
    adder(tmp_path, month([2, 9, 9], 'a')).write_kv(n_shards=1, append=True)
    third = hashes(tmp_path)
    assert all(second[i][:1] == first[i] for i in first) and all(third[i][:len(second[i])] == second[i] for i in second)
    every = [h for hs in third.values() for h in hs]
    assert len(every) == len(set(every)) == 8 and len(third[2]) == 3
    alone = compile_records([tmp_path/'shard_4.parquet'])
    assert sorted(map(int, alone.record_hash)) == sorted([third[2][-1], third[9][-1]])
    schemas = {str(pl.read_parquet_schema(f)) for f in tmp_path.glob('shard_*.parquet')}
    assert len(schemas) == 1


def test_masks_of_further_records_are_their_own(tmp_path):
    "An entity with the same rows again is masked otherwise the second time"
    ids = [i for i in range(20) for _ in range(10)]
    PRAGMADataset(events=month(ids, 'a'), entity_col='id', out_path=tmp_path, progress=False).write_kv(n_shards=1)
    adder(tmp_path, month(ids, 'b')).write_kv(n_shards=1, append=True)
    recs = compile_records(tmp_path)
    keys = record_keys(recs.record_hash, 0, 0)
    assert keys.shape[-1] == 40 == len(np.unique(keys[0, 0])) # what all draws of a record are keyed by


def test_points_of_an_addition_are_numbered_on(tmp_path):
    points = lambda ids, ts: pl.DataFrame(dict(id=ids, t=ts))
    PRAGMADataset(events=month([1, 2, 2, 3], 'a'), entity_col='id', out_path=tmp_path, progress=False).write_kv(points([1, 2, 2, 3, 3], [9, 9, 1, 9, 2]), n_shards=2)
    first = hashes(tmp_path)
    adder(tmp_path, month([2, 2, 9, 3], 'a')).write_kv(points([2, 2, 9, 3], [.5, 50, 60, 60]), n_shards=2, append=True)
    adder(tmp_path, month([2, 9], 'a')).write_kv(points([2, 9], [70, 70]), n_shards=1, append=True)
    rows = pl.concat([pl.read_parquet(tmp_path/f'shard_{i}.parquet') for i in range(5)])
    numbers = {i: sorted(g['record_idx'].unique().to_list()) for (i,), g in rows.group_by('id')}
    assert numbers == {1: [0], 2: [0, 1, 2, 3, 4], 3: [1, 2], 9: [0, 1]} # the first point of 3 lies before its event, and gave no record
    last = hashes(tmp_path)
    assert all(last[i][:len(first[i])] == first[i] for i in first)
    assert len({h for hs in last.values() for h in hs}) == open_store(tmp_path).manifest.facts['records'] == 10
    assert manifest(tmp_path)['ledger']['evaluation points'] == dict(read=11, kept=10, dropped={'no events before it': 1}, counts={})


def test_the_same_rows_are_not_added(tmp_path):
    PRAGMADataset(events=month([1, 2], 'a'), entity_col='id', out_path=tmp_path, progress=False).write_kv(100, n_shards=2)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir() if f.is_file()}
    for n in 1, 2:
        with pytest.raises(StoreError, match='holds the records of these rows already'): adder(tmp_path, month([1, 2], 'a')).write_kv(100, n_shards=n, append=True)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir() if f.is_file()} == before
    adder(tmp_path, month([1, 2], 'a')).write_kv(.5, n_shards=1, append=True) # cut elsewhere, these are other records
    with pytest.raises(StoreError, match='already'): adder(tmp_path, month([1, 2], 'a')).write_kv(.5, n_shards=3, append=True)
    adder(tmp_path, month([1, 2], 'a')).write_kv(.5, n_shards=1, append=True) # that very addition is done
    assert manifest(tmp_path)['facts']['records'] == 3


def test_nothing_is_added_to_nothing(tmp_path):
    ds = PRAGMADataset(events=month([1], 'a'), entity_col='id', out_path=tmp_path/'new', progress=False)
    with pytest.raises(StoreError, match='no finished output to add to: write without append first'): ds.write_kv(n_shards=1, append=True)
    assert not list((tmp_path/'new').glob('*'))
