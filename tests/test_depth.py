"""Items with several rows: whole runs against a plain-Python job, every order and layout of the same rows, formats, workers, what is
refused, and windows cut from slots against windows of a dense table."""
import json, os, random
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np, polars as pl, pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import table_job_oracle as oracle
from fastseqprep.blockfiles import read_block, split_files
from fastseqprep.blocks import WindowBlock
from fastseqprep.config import PreprocessConfig
from fastseqprep.depth import Slots, needed_items, read_nested
from fastseqprep.payload import load_pt_payload
from fastseqprep.preprocess import cut_slots, cut_windows, placements, planned_windows, preprocess, window_offsets, windows_within
from fastseqprep.prepare import prepare
from fastseqprep.ragged import lengths_to_offsets
from fastseqprep.rules import DepthLayout
from fastseqprep.spill import mapped_file
from fastseqprep.window import plan_windows

EXAMPLES = int(os.environ.get('FSP_EXAMPLES', 20))
quick = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
pytestmark = pytest.mark.filterwarnings('ignore')
KINDS = ['a', 'b', 'é', 'Z', '', '10']


# ---------------------------------------------------------------- random nested data
@dataclass
class Data:
    items: dict                # (sequence, position) → (shallow values, {layout: {slot: values}})
    layouts: dict
    stacked: bool = False      # children of different layouts in rows of their own
    seed: int = 0              # order of rows

    def rows(self):
        counting = {k: o['position_column'] for k, o in self.layouts.items()}
        blank = {c: None for k, o in self.layouts.items() for c in [o['position_column'], *o['columns']]}
        out = []
        for (s, p), (shallow, deep) in self.items.items():
            lists = {k: [{counting[k]: slot+self.layouts[k].get('position_base', 0), **v} for slot, v in sorted(deep[k].items())] for k in self.layouts}
            base = dict(sequenceId=s, itemPosition=p, **shallow, **blank)
            if self.stacked: own = [{**base, **r} for l in lists.values() for r in l]
            else: own = [{**base, **{c: v for l in lists.values() if i < len(l) for c, v in l[i].items()}} for i in range(max(map(len, lists.values())))]
            out += own or [base]
        if self.seed is not None: random.Random(self.seed).shuffle(out)
        return out

    def frame(self):
        schema = dict(sequenceId=pl.Int64, itemPosition=pl.Int64, shop=pl.String, val=pl.Float64, stage=pl.Int64, day=pl.Int64, line=pl.Int64, kind=pl.String, amt=pl.Float32, code=pl.Int16, pay=pl.Int64, method=pl.String)
        used = {'sequenceId', 'itemPosition', 'shop', 'val', 'stage', 'day'} | {c for o in self.layouts.values() for c in [o['position_column'], *o['columns']]}
        return pl.DataFrame(self.rows(), schema={c: t for c, t in schema.items() if c in used})


@st.composite
def nested(draw, two=None):
    two = draw(st.booleans()) if two is None else two
    D = draw(st.integers(1, 4))
    layouts = dict(subs=dict(position_column='line', columns=['kind', 'amt', 'code'], context_length=D, position_base=draw(st.integers(0, 1)), allow_gaps=draw(st.booleans())))
    if two: layouts['pays'] = dict(position_column='pay', columns=['method'], context_length=2)
    rnd = random.Random(draw(st.integers(0, 10**6)))
    items = {}
    for s in rnd.sample(range(-5, 50), draw(st.integers(1, 4))):
        start, n = rnd.randint(-3, 3), rnd.choice([1, 2, 3, 7, 12, 20])
        for i in range(n):
            def slots(o):
                k = rnd.randint(0 if rnd.random() < .3 else 1, o['context_length'])
                return sorted(rnd.sample(range(o['context_length']), k)) if o.get('allow_gaps') else list(range(k))
            deep = {'subs': {j: dict(kind=rnd.choice(KINDS), amt=rnd.choice([0., 1., -2.5, .1]), code=rnd.randint(-2, 2)) for j in slots(layouts['subs'])}}
            if two: deep['pays'] = {j: dict(method=rnd.choice('xyz')) for j in slots(layouts['pays'])}
            items[s, start+i] = dict(shop=rnd.choice('nsew'), val=rnd.choice([1., 2., 4.5]), stage=s % 3, day=i), deep
    if not any(d['subs'] for _, d in items.values()): items[next(iter(items))][1]['subs'][0] = dict(kind='a', amt=1., code=0)
    return Data(items, layouts, draw(st.booleans()), draw(st.integers(0, 99)))


# ---------------------------------------------------------------- the job in plain Python
def plain(data, cfg):
    "Windows of each split as dicts, and the metadata that matters; None if nothing can be fitted"
    seqs = {}
    for (s, p) in sorted(data.items): seqs.setdefault(s, []).append(p)
    K = len(cfg['split_ratios']) if cfg.get('split_ratios') else len(cfg['split_values'])+1
    split = oracle.between(sorted(seqs), cfg['split_ratios'], 1010) if cfg.get('split_method') == 'between_sequence' else None
    bounds = {}
    for s, ps in seqs.items():
        if cfg.get('split_method') == 'value_cutoff': bounds[s] = [0, *[sum(data.items[s, p][0]['day'] < v for p in ps) for v in cfg['split_values']], len(ps)]
        elif split is not None: bounds[s] = [0]*(split[s]+1)+[len(ps)]*(K-split[s])
        else: bounds[s] = oracle.cut(len(ps), cfg['split_ratios'])
    fitted = [data.items[s, p] for s, ps in seqs.items() for p in ps[:bounds[s][1]]]
    deep = {c: k for k, o in data.layouts.items() for c in o['columns']}
    features = [c for c in data.frame().columns if c not in ('sequenceId', 'itemPosition', 'stage', 'line', 'pay')]
    maps, stats = {}, {}
    for c in features:
        values = [v[c] for _, d in fitted for v in d[deep[c]].values()] if c in deep else [sh[c] for sh, _ in fitted]
        if not values: return None
        if c in ('val', 'amt'): stats[c] = oracle.moments([float(np.float32(v)) if c == 'amt' else v for v in values])
        else: maps[c] = {v: 3+i for i, v in enumerate(sorted(set(values)))}

    def number(c, v):
        if c in maps: return maps[c].get(v, 1)
        m, sd = stats[c]
        return 0. if sd == 0 else ((float(np.float32(v)) if c == 'amt' else v)-m)/(sd+1e-9)

    def value(c, s, p):
        if c not in deep: return 0 if p is None else number(c, data.items[s, p][0][c])
        D = data.layouts[deep[c]]['context_length']
        held = {} if p is None else data.items[s, p][1][deep[c]]
        return [number(c, held[j][c]) if j in held else 0 for j in range(D)]
    out = []
    for i in range(K):
        W, windows = cfg['window_length'], []
        for s, ps in seqs.items():
            lo, hi = bounds[s][i:i+2]
            if lo == hi: continue
            g = cfg.get('prediction_length') if i in cfg.get('prediction_aligned_splits', []) else None
            pad = max(0, W-(hi-lo))
            starts = oracle.aligned(lo, hi, W, g) if g else [lo-pad+a for a in oracle.distributed(hi-lo, W, cfg.get('window_stride') or W)[0]]
            for n, a in enumerate(starts):
                left = max(0, -a) if g else pad
                shown = [None if j < left else ps[a+j] for j in range(W)]
                windows.append(dict(sequence=s, sub=n, start=ps[a+left]-left, pad=left, split_start=ps[lo], split_end=ps[hi-1]+1, stage=data.items[s, ps[lo]][0]['stage'],
                                    **{f'f:{c}': [value(c, s, p) for p in shown] for c in features},
                                    **{f'm:{k}': [[p is not None and j in data.items[s, p][1][k] for j in range(o['context_length'])] for p in shown] for k, o in data.layouts.items()}))
        out.append(windows)
    return out, maps, stats


def stored(paths):
    "Windows of each split as dicts"
    out = []
    for path in paths:
        blocks = [read_block(f) for f in split_files(path)] if Path(path).exists() else []
        windows = []
        for b in blocks:
            for j in range(b.n):
                windows.append(dict(sequence=b.sequence_ids[j], sub=b.subsequence_ids[j], start=b.start_item_positions[j], pad=b.left_pad_lengths[j], split_start=b.split_start_item_positions[j], split_end=b.split_end_item_positions[j],
                                    **{k: v[j] for k, v in b.sample_positions.items()}, **{f'f:{c}': v[j] for c, v in b.features.items()}, **{f'm:{k}': v[j] for k, v in b.depth_masks.items()}))
        out.append(windows)
    return out


def same(got, want, tol=1e-5):
    assert [len(w) for w in got] == [len(w) for w in want]
    for g, w in zip(got, want):
        for a, b in zip(sorted(g, key=lambda x: (x['sequence'], x['sub'])), w):
            assert set(a) <= set(b) and {k for k in b if k != 'stage'} <= set(a), (set(a), set(b))
            for k in a: np.testing.assert_allclose(np.asarray(a[k], float), np.asarray(b[k], float), rtol=tol, atol=tol, err_msg=k)


FORMATS = [dict(write_format='pt', merge_output=False), dict(write_format='parquet', layout='wide'), dict(write_format='parquet', layout='wide', merge_output=False),
           dict(write_format='arrow', dtypes='standard'), dict(write_format='bin')]


@quick
@given(data=nested(), W=st.integers(1, 5), stride=st.one_of(st.none(), st.integers(1, 7)), how=st.sampled_from(['within', 'between', 'cutoff', 'aligned']), fmt=st.sampled_from(FORMATS),
       per=st.integers(1, 5))
def test_job_is_the_plain_one(data, W, stride, how, fmt, per):
    cfg = dict(window_length=W, window_stride=stride, max_target_offset=0, depth_layouts=data.layouts, batches_per_file=per, curriculum_column='stage', **fmt)
    if how == 'cutoff': cfg |= dict(split_method='value_cutoff', split_column='day', split_values=[2, 9])
    elif how == 'aligned': cfg |= dict(split_ratios=[.6, .4], prediction_aligned_splits=[1], prediction_length=1, target_offset=0)
    elif how == 'between': cfg |= dict(split_method='between_sequence', split_ratios=[.5, .5])
    else: cfg |= dict(split_ratios=[.6, .3, .1])
    if how == 'between' and len({s for s, _ in data.items}) < 2: return
    want = plain(data, cfg)
    with TemporaryDirectory() as tmp:
        run = lambda: preprocess(dict(cfg, project_root=tmp, dataset_name='d'), data.frame(), progress=False)
        if want is None:
            with pytest.raises(ValueError): run()
            return
        res = run()
        windows, maps, stats = want
        same(stored(res.splits), windows)
        meta = json.loads(Path(res.metadata_path).read_text())
        for c, m in maps.items(): assert {k: v for k, v in meta['id_maps'][c].items() if v > 2} == {str(k): v for k, v in m.items()}
        for c, (m, s) in stats.items(): np.testing.assert_allclose([meta['selected_columns_statistics'][c][k] for k in ('mean', 'std')], [m, s], rtol=1e-9, atol=1e-12)
        assert meta['tensor_payload_version'] == 2 and set(meta['depth_layouts']) == set(data.layouts)
        assert res.windows == [len(w) for w in windows]
        entry = res.ledger.sources['df']
        assert entry['read'] == entry['kept'] == len(data.frame()) and entry['counts']['items'] == len(data.items)
        if fmt['write_format'] == 'pt':
            for i, p in enumerate(res.splits):
                names = sorted(f.name for f in Path(p).glob('*.pt'))
                assert names == [f'd-split{i}-0-{k:08d}.pt' for k in range(-(-res.windows[i]//per))]
                for f in names: load_pt_payload(Path(p)/f, layouts=data.layouts, n_classes={c: n for c, n in meta['n_classes'].items()})


# ---------------------------------------------------------------- the same rows in any form
def tree(root): return {str(p.relative_to(root)): p.read_bytes() for p in sorted(Path(root).rglob('*')) if p.is_file() and 'manifest' not in p.name}


def big(two=True, seed=5, n=6):
    rnd = random.Random(seed)
    layouts = dict(subs=dict(position_column='line', columns=['kind', 'amt', 'code'], context_length=5))
    if two: layouts['pays'] = dict(position_column='pay', columns=['method'], context_length=2)
    items = {}
    for s in range(n):
        for p in range(30):
            deep = {'subs': {j: dict(kind=rnd.choice(KINDS), amt=rnd.random(), code=rnd.randint(0, 9)) for j in range(rnd.randint(0, 5))}}
            if two: deep['pays'] = {j: dict(method=rnd.choice('xyz')) for j in range(rnd.randint(0, 2))}
            items[s, p] = dict(shop=rnd.choice('nsew'), val=rnd.random(), stage=0, day=p), deep
    return Data(items, layouts, seed=None)


@pytest.mark.parametrize('two', [False, True])
def test_bytes_do_not_depend_on_order_files_or_workers(two, tmp_path):
    data = big(two)
    df = data.frame().with_columns(pl.col('amt').cast(pl.Float64), pl.col('kind').replace({'': 'q', '10': 'ten'}))  # what a CSV can tell
    base = dict(read_format='parquet', write_format='pt', merge_output=False, split_ratios=[.7, .3], window_length=6, window_stride=4, depth_layouts=data.layouts, batches_per_file=7, dataset_name='d', normalize_on_all_data=False)
    want = None
    for name, files, seed, more, call in [('one', 1, None, {}, {}), ('shuffled', 1, 1, {}, {}), ('two', 2, 2, dict(n_cores=2), {}), ('five', 5, None, dict(n_cores=1), {}), ('forty', 40, 3, {}, {}),
                                          ('csv', 3, 4, dict(read_format='csv'), {}), ('processes', 2, 5, dict(n_cores=2), dict(engine='processes')), ('disk', 3, 6, dict(memory_limit=2**20), {})]:
        root = tmp_path/name
        (root/'in').mkdir(parents=True)
        rows = df if seed is None else df.sample(fraction=1, shuffle=True, seed=seed)
        cut = np.linspace(0, len(rows), files+1).astype(int)
        for i, (a, b) in enumerate(zip(cut, cut[1:])):
            if more.get('read_format') == 'csv': rows[a:b].write_csv(root/'in'/f'{i:02d}.csv')
            else: rows[a:b].write_parquet(root/'in'/f'{i:02d}.parquet')
        preprocess(PreprocessConfig(**{**base, **more, 'project_root': str(root), 'preprocessing_data_path': str(root/'in')}), progress=False, **call)
        got = {k: v.replace(str(root).encode(), b'ROOT') for k, v in tree(root).items() if not k.startswith('in/')}
        if want is None: want = got
        assert got.keys() == want.keys() and all(got[k] == want[k] for k in want), name
    assert len(want) == 10


@pytest.mark.parametrize('fmt', FORMATS)
def test_flat_is_depth_with_one_child(fmt, tmp_path):
    rnd = np.random.default_rng(1)
    df = pl.DataFrame(dict(sequenceId=np.repeat([3, 1, 2], [9, 20, 4]), itemPosition=[*range(9), *range(20), *range(4)], item=rnd.choice(list('abc'), 33), amount=rnd.normal(size=33)))
    base = dict(split_ratios=[.6, .4], window_length=4, window_stride=3, dataset_name='d', **fmt)
    flat = preprocess(dict(base, project_root=str(tmp_path/'flat')), df, progress=False)
    deep = preprocess(dict(base, project_root=str(tmp_path/'deep'), depth_layouts=dict(subs=dict(position_column='line', columns=['amount'], context_length=1))), df.with_columns(line=pl.lit(0)), progress=False)
    assert flat.windows == deep.windows
    for a, b in zip(stored(flat.splits), stored(deep.splits)):
        for x, y in zip(a, b):
            assert np.array_equal(x['f:item'], y['f:item']) and np.array_equal(x['f:amount'], y['f:amount'][:, 0])
            assert np.array_equal(y['m:subs'][:, 0], np.arange(4) >= y['pad'])


def test_metadata_is_reused(tmp_path):
    data = big(False)
    base = dict(project_root=str(tmp_path), write_format='pt', merge_output=False, split_ratios=[1.], window_length=6, depth_layouts=data.layouts, dataset_name='old')
    preprocess(base, data.frame(), progress=False)
    more = dict(base, dataset_name='new', metadata_config_path='configs/metadata_configs/old.json')
    unseen = data.frame().with_columns(kind=pl.when(pl.col('kind') == 'a').then(pl.lit('new')).otherwise('kind'))
    res = preprocess(more, unseen, progress=False)
    old, new = (read_block(tmp_path/'data'/f'{n}-split0'/f'{n}-split0-0-00000000.pt') for n in ('old', 'new'))
    ids = json.loads(Path(res.metadata_path).read_text())['id_maps']['kind']
    assert np.array_equal(new.features['kind'], np.where(old.features['kind'] == ids['a'], 1, old.features['kind'])) and np.array_equal(new.features['amt'], old.features['amt'])
    for wrong, what in [(dict(normalize_real_columns=False), 'normalize_real_columns'), (dict(depth_layouts=dict(subs=dict(data.layouts['subs'], context_length=6))), 'depth_layouts'),
                        (dict(column_data_types=dict(shop='Int64', val='Float64', stage='Int64', day='Int64', kind='Int8', amt='Float32', code='Int64')), 'column_data_types.kind')]:
        with pytest.raises(ValueError, match=what): preprocess(dict(more, **wrong), unseen, progress=False)


# ---------------------------------------------------------------- nulls, casts, limits
BASE = dict(split_ratios=[1.], window_length=2, write_format='arrow', dataset_name='d', dtypes='standard')
SUBS = dict(position_column='line', columns=['kind', 'amt'], context_length=3)
ROWS = pl.DataFrame(dict(sequenceId=1, itemPosition=[0, 0, 0, 1, 2, 2], line=[0, 1, 2, 0, 0, 1], shop=['n', 'n', 'n', 's', 's', 's'], kind=['a', 'b', 'c', 'a', 'b', 'c'], amt=[1., 2., 3., 4., 5., 6.]))


def one(tmp, df, layout=SUBS, **keys):
    res = preprocess({**BASE, 'project_root': str(tmp), 'depth_layouts': dict(subs=layout), **keys}, df, progress=False)
    return WindowBlock.concat([read_block(f) for f in split_files(res.splits[0])]), res


def test_nulls_of_children(tmp_path):
    df = ROWS.with_columns(kind=pl.Series(['a', None, 'c', 'a', 'b', 'c']), amt=pl.Series([1., 2., 3., None, 5., 6.]))
    with pytest.raises(ValueError, match="column 'kind'.*null"): one(tmp_path, df)
    b, res = one(tmp_path, df, nulls=dict(kind='unknown+indicator', amt='mean'), normalize_real_columns=False)
    assert b.features['kind'][0].tolist() == [[3, 0, 5], [3, 0, 0]] and b.features['kind_is_null'][0].tolist() == [[3, 4, 3], [3, 0, 0]]
    assert b.depth_masks['subs'][0].tolist() == [[True]*3, [True, False, False]]
    np.testing.assert_allclose(b.features['amt'][0], [[1, 2, 3], [17/5, 0, 0]])
    meta = json.loads(Path(res.metadata_path).read_text())
    assert meta['depth_layouts']['subs']['columns'] == ['kind', 'amt', 'kind_is_null'] and meta['selected_columns_statistics']['amt']['mean'] == 17/5
    again, _ = one(tmp_path, df, nulls=dict(kind='unknown+indicator', amt='mean'), normalize_real_columns=False, dataset_name='again', metadata_config_path='configs/metadata_configs/d.json')
    assert all(np.array_equal(again.features[c], b.features[c]) for c in b.features)


def test_null_children_are_dropped(tmp_path):
    df = ROWS.with_columns(kind=pl.Series(['a', 'b', None, 'a', 'b', 'c']))
    b, res = one(tmp_path, df, nulls=dict(kind='drop_row'))
    assert b.depth_masks['subs'][0].tolist() == [[True, True, False], [True, False, False]]
    assert res.ledger.sources['df']['dropped'] == {'null in kind': 1} and res.ledger.sources['df']['kept'] == 5
    holes = ROWS.with_columns(kind=pl.Series([None, 'b', 'c', None, 'b', 'c']))
    with pytest.raises(ValueError, match='allow_gaps'): one(tmp_path, holes, nulls='drop_row')
    b, res = one(tmp_path, holes, layout=dict(SUBS, allow_gaps=True), nulls='drop_row')
    assert b.depth_masks['subs'][0].tolist() == [[False, True, True], [False]*3] and res.ledger.sources['df']['dropped'] == {'null in kind': 2}


def test_items_disagree_before_casts(tmp_path):
    df = ROWS.with_columns(val=pl.Series([1.2, 1.7, 1.2, 2., 3., 3.]))
    types = dict(shop='Int64', kind='Int64', amt='Float64', val='Int8')
    with pytest.raises(ValueError, match="'val' is 1.2 and 1.7 in sequence 1 at item position 0"): one(tmp_path, df, column_data_types=types)
    b, _ = one(tmp_path, df.with_columns(val=pl.Series([1.7]*3+[2.]+[300.9]*2)), column_data_types=types)
    assert b.features['val'].dtype == np.int8 and b.features['val'].tolist() == [[3, 4], [4, 5]]
    with pytest.raises(ValueError, match="'shop'"): one(tmp_path, ROWS.with_columns(shop=pl.Series(['n', None, 'n', 's', 's', 's'])), nulls='unknown')


def test_numbers_are_standardised_in_float64(tmp_path):
    x = [1e8+1, 1e8+2, 1e8+3, 1e8+4, 1e8+5, 1e8+6]
    b, _ = one(tmp_path, ROWS.with_columns(amt=pl.Series(x, dtype=pl.Float32)), column_data_types=dict(shop='Int64', kind='Int64', amt='Float32'))
    f = np.float32(x).astype(float)
    np.testing.assert_allclose(b.features['amt'][0][0], ((f-f.mean())/(f.std(ddof=1)+1e-9))[:3].astype(np.float32))
    assert b.features['amt'].dtype == np.float32


def test_limits_of_items(tmp_path):
    shuffled = ROWS.sample(fraction=1, shuffle=True, seed=2)
    for n, kept in ((1, 3), (2, 4), (3, 6), (9, 6)):
        b, res = one(tmp_path, shuffled, max_rows=n, window_length=2)
        assert res.ledger.sources['df']['kept'] == kept and res.ledger.sources['df']['counts']['items'] == min(n, 3)
    with pytest.raises(ValueError, match='max_rows'): one(tmp_path, ROWS, max_rows=0)


def test_ids_gaps_and_duplicates(tmp_path):
    text = ROWS.with_columns(sequenceId=pl.Series(['b']*4+['a']*2))
    b, res = one(tmp_path, text)
    assert b.sequence_ids.tolist() == [0, 1] and pl.read_parquet(tmp_path/'data'/'d.ids.parquet')['id'].to_list() == ['a', 'b']
    far = ROWS.with_columns(itemPosition=pl.col('itemPosition')*10)
    with pytest.raises(ValueError, match='gap'): one(tmp_path, far)
    b, _ = one(tmp_path, far, gaps='renumber')
    assert b.start_item_positions.tolist() == [0, 1]
    twice = pl.concat([ROWS, ROWS[:1].with_columns(kind=pl.lit('z'))])
    with pytest.raises(ValueError, match='duplicate'): one(tmp_path, twice)
    for rule, kind in (('first', 'a'), ('last', 'z')):
        b, res = one(tmp_path, twice, duplicates=rule)
        ids = json.loads(Path(res.metadata_path).read_text())['id_maps']['kind']
        assert b.features['kind'][0, 0, 0] == ids[kind] and res.ledger.sources['df']['dropped'] == {'duplicate position': 1}
    pays = dict(subs=SUBS, pays=dict(position_column='pay', columns=['method'], context_length=1))
    more = twice.with_columns(pay=pl.lit(None, pl.Int64), method=pl.lit(None, pl.String))
    more = pl.concat([more, more[:1].with_columns(line=pl.lit(None, pl.Int64), kind=pl.lit(None, pl.String), amt=pl.lit(None, pl.Float64), pay=pl.lit(0, pl.Int64), method=pl.lit('x'))])
    with pytest.raises(ValueError, match='in two rows'): one(tmp_path, more, depth_layouts=pays)
    b, res = one(tmp_path, more, depth_layouts=pays, duplicates='last')
    assert b.depth_masks['pays'][0].tolist() == [[True], [False]] and res.ledger.sources['df']['dropped'] == {'duplicate position': 1}


@pytest.mark.parametrize('df, keys, what', [
    (ROWS.with_columns(line=pl.Series([0, 1, 2, 0, 0, 3])), {}, 'has 3 slots'), (ROWS.with_columns(line=pl.Series([0, 1, 2, 1, 0, 1])), {}, 'where 0 was expected'),
    (ROWS.with_columns(line=pl.Series([-1, 1, 2, 0, 0, 1])), {}, 'expected positions from 0'), (ROWS.with_columns(line=pl.Series([0.5, 1, 2, 0, 0, 1])), {}, 'whole numbers'),
    (ROWS.with_columns(line=pl.lit('x')), {}, 'whole numbers'), (ROWS.with_columns(line=pl.Series([0, 1, 2, None, 0, 1])), {}, "'kind' is 'a' in a row without 'line'"),
    (ROWS.drop('line'), {}, "'line'"), (ROWS.drop('kind'), {}, "'kind'"), (ROWS.with_columns(stage=pl.Series([0, 1, 0, 0, 0, 0])), dict(curriculum_column='stage'), "'stage' is 0 and 1"),
    (ROWS.with_columns(amt=pl.lit(float('nan'))), {}, 'finite'), (ROWS, dict(duplicates='order', gaps='renumber'), 'order'), (ROWS, dict(write_format='parquet'), 'long layout'), (ROWS, dict(write_format='csv'), 'long layout'),
    (ROWS, dict(split_method='value_cutoff', split_column='amt', split_values=[1], split_ratios=None), "split_column: 'amt' is in the depth layout"),
    (ROWS.with_columns(kind=pl.lit('2024-01-01').str.to_date()), dict(timestamps=dict(kind=['month'])), "'kind' is in the depth layout"),
])
def test_refused(df, keys, what, tmp_path):
    with pytest.raises(ValueError, match=what): one(tmp_path, df, **keys)
    assert not any(p.is_file() for p in tmp_path.rglob('*'))


def test_items_without_any_child(tmp_path):
    empty = ROWS[:0].vstack(pl.DataFrame(dict(sequenceId=1, itemPosition=[3], line=[None], shop=['n'], kind=[None], amt=[None]), schema=ROWS.schema))
    b, _ = one(tmp_path, pl.concat([ROWS, empty]), window_length=4)
    assert b.depth_masks['subs'][0, 3].tolist() == [False]*3 and b.features['kind'][0, 3].tolist() == [0]*3 and b.features['shop'][0].tolist() == [3, 4, 4, 3]
    with pytest.raises(ValueError, match='beside others'): one(tmp_path, pl.concat([ROWS, empty.with_columns(itemPosition=pl.lit(2, pl.Int64))]))


# ---------------------------------------------------------------- cutting
@quick
@given(st.data())
def test_cut_slots_are_cut_of_the_dense_table(data):
    rnd = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    lengths = rnd.integers(0, 15, rnd.integers(1, 5))
    N, D = int(lengths.sum()), int(rnd.integers(1, 4))
    if not N: return
    mask = rnd.random((N, D)) < .6
    dense = np.where(mask, rnd.integers(3, 99, (N, D)), 0)
    counts = mask.sum(1)
    slots = Slots(lengths_to_offsets(counts)[:-1], counts, D, np.nonzero(mask)[1])
    offsets = lengths_to_offsets(lengths)
    cut = rnd.integers(0, lengths+1)
    bounds = np.stack([np.zeros_like(lengths), cut, lengths], 1)
    positions = np.arange(N)-np.repeat(offsets[:-1], lengths)
    for i in (0, 1):
        for aligned in (None, (1, 1)):
            w = plan_windows(offsets, positions, bounds, i, int(rnd.integers(1, 6)), int(rnd.integers(1, 9)), aligned)
            w = w[rnd.permutation(len(w))] if rnd.random() < .3 else w
            items, here = needed_items(w)
            f = slots.filled(items)
            assert np.array_equal(here.cut(f.dense(dense[mask])), w.cut(dense)) and np.array_equal(here.cut(f.mask()), w.cut(mask))
            assert f.n <= len(w)*w.width


@quick
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4), W=st.integers(1, 6), stride=st.integers(1, 9), steps=st.one_of(st.none(), st.integers(1, 3)), most=st.integers(1, 5))
def test_part_of_a_sequence_is_planned_alike(lengths, W, stride, steps, most):
    df = pl.DataFrame(dict(sequenceId=np.repeat(np.arange(len(lengths)), lengths), itemPosition=[i-2 for n in lengths for i in range(n)], x=[1.]*sum(lengths)))
    if not len(df): return
    more = {} if steps is None else dict(prediction_aligned_splits=[0, 1], prediction_length=1, target_offset=0, prediction_alignment_steps=steps)
    if steps and steps > W: return
    widths = dict(window_lengths=[W, W]) if steps and steps > 1 else dict(window_length=W)
    cfg = PreprocessConfig(project_root='.', dataset_name='d', split_ratios=[.6, .4], window_stride=stride, max_target_offset=0, normalize_on_all_data=True, **widths, **more)
    table = prepare(cfg, df).table
    for at in placements(cfg):
        offsets = window_offsets(table, at)
        n = int(offsets[-1])
        whole = plan_windows(table.offsets, table.positions, table.bounds, at.split, at.width, at.stride, at.aligned)
        for lo, hi in ((0, n), (n//3, n-n//4)):
            parts = list(planned_windows(table, at, lo, hi, most))
            assert all(len(p) <= most for p in parts)
            for k in whole.fields: assert np.array_equal(np.concatenate([getattr(p, k) for p in parts]) if parts else [], getattr(whole, k)[lo:hi]), k
        for s in range(len(table)):
            k = int(offsets[s+1]-offsets[s])
            if k: assert np.array_equal(windows_within(table, at, s, 0, k).first, whole[offsets[s]:offsets[s+1]].first)


def test_reading_in_pieces_on_disk(tmp_path):
    data = big(True, n=40)
    layouts = {k: DepthLayout(**o) for k, o in data.layouts.items()}
    df = data.frame().sample(fraction=1, shuffle=True, seed=1)
    a, la = read_nested(df, layouts)
    b, lb = read_nested(df, layouts, memory_limit=2**16, scratch=tmp_path)
    assert la == lb and b.items.folder is not None
    for k in layouts:
        assert np.array_equal(a.children[k].slots.slots, b.children[k].slots.slots)
        for c in layouts[k].columns: assert a.children[k].columns[c].series().equals(b.children[k].columns[c].series())
    for c in a.items.columns: assert a.items.columns[c].series().equals(b.items.columns[c].series())


def many(n, tmp_path, extra=False):
    """`n` children, eight for an item, with columns of every kind; with `extra`, items without any among them."""
    rnd, item = np.random.default_rng(n), np.repeat(np.arange(n//8), 8)
    df = pl.DataFrame(dict(sequenceId=item//100, itemPosition=item%100, part=np.tile(np.arange(8), n//8), kind=item//3%7, price=item%50*.5, tag=rnd.integers(0, 1000, n), amount=rnd.normal(size=n)))
    if extra:
        few = pl.DataFrame(dict(sequenceId=np.arange(10**6, 10**6+n//50), itemPosition=0, kind=1, price=1.))
        df = pl.concat([df, few.with_columns(part=pl.lit(None, pl.Int64), tag=pl.lit(None, pl.Int64), amount=pl.lit(None, pl.Float64)).select(df.columns)], how='vertical_relaxed')
    path = tmp_path/f'{n}-{extra}.parquet'
    df.write_parquet(path)
    return path


def long_config(path, tmp_path, **keys):
    layouts = dict(parts=dict(position_column='part', columns=['tag', 'amount'], context_length=8))
    return PreprocessConfig(**{**dict(project_root=str(tmp_path), preprocessing_data_path=str(path), read_format='parquet', write_format='pt', merge_output=False, split_ratios=[.8, .2], window_length=5,
        depth_layouts=layouts), **keys})


@pytest.mark.parametrize('extra', [False, True])
def test_a_long_table_lies_in_files(extra, tmp_path):
    path = many(40_000, tmp_path, extra)
    a, b = (prepare(long_config(path, tmp_path, **more)) for more in ({}, dict(memory_limit=2**20)))
    assert a.seqs.folder is None and b.seqs.folder is not None
    for get in (lambda p: p.table.features, lambda p: dict(zip(('starts', 'counts', 'slots'), (getattr(p.table.slots['parts'], k) for k in ('starts', 'counts', 'slots')))),
                lambda p: {c: o.values for c, o in p.children['parts'].columns.items()}, lambda p: dict(positions=p.table.positions)):
        for k, x in get(b).items():
            same = get(a)[k]
            assert mapped_file(x) is not None and mapped_file(same) is None, k
            assert x.dtype == same.dtype and np.array_equal(x, same), k
    assert b.table.features['tag'].dtype == np.uint16 and b.table.features['kind'].dtype == np.uint8


def test_memory_does_not_grow_with_the_table(tmp_path, monkeypatch):
    import tracemalloc, fastseqprep.columns, fastseqprep.depth, fastseqprep.sequences
    for m in (fastseqprep.columns, fastseqprep.depth, fastseqprep.sequences): monkeypatch.setattr(m, '_block', 1<<13)
    def peak(n, **more):
        cfg = long_config(many(n, tmp_path), tmp_path, **more)
        tracemalloc.start()
        try: return prepare(cfg), tracemalloc.get_traced_memory()[1]
        finally: tracemalloc.stop()
    _, small = peak(50_000, memory_limit=2**20)
    p, large = peak(400_000, memory_limit=2**20)
    _, whole = peak(400_000, memory_limit='1GB')
    encoded = sum(x.nbytes for x in p.table.features.values())
    assert large-small < encoded, (small, large, encoded)      # of eight times the rows, not even what is kept of them
    assert large < .75*whole, (large, whole)


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='needs Linux to tell what is resident')
def test_windows_give_back_what_they_read(tmp_path):
    def mapped(): return next(int(o.split()[1])*1024 for o in Path('/proc/self/status').read_text().splitlines() if o.startswith('RssFile'))
    def read(p):
        for at in placements(cfg):
            for w in planned_windows(p.table, at, 0, int(window_offsets(p.table, at)[-1]), 2000): cut_windows(p.table, w)
    cfg = long_config(many(800_000, tmp_path), tmp_path, memory_limit=2**20)
    p = prepare(cfg)
    read(p)
    before = mapped()
    sum(int(x.astype(np.int64).sum()) for x in p.table.features.values())     # all of it is resident now
    touched = mapped()-before
    read(p)
    assert touched > 5e6 and mapped()-before < touched/2, (touched, mapped()-before)


def test_slots_are_checked_in_pieces(monkeypatch):
    import fastseqprep.depth as m
    rnd = np.random.default_rng(3)
    counts = rnd.integers(0, 4, 50)
    position = np.concatenate([np.arange(n) for n in counts]) if counts.sum() else np.zeros(0, int)
    seqs, _ = m.read_sequences(pl.DataFrame(dict(sequenceId=0, itemPosition=range(50), x=1)))
    spec = DepthLayout(position_column='line', columns=['kind'], context_length=3)
    monkeypatch.setattr(m, '_block', 4)
    assert np.array_equal(m.child_slots(seqs, counts, position, spec, 'subs'), position)
    far = int(np.flatnonzero(counts > 1)[-1])
    position[counts[:far].sum()+1] = 5
    with pytest.raises(ValueError, match=f'where 1 was expected .* at item position {far}$'): m.child_slots(seqs, counts, position, DepthLayout(position_column='line', columns=['kind'], context_length=9), 'subs')


# ---------------------------------------------------------------- recorded runs of sequifier 3.1.1.0
CASES = Path(__file__).parent/'cases'/'depth'


def command(root, monkeypatch, capsys):
    from fastseqprep.cli import main
    monkeypatch.chdir(root)
    return main(['preprocess', '--quiet', '--config-path', 'configs/preprocess.yaml']), capsys.readouterr().err


@pytest.mark.parametrize('name', sorted(p.name for p in CASES.iterdir() if p.name != 'errors'))
def test_recorded_run(name, tmp_path, monkeypatch, capsys):
    import shutil
    shutil.copytree(CASES/name/'project', tmp_path, dirs_exist_ok=True)
    assert command(tmp_path, monkeypatch, capsys)[0] == 0
    if (CASES/name/'overlay-1').exists():
        shutil.copytree(CASES/name/'overlay-1', tmp_path, dirs_exist_ok=True)
        assert command(tmp_path, monkeypatch, capsys)[0] == 0
    want = CASES/name/'expected'
    files = sorted(p.relative_to(want) for p in want.rglob('*') if p.is_file())
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob('*.pt')) == sorted(str(p).removesuffix('.npz') for p in files if p.suffix == '.npz')
    for p in files:
        if p.suffix == '.npz':
            z, b = np.load(want/p), load_pt_payload(tmp_path/str(p).removesuffix('.npz')).numpy()
            got = {**{f'sequences/{k}': v for k, v in b.sequences.items()}, **{f'depth_valid_masks/{k}': v for k, v in b.depth_valid_masks.items()}, **{k: getattr(b, k) for k in z if '/' not in k}}
            assert list(got)[:len(b.sequences)] == [k for k in z if k.startswith('sequences/')] and set(got) == set(z)
            for k in z:
                assert got[k].dtype == z[k].dtype, k
                np.testing.assert_allclose(got[k], z[k], rtol=1e-9, atol=1e-9, err_msg=k)
        else: alike(json.loads((tmp_path/p).read_text()), json.loads((want/p).read_text()), str(p))


def alike(got, want, at):
    if isinstance(want, dict):
        assert set(want) <= set(got), at
        for k in want: alike(got[k], want[k], f'{at}.{k}')
    elif isinstance(want, list):
        assert len(got) == len(want), at
        for i, (a, b) in enumerate(zip(got, want)): alike(a, b, f'{at}[{i}]')
    else: assert got == (pytest.approx(want, rel=1e-9) if isinstance(want, float) else want), at


SORTED = {'x-not-adjacent', 'x-order'} # rows may come in any order: what they give is what the same rows in order give
SAYS = {'x-base': 'position_base', 'x-curriculum-children': "'stage'", 'x-dtypes-differ': "'amt'", 'x-duplicate-child': 'duplicate', 'x-max-rows-zero': 'max_rows', 'x-no-position': 'sub', 'x-outer-gap': 'sequence',
        'x-outer-gap-after-max-rows': 'sequence -5', 'x-slot-out-of-range': 'context_length', 'x-two-files': 'a.parquet row 12, b.parquet row 1'}


@pytest.mark.parametrize('name', sorted(p.name for p in (CASES/'errors').iterdir()))
def test_recorded_refusal(name, tmp_path, monkeypatch, capsys):
    import shutil
    shutil.copytree(CASES/'errors'/name, tmp_path, dirs_exist_ok=True)
    before = sorted(tmp_path.rglob('*'))
    code, said = command(tmp_path, monkeypatch, capsys)
    if name not in SORTED:
        assert code in (1, 2) and SAYS[name] in said and len(said.strip().splitlines()) == 1, said
        assert sorted(tmp_path.rglob('*')) == before
        return
    assert code == 0, said
    first = tree(tmp_path/'data')
    f = next((tmp_path/'input').rglob('*.parquet'))
    pl.read_parquet(f).sort('sequenceId', 'itemPosition', 'sub').write_parquet(f)
    assert command(tmp_path, monkeypatch, capsys)[0] == 0 and tree(tmp_path/'data') == first
