"""Rows with several slots, encoded for serving: texts, items with children, and both, against what the job has stored; and the way back."""
import json, os, pickle, random
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np, polars as pl, pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import fastseqprep.encoder as module
from fastseqprep.blockfiles import read_block, split_files
from fastseqprep.blocks import WindowBlock
from fastseqprep.encoder import Encoder
from fastseqprep.preprocess import preprocess
from test_depth import nested

EXAMPLES = int(os.environ.get('FSP_EXAMPLES', 20))
quick = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
pytestmark = pytest.mark.filterwarnings('ignore')
FORMATS = [dict(write_format='pt', merge_output=False), dict(write_format='parquet', layout='wide'), dict(write_format='arrow'), dict(write_format='bin'), dict(write_format='arrow', dtypes='standard')]
TEXTS = ['too big', 'ok', 'too small', '', 'big big big big big big', 'é日本', 'a  b\n', 'zz?']


def equal(got, want, where=''):
    assert set(got) == set(want), f'{where}: {list(got)}, expected {list(want)}'
    for k in want:
        assert got[k].dtype == want[k].dtype and got[k].shape == want[k].shape, f'{where} {k}: {got[k].dtype} {got[k].shape}, expected {want[k].dtype} {want[k].shape}'
        assert np.array_equal(got[k], want[k]), f'{where} {k}: {got[k]}, expected {want[k]}'


def form(df, rng): return rng.choice([lambda: df, df.to_dicts, df.lazy, df.to_arrow])()


def stored_windows(result):
    for i, path in enumerate(result.splits):
        if result.windows[i]: yield i, WindowBlock.concat([read_block(f) for f in split_files(path)])


def check(df, result, encoder, rng, own=lambda x: x):
    "The last window of each sequence and split, encoded from the rows that it was cut from; `own` numbers the items of rows as the run has"
    numbered, n = own(df), 0
    for split, b in stored_windows(result):
        aligned = split in result.config.aligned_splits
        for s in np.unique(b.sequence_ids):
            at = np.flatnonzero(b.sequence_ids == s)
            i = at[np.argmax(b.subsequence_ids[at])]
            lo, hi = b.split_start_item_positions[i], b.split_end_item_positions[i]
            mine = numbered.filter(pl.col('sequenceId') == int(s), pl.col('itemPosition') < hi)
            if not aligned: mine = mine.filter(pl.col('itemPosition') >= lo)
            w = encoder.encode_last_window(form(mine.sample(fraction=1, shuffle=True, seed=rng.randrange(99)), rng), split=split)
            equal(w.features, {k: v[i] for k, v in b.features.items()}, f'split {split}, sequence {s}')
            equal(w.masks, {k: v[i] for k, v in b.depth_masks.items()}, 'masks')
            assert (w.left_pad, w.start_item) == (b.left_pad_lengths[i], b.start_item_positions[i])
            if not aligned: equal(w.block().features, {k: v[None, i] for k, v in b.features.items()})
            n += 1
    return n


def check_many(df, encoder):
    "Many sequences at once are each one alone; all rows hold the windows' rows"
    ids, b = encoder.encode_last_windows(df.sample(fraction=1, shuffle=True, seed=2))
    rows = encoder.encode_rows(df.sort('sequenceId', 'itemPosition', maintain_order=True))
    end = 0
    for i, m in enumerate(ids):
        w = encoder.encode_last_window(df.filter(sequenceId=m))
        equal({k: v[i] for k, v in b.features.items()}, w.features, f'sequence {m}')
        equal({k: v[i] for k, v in b.depth_masks.items()}, w.masks, f'sequence {m}')
        assert (b.left_pad_lengths[i], b.start_item_positions[i], b.split_start_item_positions[i]) == (w.left_pad, w.start_item, w.split_start_item)
        own = encoder.encode_rows(df.filter(sequenceId=m).sort('itemPosition', maintain_order=True))
        n = len(next(iter(own.values())))
        k = min(n, w.width)
        equal({c: x[end:end+n] for c, x in rows.items()}, own)
        equal({c: x[n-k:] for c, x in own.items()}, {c: x[w.width-k:] for c, x in w.features.items()})
        equal({c: x[n-k:] for c, x in own.masks.items()}, {c: x[w.width-k:] for c, x in w.masks.items()})
        end += n


# ---------------------------------------------------------------- texts
@st.composite
def with_texts(draw):
    rng = random.Random(draw(st.integers(0, 2**32)))
    data = [dict(sequenceId=s, itemPosition=p, item=rng.choice('abc'), amount=rng.gauss(0, 3), note=None if rng.random() < .15 else rng.choice(TEXTS), title=rng.choice(TEXTS), hide=rng.random() < .3)
            for s in range(draw(st.integers(1, 4))) for p in range(draw(st.integers(1, 12)))]
    df = pl.DataFrame(data, schema_overrides=dict(note=pl.String))
    rule = rng.choice(['unknown', 'unknown+indicator', 'drop_row'])
    texts = {c: dict(max_tokens=rng.randint(1, 6), vocab_size=rng.choice([260, 300])) for c in rng.sample(['note', 'title'], rng.randint(1, 2))}
    chosen = rng.sample(['item', 'amount', 'note', 'title'], 4)
    keys = dict(selected_columns=chosen, text_columns=texts, nulls=dict(note=rule), gaps='renumber', split_ratios=rng.choice([[1.], [.5, .5], [.7, .2, .1]]), window_length=rng.randint(2, 6),
                window_stride=rng.randint(1, 4), normalize_on_all_data=True, **rng.choice(FORMATS))
    return df, keys, rng


@quick
@given(with_texts(), st.booleans())
def test_texts_are_those_of_the_job(case, by_path):
    df, keys, rng = case
    if keys['nulls']['note'] == 'drop_row' and not df['note'].null_count() < len(df): return
    with TemporaryDirectory() as tmp:
        try: result = preprocess(dict(project_root=tmp, dataset_name='d', **keys), df, progress=False)
        except ValueError: return
        encoder = Encoder.load(result.metadata_path if by_path else result)
        kept = df.drop_nulls('note') if keys['nulls']['note'] == 'drop_row' else df
        kept = kept.with_columns(itemPosition=pl.int_range(pl.len()).over('sequenceId')+pl.col('itemPosition').min().over('sequenceId'))
        assert check(kept, result, encoder, rng) > 0
        check_many(kept, encoder)
        few = encoder.encode_rows(df)
        was, module.FEW = module.FEW, 0
        try:
            many = encoder.encode_rows(df.to_dicts())
            equal(many, few), equal(many.masks, few.masks)
        finally: module.FEW = was
        # hidden rows
        more = dict(keys, mask_column='hide', metadata_config_path='configs/metadata_configs/d.json', dataset_name='e')
        hidden = preprocess(dict(project_root=tmp, **more), df, progress=False)
        assert check(kept, hidden, Encoder.load(hidden), rng) > 0


def test_tokens_are_kept_within_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(module, 'KEPT_TEXTS', 3)
    df = pl.DataFrame(dict(sequenceId=1, itemPosition=range(8), note=TEXTS))
    e = Encoder.load(preprocess(dict(project_root=str(tmp_path), dataset_name='d', split_ratios=[1.], window_length=3, write_format='arrow', text_columns='note'), df, progress=False))
    want = e.encode_rows(df)
    for _ in range(3):
        for r, ids in zip(df.to_dicts(), want['note']): assert np.array_equal(e.encode_rows(r)['note'][0], ids)
        equal(e.encode_rows(df.reverse()), {k: v[::-1] for k, v in want.items()})
    equal(pickle.loads(pickle.dumps(e)).encode_rows(df), want)


def test_a_tokenizer_file(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    tok = Tokenizer(models.WordLevel({'[UNK]': 0, 'too': 1, 'big': 2}, unk_token='[UNK]'))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.save(str(tmp_path/'tok.json'))
    df = pl.DataFrame(dict(sequenceId=1, itemPosition=range(5), note=['too big', '', None, 'ok too big', 'big']))
    r = preprocess(dict(project_root=str(tmp_path), dataset_name='d', split_ratios=[1.], window_length=5, write_format='arrow', text_columns=dict(note=dict(tokenizer='tok.json', max_tokens=4)), nulls='unknown'), df, progress=False)
    (tmp_path/'tok.json').unlink() # the metadata has it
    e = Encoder.load(r.metadata_path)
    assert check(df, r, e, random.Random(0)) == 1
    assert e.decode(e.encode_rows(df))['note'].to_list() == ['too big', '', None, '[UNK] too big', 'big']


# ---------------------------------------------------------------- items with children
def run_nested(tmp, df, layouts, rng, **keys):
    "A run and its encoder; none if the job refuses"
    base = dict(project_root=tmp, dataset_name='d', split_ratios=rng.choice([[1.], [.6, .4]]), window_length=rng.randint(1, 5), window_stride=rng.randint(1, 4), max_target_offset=0, depth_layouts=layouts, **rng.choice(FORMATS))
    if rng.random() < .3 and len(base['split_ratios']) == 2: base |= dict(prediction_aligned_splits=[1], prediction_length=1, target_offset=0)
    try: return preprocess({**base, **keys}, df, progress=False)
    except ValueError: return None


@quick
@given(nested(), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_items_are_those_of_the_job(data, seed, text, by_path):
    rng, df = random.Random(seed), data.frame()
    keys = dict(curriculum_column='stage') if rng.random() < .3 else {}
    if text:
        df = df.with_columns(note=pl.col('shop').replace_strict(dict(zip('nsew', TEXTS))))
        keys |= dict(text_columns=dict(note=dict(max_tokens=4, vocab_size=300)))
    if rng.random() < .3: keys |= dict(column_data_types=dict(shop='Int16', val='Float32', kind='Int16', amt='Float64', code='Int8', day='Int32', stage='Int32', method='Int16'))
    if keys.get('column_data_types'): keys['column_data_types'] = {c: t for c, t in keys['column_data_types'].items() if c in df.columns and not (c == 'stage' and 'curriculum_column' in keys)}
    with TemporaryDirectory() as tmp:
        result = run_nested(tmp, df, data.layouts, rng, **keys)
        if result is None: return
        encoder = Encoder.load(result.metadata_path if by_path else result)
        assert check(df, result, encoder, rng) > 0
        check_many(df, encoder)
        assert 'counts the children' in repr(encoder)


RULES = dict(kind=['unknown', 'unknown+indicator', 'drop_row'], amt=['mean', 'zero', 'mean+indicator', 'zero+indicator', 'drop_row'], code=['unknown', 'drop_row'], method=['unknown', 'drop_row', 'unknown+indicator'],
             shop=['unknown', 'drop_row', 'unknown+indicator'], val=['mean', 'zero+indicator', 'drop_row'])

@quick
@given(nested(), st.integers(0, 10**6))
def test_every_rule_for_missing_values(data, seed):
    rng = random.Random(seed)
    for o in data.layouts.values(): o['allow_gaps'] = True
    nulls = {c: rng.choice(r) for c, r in RULES.items() if c in data.frame().columns}
    for (shallow, deep) in data.items.values():
        for c in ('shop', 'val'):
            if rng.random() < .15: shallow[c] = None
        for slots in deep.values():
            for v in slots.values():
                for c in v:
                    if rng.random() < .2: v[c] = None
    df = data.frame()
    with TemporaryDirectory() as tmp:
        result = run_nested(tmp, df, data.layouts, rng, nulls=nulls, gaps='renumber', normalize_on_all_data=True)
        if result is None: return
        encoder = Encoder.load(result)
        lost = [c for c in ('shop', 'val') if nulls[c] == 'drop_row']
        def own(df): # items that are left, numbered from the first
            return df.drop_nulls(lost).with_columns(itemPosition=(pl.col('itemPosition').rank('dense').over('sequenceId').cast(pl.Int64)-1+pl.col('itemPosition').min().over('sequenceId')))
        assert check(df, result, encoder, rng, own) > 0
        check_many(own(df), encoder)
        if lost: # rows that the run drops are dropped here too
            s = own(df)['sequenceId'][0]
            a, b = (encoder.encode_last_window(x.filter(sequenceId=s)) for x in (df, own(df)))
            equal(a.features, b.features), equal(a.masks, b.masks)


def test_times_targets_and_reuse(tmp_path):
    from datetime import datetime, timedelta
    rng = random.Random(4)
    data = [dict(sequenceId=s, itemPosition=p, line=j, at=datetime(2025, 3, 1)+timedelta(hours=7*p), kind=rng.choice('abc'), amt=rng.random(), target=rng.choice('xy')) for s in (1, 2) for p in range(9) for j in range(rng.randint(1, 3))]
    df = pl.DataFrame(data)
    keys = dict(project_root=str(tmp_path), split_ratios=[1.], window_length=4, write_format='arrow', timestamps=dict(at=['delta', 'elapsed', 'weekday', 'hour']), time_zone='Europe/Berlin', target_columns=['target'],
                depth_layouts=dict(subs=dict(position_column='line', columns=['kind', 'amt', 'target'], context_length=3)))
    first = preprocess(dict(keys, dataset_name='d'), df, progress=False)
    e = Encoder.load(first)
    assert check(df, first, e, rng) == 2
    w, bare = e.encode_last_window(df.filter(sequenceId=1)), e.encode_last_window(df.filter(sequenceId=1).drop('target'))
    equal(bare.features, {k: v for k, v in w.features.items() if k != 'target'}), equal(bare.masks, w.masks)
    only = df.filter(sequenceId=1).drop('kind', 'amt')
    with pytest.raises(ValueError, match="no column 'kind', 'amt'"): e.encode_rows(only)
    again = preprocess(dict(keys, dataset_name='e', metadata_config_path='configs/metadata_configs/d.json'), df, progress=False)
    assert check(df, again, Encoder.load(again.metadata_path), rng) == 2


def test_metadata_without_its_manifest(tmp_path):
    rng = random.Random(4)
    df = pl.DataFrame([dict(sequenceId=1, itemPosition=p, line=j+1, note=TEXTS[p % 3], kind=rng.choice('abc'), amt=rng.random()) for p in range(9) for j in range(rng.randint(1, 3))])
    r = preprocess(dict(project_root=str(tmp_path), dataset_name='d', split_ratios=[1.], window_length=4, write_format='arrow', dtypes='standard', text_columns=dict(note=dict(max_tokens=3)),
                        depth_layouts=dict(subs=dict(position_column='line', columns=['kind', 'amt'], context_length=3, position_base=1))), df, progress=False)
    (tmp_path/'data'/'d.manifest.json').unlink()
    e = Encoder.load(r.metadata_path)
    assert not e.known and check(df, r, e, rng) == 1
    assert e.decode(e.encode_rows(df)).explode('line', 'kind', 'amt')['line'].to_list() == df['line'].to_list()


def test_a_source_with_other_names(tmp_path):
    from fastseqprep.source import DataSource
    df = pl.DataFrame([dict(user=u, when=t, line=j, kind='abc'[(t+j) % 3], amt=t*.5+j) for u in 'ba' for t in (30, 10, 70, 50) for j in range(1+t % 4)])
    src = DataSource(df.select('user', 'when', 'line', 'kind', 'amt'), time_col='when', entity_col='user', name='seen')
    r = preprocess(dict(project_root=str(tmp_path), split_ratios=[1.], window_length=3, write_format='arrow', depth_layouts=dict(subs=dict(position_column='line', columns=['kind', 'amt'], context_length=4))), src, progress=False)
    e, b = Encoder.load(r, sequence_col='user', position_col='when'), read_block(r.splits[0])
    ids, got = e.encode_last_windows(df)
    last = [int(np.flatnonzero(b.sequence_ids == i)[-1]) for i in (0, 1)]
    assert ids.to_list() == ['a', 'b'] and got.start_item_positions.tolist() == b.start_item_positions[last].tolist()
    equal(got.features, {k: v[last] for k, v in b.features.items()})
    equal(e.encode_last_window(df.filter(user='a').to_dicts()).features, {k: v[last[0]] for k, v in b.features.items()})


# ---------------------------------------------------------------- what is refused
ROWS = [dict(itemPosition=0, line=0, shop='n', kind='a', amt=1.), dict(itemPosition=0, line=1, shop='n', kind='b', amt=2.), dict(itemPosition=1, line=None, shop='s', kind=None, amt=None), dict(itemPosition=2, line=0, shop='s', kind='c', amt=4.)]

@pytest.fixture(scope='module')
def shop(tmp_path_factory):
    df = pl.DataFrame([dict(sequenceId=1, **r) for r in ROWS])
    return Encoder.load(preprocess(dict(project_root=str(tmp_path_factory.mktemp('shop')), dataset_name='d', split_ratios=[1.], window_length=3, write_format='arrow',
                                        depth_layouts=dict(subs=dict(position_column='line', columns=['kind', 'amt'], context_length=2))), df, progress=False))

def changed(i, **values): return [{**r, **(values if k == i else {})} for k, r in enumerate(ROWS)]

BAD = [
    ([{k: v for k, v in r.items() if k != 'line'} for r in ROWS], ValueError, "no column 'line'"), ([{k: v for k, v in r.items() if k != 'itemPosition'} for r in ROWS], ValueError, "no column 'itemPosition'"),
    ([{k: v for k, v in r.items() if k != 'amt'} for r in ROWS], ValueError, "no column 'amt'"), (changed(0, kin='a'), ValueError, "['kin'], which the run did not have, did you mean 'kind'"),
    (changed(0, kind=3), TypeError, "column 'kind' is 3 (int) in row 0, expected text"), (changed(0, amt='1'), TypeError, "column 'amt' is '1' (str)"), (changed(3, amt=float('nan')), ValueError, "column 'amt' is nan in row 3"),
    (changed(1, kind=None), ValueError, "column 'kind' is missing in row 1 (1 of 4 rows), and the run's rule for it is 'error'"), (changed(1, shop='w'), ValueError, "column 'shop' is 'n' and 'w'"),
    (changed(1, shop=None), ValueError, "column 'shop' is missing in row 1"), (changed(1, line=2), ValueError, 'an item has 2 slots'), (changed(3, line=1), ValueError, 'is 1 where 0 was expected'),
    (changed(3, line=-1), ValueError, 'expected positions from 0 on'), (changed(1, line=0), ValueError, 'duplicate position 0'), (changed(3, line=.5), ValueError, 'expected whole numbers'), (changed(3, line='x'), TypeError, "column 'line' is 'x' (str) in row 3, expected a number"),
    (changed(3, line=None), ValueError, "'c' in a row without 'line'"), (changed(1, line=None, kind=None, amt=None), ValueError, 'beside others'), (changed(3, itemPosition=None), ValueError, "no position 'itemPosition'"),
    (changed(3, itemPosition='x'), TypeError, 'expected whole numbers or times')]

@pytest.mark.parametrize('rows,error,words', BAD, ids=[w for *_, w in BAD])
def test_wrong_rows(shop, rows, error, words):
    for f in shop.encode_rows, shop.encode_last_window, lambda r: shop.encode_last_windows([dict(sequenceId=7, **o) for o in r]):
        with pytest.raises(error) as e: f(rows)
        assert words in str(e.value), str(e.value)
    try: df = pl.DataFrame(rows)
    except TypeError: return # no frame can hold it
    if df['kind'].dtype == pl.String and df['kind'].to_list() != [r.get('kind') for r in rows]: return # polars has made it text
    with pytest.raises((ValueError, TypeError)): shop.encode_last_window(df)


def test_gaps_and_no_rows(shop):
    with pytest.raises(ValueError, match='a gap in sequence'): shop.encode_last_window(changed(3, itemPosition=9))
    far = shop.encode_rows(changed(3, itemPosition=9)) # rows by themselves need not be neighbours
    assert far.positions.tolist() == [0, 1, 9] and far['shop'].tolist() == [3, 4, 4]
    none = shop.encode_rows([])
    assert {k: v.shape for k, v in none.items()} == dict(shop=(0,), kind=(0, 2), amt=(0, 2)) and none.masks['subs'].shape == (0, 2)
    for f in shop.encode_last_window, shop.encode_last_windows:
        with pytest.raises(ValueError, match='no rows'): f([])
    with pytest.raises(ValueError, match='of 2 sequences'): shop.encode_last_window([dict(sequenceId=i % 2, **r) for i, r in enumerate(ROWS)])


# ---------------------------------------------------------------- and back
@quick
@given(nested(), st.integers(0, 10**6))
def test_decode_gives_the_rows_back(data, seed):
    rng, df = random.Random(seed), data.frame().with_columns(note=pl.col('shop').replace_strict(dict(zip('nsew', [t for t in TEXTS if t]))))
    with TemporaryDirectory() as tmp:
        result = run_nested(tmp, df, data.layouts, rng, normalize_on_all_data=True, text_columns=dict(note=dict(max_tokens=32)))
        if result is None: return
        encoder = Encoder.load(result)
        compare(encoder.decode(encoder.encode_rows(df)), data, encoder)
        for _, b in stored_windows(result):
            compare(encoder.decode(b), data, encoder, all=False)
            assert len(encoder.decode(b, pads=True)) == b.n*b.width
            assert set(encoder.decode(b, labels=True).columns) == set(encoder.decode(b).columns)
        pickled = pickle.loads(pickle.dumps(encoder))
        equal(pickled.encode_rows(df), encoder.encode_rows(df))


def compare(frame, data, encoder, all=True):
    texts = dict(zip('nsew', [t for t in TEXTS if t]))
    if all: assert list(zip(frame['sequenceId'], frame['itemPosition'])) == sorted(data.items)
    for row in frame.iter_rows(named=True):
        shallow, deep = data.items[row['sequenceId'], row['itemPosition']]
        assert (row['shop'], row['note']) == (shallow['shop'], texts[shallow['shop']])
        for k, o in data.layouts.items():
            slots = sorted(deep[k])
            assert row[o['position_column']] == [s+o.get('position_base', 0) for s in slots]
            for c in o['columns']:
                want = [deep[k][s][c] for s in slots]
                if c == 'amt':
                    if encoder.fitted['amt'].std: np.testing.assert_allclose(row[c], want, rtol=1e-4, atol=1e-4)
                else: assert row[c] == want, c


def test_decode_what_is_not_there(shop):
    assert shop.decode(dict(kind=[3, 0, 4]))['kind'].to_list() == ['a', None, 'b'] and shop.decode(dict(kind=[[3, 0], [1, 4]]))['kind'].to_list() == [['a', None], [None, 'b']]
    assert shop.decode(dict(kind=[[3, 0]]), labels=True)['kind'].to_list() == [['a', '[unknown]']]
    for bad, words in ((dict(kind=[[99]]), 'has no id 99'), (dict(shop=[[3]]), 'expected one value for each row'), (dict(kind=[[[3]]]), r'\(rows, slots\)'), (dict(subs=[3]), "no feature 'subs'")):
        with pytest.raises(ValueError, match=words): shop.decode(bad)
