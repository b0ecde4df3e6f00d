"""Rows encoded for serving: the numbers are those that the table job stored, whichever way and form the rows come in, and the way back."""
import json, os, random
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np, polars as pl, pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import fastseqprep.encoder as module
from fastseqprep.blockfiles import read_block
from fastseqprep.blocks import stored_dtype
from fastseqprep.encoder import Encoder
from fastseqprep.files import StoreError
from fastseqprep.preprocess import preprocess
from fastseqprep.source import DataSource
from test_table_job import START, cases, job, write

EXAMPLES = int(os.environ.get('FSP_EXAMPLES', 20))
quick = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
pytestmark = pytest.mark.filterwarnings('ignore')


class many_rows:
    "Take the way of many rows for few as well"
    def __enter__(self): self.was,module.FEW = module.FEW,0
    def __exit__(self, *a): module.FEW = self.was


def equal(got, want, where=''):
    assert list(got) == list(want), f'{where}: features {list(got)}, expected {list(want)}'
    for k in want:
        assert got[k].dtype == want[k].dtype, f'{where} {k}: {got[k].dtype}, expected {want[k].dtype}'
        assert np.array_equal(got[k], want[k]), f'{where} {k}: {got[k]}, expected {want[k]}'


def form(df, rng):
    "The rows in one of the forms that they can have"
    return rng.choice([lambda: df, df.to_dicts, df.lazy, df.to_arrow])()


def stored_windows(result, encoder):
    "(split, block) of a run"
    dtypes = {f.name: f.dtype for f in encoder.fitted}
    for i, path in enumerate(result.splits):
        if result.windows[i]: yield i, read_block(path, dtypes)


def check_last_windows(df, result, encoder, rng, since=()):
    "The last window of every sequence and split, from the rows that it was cut from; `since` are features that depend on earlier rows"
    owners, n = df['sequenceId'].unique().sort(), 0
    numbered = dict(enumerate(owners)) if owners.dtype == pl.String or (owners.dtype == pl.UInt64 and owners.max() >= 2**63) else {int(o): o for o in owners}
    for split, block in stored_windows(result, encoder):
        aligned = split in result.config.aligned_splits
        for s in np.unique(block.sequence_ids):
            at = np.flatnonzero(block.sequence_ids == s)
            i = at[np.argmax(block.subsequence_ids[at])]
            lo, hi = block.split_start_item_positions[i], block.split_end_item_positions[i]
            mine = df.filter(pl.col('sequenceId') == numbered[int(s)], pl.col('itemPosition') < hi)
            whole = aligned or hi-lo >= block.width or lo == mine['itemPosition'].min()
            if not whole: mine = mine.filter(pl.col('itemPosition') >= lo)
            rows = form(mine.sample(fraction=1, shuffle=True, seed=rng.randrange(99)), rng)
            w = encoder.encode_last_window(rows, split=split)
            want = {k: v[i] for k, v in block.features.items()}
            if list(w.features) != list(want): want = {k: want[k] for k in w.features} if set(want) == set(w.features) else want # curriculum order may be by name
            if not whole:
                for k in since: want[k] = w.features[k]
            equal(w.features, want, f'split {split}, sequence {s}')
            assert (w.left_pad, w.start_item) == (block.left_pad_lengths[i], block.start_item_positions[i])
            if not aligned and not whole: assert w.split_start_item == lo
            assert w.attention_mask.tolist() == [slot >= block.left_pad_lengths[i] for slot in range(block.width)]
            with many_rows(): equal(encoder.encode_last_window(mine, split=split).features, w.features, 'many')
            n += 1
    return n


FORMATS = [{}, {}, dict(write_format='parquet', layout='wide', merge_output=True), dict(write_format='arrow', merge_output=True), dict(write_format='bin', merge_output=False)]

@quick
@given(cases(), st.sampled_from(FORMATS), st.booleans())
def test_last_windows_are_those_of_the_job(case, fmt, by_path):
    df, keys, rng = case
    if fmt: keys = {**{k: v for k, v in keys.items() if k != 'batches_per_file'}, **fmt}
    if fmt.get('write_format') == 'pt': keys['merge_output'] = False
    with TemporaryDirectory() as tmp:
        try: result = job(tmp, preprocessing_data_path=str(write(tmp, df)), read_format='parquet', **keys)
        except (ValueError, TypeError): return
        encoder = Encoder.load(result.metadata_path if by_path else result)
        assert encoder.known
        assert check_last_windows(df, result, encoder, rng) > 0


def with_more(draw):
    "A frame with missing values, times and a target, and a configuration for it"
    rng = random.Random(draw(st.integers(0, 2**32)))
    data = {c: [] for c in ('sequenceId', 'itemPosition', 'word', 'code', 'flag', 'amount', 'small', 'at', 'day', 'target')}
    for s in range(draw(st.integers(1, 4))):
        t = START+timedelta(days=rng.randrange(60))
        for p in range(draw(st.integers(1, 15))):
            t += timedelta(minutes=rng.randrange(600), microseconds=rng.randrange(10**6))
            none = lambda v: None if rng.random() < .15 else v
            row = dict(sequenceId=s, itemPosition=p, word=none(rng.choice('abcde')), code=none(rng.randrange(-4, 4)), flag=none(rng.random() < .5), amount=none(rng.gauss(3, 20)),
                       small=none(rng.gauss(0, 1)), at=t, day=t.date(), target=rng.choice('xyz'))
            for c, v in row.items(): data[c].append(v)
    df = pl.DataFrame(data, schema_overrides=dict(code=pl.Int16, small=pl.Float32, at=pl.Datetime(rng.choice(['us', 'us', 'ms'])), word=pl.String, flag=pl.Boolean, amount=pl.Float64))
    if rng.random() < .3: df = df.with_columns(pl.col('at').dt.replace_time_zone('UTC').dt.convert_time_zone('Asia/Kolkata'))
    fill = lambda kind: rng.choice([kind, f'{kind}+indicator'])
    nulls = dict(word=fill('unknown'), code=rng.choice([fill('unknown'), 'drop_row']), flag=fill('unknown'), amount=rng.choice([fill('mean'), 'drop_row']), small=fill('zero'))
    parts = rng.sample(['delta', 'elapsed', 'minute', 'hour', 'weekday', 'day', 'week', 'month', 'quarter', 'year'], 4)
    cols = ['word', 'code', 'flag', 'amount', 'small', 'at', 'day', 'target']
    chosen = rng.sample(cols, rng.randint(2, len(cols)))
    keys = dict(selected_columns=chosen, nulls={c: r for c, r in nulls.items() if c in chosen}, gaps='renumber', split_ratios=rng.choice([[1.], [.5, .5], [.7, .2, .1]]),
                window_length=rng.randint(2, 6), window_stride=rng.randint(1, 4), time_zone=rng.choice(['UTC', 'Europe/Berlin', 'America/New_York']),
                target_columns=['target'] if 'target' in chosen and len(chosen) > 1 else [], normalize_real_columns=rng.random() < .8)
    times = {**({'at': parts} if 'at' in chosen else {}), **({'day': rng.choice([['delta', 'weekday'], ['elapsed', 'month', 'week']])} if 'day' in chosen else {})}
    if times: keys['timestamps'] = times
    if 'word' in chosen and rng.random() < .5: keys['cardinality_config'] = dict(word=rng.choice([dict(top_k=2), dict(min_freq=2, hashing=dict(num_buckets=3, seed=5))]))
    if rng.random() < .3: keys['column_data_types'] = {c: dict(word='Int16', code='Int8', flag='UInt8', amount='Float32', small='Float32', target='Int32')[c] for c in chosen if c not in times}
    keys.update(rng.choice(FORMATS))
    return df, keys, rng


@quick
@given(st.composite(with_more)())
def test_missing_values_times_and_targets(case):
    df, keys, rng = case
    with TemporaryDirectory() as tmp:
        try: result = job(tmp, preprocessing_data_path=str(write(tmp, df)), read_format='parquet', **keys)
        except (ValueError, TypeError): return
        unit = {'at': df.schema['at']} if 'at' in keys.get('timestamps', {}) else {}
        encoder = Encoder.load(result, dtypes=unit)
        dropped = [c for c, r in keys['nulls'].items() if r == 'drop_row']
        kept = df.drop_nulls(dropped).with_columns(itemPosition=pl.int_range(pl.len()).over('sequenceId')+pl.col('itemPosition').min().over('sequenceId'))
        since = [f'{c}_{p}' for c, ps in keys.get('timestamps', {}).items() for p in ps if p in ('delta', 'elapsed')]
        assert check_last_windows(kept, result, encoder, rng, since) > 0
        # rows that are dropped are so here too
        s = kept['sequenceId'][0]
        a, b = (encoder.encode_last_window(x.filter(sequenceId=s)) for x in (df, kept))
        equal(a.features, b.features)
        assert a.left_pad == b.left_pad
        if keys['target_columns']:
            bare = encoder.encode_last_window(kept.filter(sequenceId=s).drop('target'))
            equal(bare.features, {k: v for k, v in b.features.items() if k != 'target'})
        # both ways, both forms, one row or all
        rows = kept.sample(fraction=1, shuffle=True, seed=1)
        few = encoder.encode_rows(rows)
        with many_rows():
            equal(encoder.encode_rows(rows), few, 'many')
            equal(encoder.encode_rows(rows.to_dicts()), few, 'many dicts')
        equal(encoder.encode_rows(rows.to_dicts()), few, 'dicts')
        equal({k: v[:1] for k, v in few.items()}, encoder.encode_rows(rows.row(0, named=True)), 'one')
        # all sequences at once
        ids, block = encoder.encode_last_windows(df.sample(fraction=1, shuffle=True, seed=2))
        for i, m in enumerate(ids):
            w = encoder.encode_last_window(kept.filter(sequenceId=m))
            equal({k: v[i] for k, v in block.features.items()}, w.features, f'sequence {m}')
            assert (block.left_pad_lengths[i], block.start_item_positions[i], block.split_start_item_positions[i]) == (w.left_pad, w.start_item, w.split_start_item)


# ---------------------------------------------------------------- unseen values, hashing
VALUES = dict(text=['a', 'b', 'é', '', '1', 'zz', '[other]', '日本', 'q'*200], integer=[0, 1, -5, 2**63-1, -2**63, 2**40, 7], boolean=[True, False])

@quick
@given(kind=st.sampled_from(list(VALUES)), rule=st.sampled_from([None, dict(top_k=1), dict(min_freq=2), dict(hashing=dict(num_buckets=5, seed=3)), dict(top_k=1, hashing=dict(num_buckets=2))]), seed=st.integers(0, 10**6))
def test_unseen_values(kind, rule, seed):
    rng = random.Random(seed)
    seen = rng.choices(VALUES[kind][:4], k=12)
    df = pl.DataFrame(dict(sequenceId=1, itemPosition=range(12), v=seen))
    with TemporaryDirectory() as tmp:
        result = preprocess(dict(project_root=tmp, dataset_name='d', split_ratios=[1.], window_length=3, nulls='unknown', cardinality_config={'v': rule} if rule else {}), df, progress=False)
        encoder = Encoder.load(result)
        new = rng.choices(VALUES[kind]+[None], k=20)
        got = encoder.encode_rows([dict(v=v) for v in new])
        want = encoder.fitted['v'].categories.encode(pl.Series(new, dtype=df.schema['v']))
        assert got['v'].tolist() == want.tolist()
        with many_rows(): equal(encoder.encode_rows([dict(v=v) for v in new]), got)
        Path(tmp, 'data/d.manifest.json').unlink()
        try: guessed = Encoder.load(result.metadata_path)
        except ValueError as e:
            assert rule and 'does not tell' in str(e)
            guessed = Encoder.load(result.metadata_path, dtypes={'v': df.schema['v']})
        assert not guessed.known
        if kind == 'boolean': return
        known = [v for v in new if v is not None]
        assert guessed.encode_rows([dict(v=v) for v in known])['v'].tolist() == [o for o, v in zip(got['v'].tolist(), new) if v is not None]


def test_labels_that_data_must_not_hold(shop):
    for e in (shop, ):
        assert e.encode_rows(dict(item='[other]', amount=1.))['item'] == [1]
        assert e.encode_rows(dict(item='[unknown]', amount=1.))['item'] == [0]


# ---------------------------------------------------------------- errors
ROWS = pl.DataFrame(dict(sequenceId=[1]*10, itemPosition=range(10), item=[*'abacabadab'], amount=[float(i) for i in range(10)]))

@pytest.fixture(scope='module')
def result(tmp_path_factory):
    return preprocess(dict(project_root=str(tmp_path_factory.mktemp('shop')), dataset_name='shop', split_ratios=[.8, .2], window_length=4), ROWS, progress=False)

@pytest.fixture
def shop(result): return Encoder.load(result)


BAD = [
    (dict(item='a'), ValueError, "no column 'amount'"),
    (dict(item='a', amount=1., amout=2), ValueError, "['amout'], which the run did not have, did you mean 'amount'"),
    (dict(itm='a', amount=1.), ValueError, "no column 'item', did you mean 'itm'"),
    (dict(item=3, amount=1.), TypeError, "column 'item' is 3 (int) in row 0, expected text"),
    (dict(item='a', amount='1'), TypeError, "column 'amount' is '1' (str) in row 0, expected a number"),
    (dict(item='a', amount=True), TypeError, "column 'amount' is True (bool)"),
    (dict(item='a', amount=float('nan')), ValueError, "column 'amount' is nan in row 0, expected a finite number"),
    (dict(item='a', amount=float('-inf')), ValueError, "column 'amount' is -inf"),
    (dict(item=float('nan'), amount=1.), TypeError, "give None for a missing value"),
    (dict(item=None, amount=1.), ValueError, "column 'item' is missing in row 0 (1 of 1 rows), and the run's rule for it is 'error'"),
    (dict(item='a', amount=None), ValueError, "column 'amount' is missing"),
    (dict(item='a', amount=[1.]), TypeError, "column 'amount' is [1.0] (list)")]

@pytest.mark.parametrize('row,error,words', BAD)
def test_a_wrong_row(shop, row, error, words):
    for many in (False, True):
        with many_rows() if many else __import__('contextlib').nullcontext():
            with pytest.raises(error) as e: shop.encode_rows([row])
            assert words in str(e.value), str(e.value)
            with pytest.raises(error): shop.encode_last_window([row])


def test_wrong_frames(shop):
    for df, error, words in [
        (ROWS.with_columns(item=pl.lit(3)), TypeError, "column 'item' is Int32, expected text"), (ROWS.with_columns(amount=pl.lit('x')), TypeError, "column 'amount' is String, expected numbers"),
        (ROWS.with_columns(amount=pl.lit(float('nan'))), ValueError, "column 'amount' is nan in row 0"), (ROWS.with_columns(item=pl.lit(None, pl.String)), ValueError, "column 'item' is missing in row 0"),
        (ROWS.drop('item'), ValueError, "no column 'item'"), (ROWS.with_columns(itemPosition=pl.lit(1.5)), ValueError, "holds 1.5, expected whole numbers"),
        (ROWS.with_columns(itemPosition=pl.lit(None, pl.Int64)), ValueError, 'has no position'), (ROWS.with_columns(itemPosition=pl.lit('1')), TypeError, 'expected whole numbers or times'),
        (ROWS.with_columns(itemPosition=pl.lit(1)), ValueError, 'duplicate position 1 in sequence 1'), (ROWS[[0, 1, 5]], ValueError, 'a gap in sequence 1: after itemPosition 1 comes 5'),
        (ROWS.with_columns(sequenceId=pl.col('itemPosition')), ValueError, 'rows are of 10 sequences')]:
        with pytest.raises(error) as e: shop.encode_last_window(df)
        assert words in str(e.value), str(e.value)
    for rows, words in [([1], 'row 0 is a int'), (3, 'is a int')]:
        with pytest.raises(TypeError, match=words): shop.encode_rows(rows)
    for bad in (dict(width=0), dict(width=2.), dict(split=2), dict(split=-1), dict(width=2, split=0)):
        with pytest.raises(ValueError): shop.encode_last_window(ROWS, **bad)


def test_no_rows(shop):
    assert {k: (v.tolist(), v.dtype) for k, v in shop.encode_rows([]).items()} == dict(item=([], np.int64), amount=([], np.float64))
    assert len(shop.encode_rows(ROWS[:0])['item']) == 0
    with pytest.raises(ValueError, match='no rows'): shop.encode_last_window([])
    with pytest.raises(ValueError, match='no rows'): shop.encode_last_windows([])


def test_numpy_pandas_and_decimal_values(shop):
    want = shop.encode_rows(dict(item='a', amount=2.))
    for item, amount in ((np.str_('a'), np.float64(2)), ('a', 2), ('a', np.int8(2)), ('a', np.float16(2)), ('a', Decimal('2.0'))): equal(shop.encode_rows(dict(item=item, amount=amount)), want)
    pd = pytest.importorskip('pandas')
    equal(shop.encode_rows(pd.DataFrame(dict(item=pd.Categorical(['a']), amount=[2]))), want)


def test_one_row_is_cheap_to_encode_and_leaves_rows_alone(shop):
    row = dict(item='a', amount=2., sequenceId=1, itemPosition=3)
    before = dict(row)
    shop.encode_last_window(row)
    assert row == before


# ---------------------------------------------------------------- policies
def test_duplicates_and_gaps_as_in_the_run(tmp_path):
    df = pl.concat([ROWS, ROWS[[3, 3, 7]].with_columns(item=pl.lit('d'))]).sample(fraction=1, shuffle=True, seed=3)
    for k, policy in enumerate(('first', 'last', 'order')):
        keys = dict(duplicates=policy, gaps='renumber', split_ratios=[1.], window_length=4, window_stride=1)
        result = preprocess(dict(project_root=str(tmp_path), dataset_name=f'd{k}', **keys), df, progress=False)
        e = Encoder.load(result)
        block = read_block(result.splits[0], {f.name: f.dtype for f in e.fitted})
        for rows in (df, df.to_dicts()):
            w = e.encode_last_window(rows)
            equal(w.features, {n: v[-1] for n, v in block.features.items()}, policy)
            assert w.start_item == block.start_item_positions[-1]


def test_a_source_with_other_names(tmp_path):
    df = pl.DataFrame(dict(user=['b', 'b', 'a', 'b', 'a'], when=[30, 10, 5, 20, 6], movie=[1, 2, 3, 1, 2]))
    src = DataSource(df, cats=['movie'], time_col='when', entity_col='user', name='seen')
    result = preprocess(dict(project_root=str(tmp_path), split_ratios=[1.], window_length=3, max_target_offset=1, gaps='renumber'), src, progress=False)
    e = Encoder.load(result, sequence_col='user', position_col='when')
    block = read_block(result.splits[0], {f.name: f.dtype for f in e.fitted})
    for i, u in enumerate('ab'):
        w = e.encode_last_window(df.filter(user=u))
        equal(w.features, {n: v[i] for n, v in block.features.items()})
        assert w.start_item == block.start_item_positions[i]
    ids, windows = e.encode_last_windows(df)
    assert ids.to_list() == ['a', 'b'] and windows.features['movie'].tolist() == block.features['movie'].tolist()
    assert e.decode(block)['sequenceId'].to_list() == ['a', 'a', 'b', 'b', 'b'] # the run has kept the texts


def test_masked_rows(tmp_path):
    first = preprocess(dict(project_root=str(tmp_path), dataset_name='shop', split_ratios=[1.], window_length=4), ROWS, progress=False)
    df = ROWS.with_columns(hide=pl.col('itemPosition') % 3 == 0)
    keys = dict(selected_columns=['amount', 'item'], mask_column='hide', metadata_config_path='configs/metadata_configs/shop.json', split_ratios=[1.], window_length=4)
    result = preprocess(dict(project_root=str(tmp_path), dataset_name='hidden', **keys), df, progress=False)
    e = Encoder.load(result)
    block = read_block(result.splits[0], {f.name: f.dtype for f in e.fitted})
    for rows in (df, df.to_dicts()):
        got = e.encode_last_window(rows).features
        for k in got: assert np.array_equal(got[k], block.features[k][-1])
    assert 2 in got['item'].tolist()


def test_reused_metadata_with_fewer_columns(tmp_path):
    preprocess(dict(project_root=str(tmp_path), dataset_name='shop', split_ratios=[1.], window_length=4), ROWS, progress=False)
    result = preprocess(dict(project_root=str(tmp_path), dataset_name='less', selected_columns=['item'], metadata_config_path='configs/metadata_configs/shop.json', split_ratios=[1.], window_length=4), ROWS, progress=False)
    e = Encoder.load(result)
    assert list(e.wanted) == ['item'] and list(e.encode_rows(ROWS)) == ['item']


def test_declared_types_cast_as_in_the_run(tmp_path):
    df = ROWS.with_columns(level=pl.col('amount')+.7, text=pl.col('amount').cast(pl.String))
    keys = dict(column_data_types=dict(level='Int16', text='Float32', item='Int8', amount='Float32'), real_columns=['text', 'amount'], selected_columns=['level', 'text', 'item', 'amount'], split_ratios=[1.], window_length=4)
    try: result = preprocess(dict(project_root=str(tmp_path), dataset_name='c', **keys), df, progress=False)
    except ValueError: result = preprocess(dict(project_root=str(tmp_path), dataset_name='c', **{**keys, 'selected_columns': ['level', 'item', 'amount'], 'real_columns': ['amount']}), df, progress=False)
    e = Encoder.load(result)
    block = read_block(result.splits[0], {f.name: f.dtype for f in e.fitted})
    for rows in (df, df.to_dicts()):
        got = e.encode_last_window(rows).features
        equal(got, {k: v[-1] for k, v in block.features.items()})
        with many_rows(): equal(e.encode_last_window(rows).features, got)


# ---------------------------------------------------------------- metadata
def test_metadata_without_its_manifest(result, shop, tmp_path):
    path = tmp_path/'somewhere.json'
    path.write_bytes(Path(result.metadata_path).read_bytes())
    e = Encoder.load(path)
    assert not e.known and 'guessed' in repr(e)
    equal(e.encode_rows(ROWS), shop.encode_rows(ROWS))
    equal(e.encode_rows({**ROWS.row(0, named=True), 'other': 1}), shop.encode_rows(ROWS.row(0, named=True))) # it cannot know of all columns
    w, v = e.encode_last_window(ROWS), shop.encode_last_window(ROWS)
    equal(w.features, v.features)


def test_metadata_that_was_changed(result, tmp_path):
    import shutil
    root = Path(result.config.project_root)
    shutil.copytree(root, tmp_path/'p')
    path = tmp_path/'p'/'configs'/'metadata_configs'/'shop.json'
    assert Encoder.load(path).known # the folder can move
    path.write_text(path.read_text().replace('"a": 3', '"A": 3'))
    with pytest.raises(StoreError, match='is not the file that the manifest of its run lists'): Encoder.load(path)


def test_paths_in_every_spelling(result, monkeypatch):
    root = Path(result.config.project_root)
    for where, path in ((root, 'configs/metadata_configs/shop.json'), (root.parent, f'{root.name}/configs/metadata_configs/shop.json'), (root/'configs', './../configs/metadata_configs/shop.json')):
        monkeypatch.chdir(where)
        assert Encoder.load(path).known, path
        assert Encoder.load(Path(path)).known, path
    monkeypatch.chdir(root/'configs'/'metadata_configs')
    assert Encoder.load('shop.json').known # through the paths of its windows


# ---------------------------------------------------------------- and back
@quick
@given(cases())
def test_decode_gives_the_rows_back(case):
    df, keys, rng = case
    keys = {**keys, 'normalize_on_all_data': True}
    keys.pop('cardinality_config', None)
    with TemporaryDirectory() as tmp:
        try: result = job(tmp, preprocessing_data_path=str(write(tmp, df)), read_format='parquet', **keys)
        except (ValueError, TypeError): return
        encoder = Encoder.load(result)
        owners = df.with_columns(number=pl.col('sequenceId').rank('dense'))
        got = encoder.decode(encoder.encode_rows(df))
        check_values(got, df, encoder)
        assert set(encoder.decode(encoder.encode_rows(df), labels=True).columns) == set(got.columns)
        for split, block in stored_windows(result, encoder):
            frame = encoder.decode(block)
            assert len(frame) == block.n*block.width-int(block.left_pad_lengths.sum())
            both = frame.join(df, ['sequenceId', 'itemPosition'], 'left', suffix='_source', maintain_order='left')
            check_values(frame, both.select(pl.col(f'{c}_source').alias(c) for c in encoder.fitted.columns), encoder)
            assert len(encoder.decode(block, pads=True)) == block.n*block.width


def check_values(got, want, encoder):
    for f in encoder.fitted:
        a, b = got[f.name], want[f.name]
        if f.role == 'categorical':
            b = [None if v in ('[unknown]', '[other]') else v for v in b.cast(pl.String).to_list()] if f.categories.kind == 'text' else b.to_list()
            assert a.to_list() == b, f.name
        elif f.role == 'temporal': assert a.to_list() == b.to_list(), f.name
        else:
            scale = max(1, abs(f.mean)+abs(f.std))
            if f.std: assert np.allclose(a.to_numpy(), b.to_numpy(), rtol=1e-5, atol=1e-5*scale), f.name


def test_decode_what_is_not_there(shop):
    assert shop.decode(dict(item=[0, 1, 2, 3]))['item'].to_list() == [None, None, None, 'a']
    assert shop.decode(dict(item=[0, 1, 2, 3]), labels=True)['item'].to_list() == ['[unknown]', '[other]', '[mask]', 'a']
    for bad, words in ((dict(itm=[3]), "no feature 'itm', did you mean 'item'"), (dict(item=[7]), 'has no id 7'), (dict(item=[-1]), 'has no id -1')):
        with pytest.raises(ValueError, match=words): shop.decode(bad)


def test_a_run_that_wrote_nothing_or_was_overwritten(tmp_path):
    keys = dict(project_root=str(tmp_path), dataset_name='d', split_ratios=[1.], window_length=4)
    with pytest.raises(FileNotFoundError): Encoder.load(preprocess(keys, ROWS, dry_run=True, progress=False))
    first = preprocess(keys, ROWS, progress=False)
    assert Encoder.load(first).known
    with pytest.raises(StoreError, match='dry run'): Encoder.load(preprocess(keys, ROWS, dry_run=True, progress=False))
    preprocess(keys, ROWS.with_columns(item=pl.lit('z')), progress=False)
    with pytest.raises(StoreError, match='another run of that name came later'): Encoder.load(first)


def test_metadata_with_a_broken_layout_is_refused(result, tmp_path):
    meta = json.loads(Path(result.metadata_path).read_text())
    path = tmp_path/'nested.json'
    path.write_text(json.dumps({**meta, 'depth_layouts': {'a': {}}, 'split_paths': []}))
    with pytest.raises(ValueError, match="nested.json: depth layout 'a' is not one"): Encoder.load(path)


def test_an_encoder_can_be_sent_to_a_worker(shop):
    import pickle
    equal(pickle.loads(pickle.dumps(shop)).encode_rows(ROWS), shop.encode_rows(ROWS))


@pytest.mark.parametrize('zone', ['UTC', 'Europe/Berlin', 'Asia/Kolkata', 'America/St_Johns'])
def test_times_by_python_and_by_columns_agree(tmp_path, zone):
    "Over both changes of the clock, before 1970, with and without a zone"
    rng = np.random.default_rng(3)
    moments = sorted(datetime(1969, 12, 30)+timedelta(seconds=int(s), microseconds=int(u)) for s, u in zip(rng.integers(0, 2*10**9, 300), rng.integers(0, 10**6, 300)))
    moments += [datetime(2035, 3, 25)+timedelta(minutes=30*i) for i in range(10)]+[datetime(2035, 10, 28)+timedelta(minutes=30*i) for i in range(10)]
    parts = ['delta', 'elapsed', 'minute', 'hour', 'weekday', 'day', 'week', 'month', 'quarter', 'year']
    df = pl.DataFrame(dict(sequenceId=1, itemPosition=range(len(moments)), at=moments))
    e = Encoder.load(preprocess(dict(project_root=str(tmp_path), dataset_name='t', split_ratios=[1.], window_length=4, timestamps=dict(at=parts), time_zone=zone), df, progress=False))
    few = e.encode_rows(df.to_dicts())
    aware = [dict(at=m.replace(tzinfo=timezone.utc).astimezone(timezone(timedelta(hours=5)))) for m in moments]
    equal(e.encode_rows(aware), few, 'aware')
    with many_rows():
        equal(e.encode_rows(df), few, 'many')
        equal(e.encode_rows(df.with_columns(pl.col('at').dt.replace_time_zone('UTC').dt.convert_time_zone('Asia/Tokyo'))), few, 'of another zone')
