"Decoding undoes encoding, for every kind of value and at every stage: shard, record, batch, masked batch."
import time
from datetime import datetime

import numpy as np, polars as pl, pytest
from polars.testing import assert_frame_equal

from events_tables import EVAL_TIME, make_dataset, make_frames, write_files
from fastseqprep.compiled import compile_records
from fastseqprep.dataloader import PRAGMADataLoader
from fastseqprep.dataset import user_rec
from fastseqprep.events import PRAGMADataset
from fastseqprep.inspect import ValueReader, batch_frame, decode_values, inspect, join_values, range_text, show
from fastseqprep.masking import mask_batch
from fastseqprep.source import DataSource
from fastseqprep.tokenizer import Tokenizer
from fastseqprep.vocab import escape

ALL = dict(max_users=10**6, max_events=10**6)
OPTIONS = dict(page={}, per_key=dict(values='per_key', null_token=True, bpe_alphabet='bytes'), small=dict(min_freq=3))


@pytest.fixture(scope='module', params=OPTIONS)
def bank(request, tmp_path_factory):
    "(folder, tokenizer): two event sources, text in pieces, signed amounts, milestones, nulls, values spelled like reserved tokens"
    tmp = tmp_path_factory.mktemp('bank')
    ds = make_dataset(write_files(tmp/'in', make_frames(60)), tmp/'out')
    tok = ds.fit_tokenizer(8, 20, **OPTIONS[request.param])
    ds.write_kv(EVAL_TIME, 3)
    return tmp/'out', tok


def rows_of(folder): return pl.concat([pl.read_parquet(f) for f in sorted(folder.glob('shard_*.parquet'))])


def test_values_are_those_written(bank):
    folder, tok = bank
    df = inspect(folder, **ALL)
    assert df.height == rows_of(folder).filter(pl.col('val_pos') == 0).height
    assert {'memo', 'amount', 'amount_sign', 'lifelong', 'region', 'screen'} <= set(df['key'])
    assert df.filter(pl.col('key') == 'memo')['value'].str.contains('№').any()
    known = pl.Series(['[UNK]', '[NULL]'])
    num = pl.col('key').is_in(list(tok.num_bounds))
    words = df.filter(~num, ~pl.col('value').is_in(known.implode()))
    assert_frame_equal(words.select(pl.col('value')), words.select(escape(words['written']).alias('value')))
    void = df.filter(~num, pl.col('value').is_in(known.implode()))
    if tok.min_freq == 1: assert set(void['written']) <= {'', '[UNK]', '[NULL]'}
    for key, value, written in df.filter(num).select('key', 'value', 'written').unique().iter_rows():
        if value in ('[UNK]', '[NULL]'): assert written in ('', '[UNK]', '[NULL]'), (key, value, written)
        else:
            x = float(written)
            ranges = {range_text(*tok.bucket_range(key, i)): tok.bucket_range(key, i) for i in range(len(tok.num_bounds[key])+2)}
            low, high = ranges[value]
            assert x == 0 if low == high == 0 else low < x <= high


def test_reserved_words_in_the_data_are_told_apart(bank):
    folder, tok = bank
    df = inspect(folder, **ALL).filter(pl.col('key') == 'screen')
    odd = df.filter(pl.col('written') == '[MASK]')['value'].unique().to_list()
    assert odd == [r'\[MASK]'] and '[MASK]' not in df['value']


def test_batch_record_and_shard_agree(bank):
    folder, tok = bank
    cols = ['uid', 'part', 'event', 'before', 'day', 'key', 'value']
    limits = dict(max_event_toks=50)
    batches = [batch_frame(b, tok, **ALL) for b in PRAGMADataLoader(folder, 'cust', 300, tok=tok, **limits)]
    assert len(batches) > 3
    shards = inspect(folder, **ALL)
    # a batch has its times in 32 bits; what they read like may differ where they are rounded
    plain = [c for c in cols if c != 'before']
    assert_frame_equal(pl.concat(batches).select(plain), shards.select(plain))
    assert (pl.concat(batches)['before'].eq_missing(shards['before'])).mean() > .99
    rows, recs = rows_of(folder), compile_records(folder, **limits)
    for uid in shards['uid'].unique().sort()[::9]:
        rec = user_rec(rows.filter(pl.col('cust') == uid), 'cust', max_event_toks=50)
        mine = pl.concat(batches).filter(pl.col('uid') == uid).select(cols)
        assert_frame_equal(inspect(rec, tok, max_events=10**6).select(cols), mine)
        i = recs.uid_list(range(len(recs))).index(uid)
        assert_frame_equal(inspect(recs.record(i), tok, max_events=10**6).select(cols), mine)


@pytest.mark.parametrize('whole', [False, True])
def test_answers_are_the_hidden_values(bank, whole):
    folder, tok = bank
    b = next(iter(PRAGMADataLoader(folder, 'cust', 2000, tok=tok)))
    m = mask_batch(b, tok, p_unk=0, whole_value=whole, seed=3)
    before, after = batch_frame(b, tok, **ALL), batch_frame(m, tok, **ALL)
    assert_frame_equal(before.drop('value'), after.drop('value', 'answer'))
    asked = after['answer'].is_not_null()
    assert .1 < asked.mean() < .7
    assert (after['answer'] == before['value']).filter(asked).all()
    assert (after['value'] == before['value']).filter(~asked).all()
    assert after.filter(asked)['value'].str.contains('[MASK]', literal=True).all()
    b05 = mask_batch(b, tok, p_unk=1.)
    lost = batch_frame(b05, tok, **ALL)
    assert lost['answer'].null_count() == lost.height and (lost['value'] != before['value']).any()


def test_limits(bank):
    folder, tok = bank
    b = next(iter(PRAGMADataLoader(folder, 'cust', 2000, tok=tok)))
    full = batch_frame(b, tok, **ALL)
    some = batch_frame(b, tok, 4, 2)
    assert_frame_equal(some, full.filter(pl.col('row') < 4, pl.col('event').is_null() | (pl.col('event') < 2)))
    assert batch_frame(b, tok, 0, 0).height == 0
    assert inspect(folder, max_users=7, max_events=0)['uid'].n_unique() == 7
    text = str(show(b, tok, 2, 1))
    n = np.diff(b['history_offsets'].numpy())[:2]-1
    for k in n[n > 1]: assert f'… {k-1:,} more event' in text
    assert f'… {len(b["uids"])-2:,} more records' in text


def test_each_distinct_value_is_decoded_once(bank, monkeypatch):
    folder, tok = bank
    calls, one = [], ValueReader.__call__
    monkeypatch.setattr(ValueReader, '__call__', lambda self, key, ids: calls.append((key, *ids)) or one(self, key, ids))
    df = inspect(folder, **ALL)
    assert len(calls) == len(set(calls)) < df.height/2


def test_a_long_batch_is_quick(bank):
    folder, tok = bank
    b = {k: v if k == 'uids' else v.numpy() for k, v in next(iter(PRAGMADataLoader(folder, 'cust', 10**6, tok=tok))).items()}
    reps = -(-200_000//len(b['event_tokens']))
    big = dict(b, event_tokens=np.tile(b['event_tokens'], (reps, 1)), cal=np.tile(b['cal'], (reps, 1)), event_time=np.tile(b['event_time'], reps),
        event_offsets=np.cumsum([0, *np.tile(np.diff(b['event_offsets']), reps)]), history_offsets=np.cumsum([0, *np.tile(np.diff(b['history_offsets']), reps)]),
        uids=b['uids']*reps, **{k: np.tile(b[k], (reps,)+(1,)*(b[k].ndim-1)) for k in b if k.startswith(('profile', 'lifelong'))})
    start = time.perf_counter()
    df = batch_frame(big, tok, **ALL)
    assert time.perf_counter()-start < 10
    assert df['row'].n_unique() == len(b['uids'])*reps


def test_two_profiles_with_one_key_of_pieces(tmp_path):
    "Tokens are sorted by position before row, so the pieces of two values of one key stand interleaved"
    texts = ['one two three', 'four five six']
    sources = [DataSource.from_df(pl.DataFrame({'id': [1], 'note': [t]}), texts='note', entity_col='id', is_profile=True, name=f's{i}') for i, t in enumerate(texts)]
    ds = PRAGMADataset(sources, entity_col='id', out_path=tmp_path)
    tok = ds.fit_tokenizer(cardinality_threshold=0, bpe_vocab_size=259)
    ds.write_kv(n_shards=1)
    df = inspect(tmp_path)
    assert df['key'].to_list() == ['note', 'note'] and sorted(df['value']) == sorted(texts)
    assert df['value'].to_list() == df['written'].to_list()
    rows = pl.read_parquet(tmp_path/'shard_0.parquet')
    assert rows['val_pos'].n_unique() < len(rows) # so they do
    assert sorted(''.join(batch_frame(next(iter(PRAGMADataLoader(tmp_path, 'id', tok=tok))), tok)['value'])) == sorted(''.join(texts))


def test_several_records_of_an_entity(tmp_path):
    pay = pl.DataFrame({'id': [1]*4+[2], 'kind': list('abcde'), 'at': [10, 20, 30, 40, 50]})
    ds = PRAGMADataset(events=DataSource.from_df(pay, cats='kind', time_col='at', entity_col='id', name='pay'), entity_col='id', out_path=tmp_path)
    ds.fit_tokenizer()
    ds.write_kv(pl.DataFrame({'id': [1, 1, 2], 't': [20, 45, 60]}), n_shards=1)
    df = inspect(tmp_path)
    assert df.select('row', 'uid', 'event', 'value').rows() == [(0, 1, 0, 'a'), (0, 1, 1, 'b'), *[(1, 1, i, v) for i, v in enumerate('abcd')], (2, 2, 0, 'e')]
    assert df['time'].to_list()[:2] == [datetime(1970, 1, 1, 0, 0, 10), datetime(1970, 1, 1, 0, 0, 20)]


def test_folders_of_other_tools(tmp_path, bank):
    "Without a manifest, with only the columns that a loader needs"
    folder, tok = bank
    rows_of(folder).drop('value', 'vtype', 'shard_id').write_parquet(tmp_path/'shard_0.parquet')
    tok.save(tmp_path)
    df = inspect(tmp_path, **ALL)
    assert df['written'].null_count() == df.height
    assert_frame_equal(df.drop('written'), inspect(folder, **ALL).drop('written'))


def test_nulls_and_nan_of_old_shards():
    "Old shards have null event numbers and NaN for unknown times"
    row = dict(id=1, key='k', key_id=5, val_id=3, val_pos=0, time=None, logsec=float('nan'), source_idx=0, event_idx=0, hour=None, dow=None, dom=None)
    df = pl.DataFrame([row | dict(event_idx=None, key='lifelong'), row], schema_overrides=dict(time=pl.Int64, hour=pl.Float32, dow=pl.Float32, dom=pl.Float32))
    tok = Tokenizer().fit(DataSource.from_df(pl.DataFrame({'id': [1], 'k': ['v'], 't': [0]}), cats='k', time_col='t', entity_col='id'))
    res = inspect(df, tok)
    assert res['part'].to_list() == ['lifelong', 'event'] and res['before'].null_count() == res['day'].null_count() == 2
    assert str(show(df, tok)).count('k v') == 2


def test_faults(tmp_path, bank):
    folder, tok = bank
    other = Tokenizer().fit(DataSource.from_df(pl.DataFrame({'cust': ['a'], 'x': [1]}), conts='x', entity_col='cust', is_profile=True))
    with pytest.raises(ValueError, match='were written with the tokenizer'): inspect(folder, other)
    b = next(iter(PRAGMADataLoader(folder, 'cust', tok=tok)))
    with pytest.raises(ValueError, match='made with another one'): inspect(b, other)
    with pytest.raises(ValueError, match='not fitted'): inspect(b, Tokenizer())
    with pytest.raises(ValueError, match='pass it as tok'): inspect(b)
    with pytest.raises(FileNotFoundError, match='neither manifest.json nor shards'): inspect(tmp_path)
    with pytest.raises(FileNotFoundError, match='does not exist'): inspect(tmp_path/'shard_1.parquet')
    with pytest.raises(ValueError, match="columns 'cust', 'key'"): inspect(pl.DataFrame({'a': [1]}), tok, entity_col='cust')
    with pytest.raises(TypeError, match='cannot inspect a list'): inspect([1], tok)


def test_empty():
    cols = dict(row=pl.Int64, part=pl.String, event=pl.Int64, uid=pl.Int64, logsec=pl.Float64, hour=pl.Float32, dow=pl.Float32, dom=pl.Float32, key_id=pl.Int64, val_id=pl.Int64, val_pos=pl.Int64)
    tok = Tokenizer().fit(DataSource.from_df(pl.DataFrame({'cust': ['a'], 'x': [1]}), conts='x', entity_col='cust', is_profile=True))
    assert join_values(pl.DataFrame(schema=cols)).height == 0
    assert decode_values(pl.DataFrame(schema=cols), tok).columns == ['row', 'uid', 'part', 'event', 'before', 'day', 'key', 'value']
