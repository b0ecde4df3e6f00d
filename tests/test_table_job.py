"""Whole runs of the table job on random tables: against a plain-Python job, the ledger, decoding, leakage, equal bytes for every
layout of the same rows, and numbers that other tools bend."""
import json, math, os, random, re
from datetime import date, datetime, timedelta, timezone
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np, polars as pl, pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import table_job_oracle as oracle
from table_windows import Output, differences, from_oracle, stored

EXAMPLES = int(os.environ.get('FSP_EXAMPLES', 20))
quick = settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
slower = settings(quick, max_examples=max(1, EXAMPLES//4))
pytestmark = pytest.mark.filterwarnings('ignore')


def job(root, **keys):
    "Run the job in `root`; the result object"
    from fastseqprep.config import PreprocessConfig
    from fastseqprep.preprocess import preprocess
    return preprocess(PreprocessConfig(project_root=str(root), **keys))


def write(root, df, name='t', fmt='parquet', parts=None):
    "The frame as one file or, cut at `parts` (numbers of rows), as a folder; the path"
    def one(d, p): d.write_parquet(p) if fmt == 'parquet' else d.write_csv(p)
    root = Path(root)/'input'
    root.mkdir(parents=True, exist_ok=True)
    if parts is None:
        one(df, root/f'{name}.{fmt}')
        return root/f'{name}.{fmt}'
    (root/name/'sub').mkdir(parents=True)
    edges = [0, *sorted(parts), len(df)]
    for i, (a, b) in enumerate(zip(edges, edges[1:])): one(df[a:b], root/name/('sub' if i % 2 else '.')/f'p{i}.{fmt}')
    return root/name


def run(df, root=None, **keys):
    "The job on a frame: what it left"
    with TemporaryDirectory() as tmp:
        root = Path(root or tmp)
        job(root, preprocessing_data_path=str(write(root, df)), read_format='parquet', **{**dict(split_ratios=[.6, .4], window_length=4, max_target_offset=0), **keys})
        return stored(root)


# ---------------------------------------------------------------- random tables
WORDS = ['a', 'b', 'B', 'é', 'e\u0301', '', '1', '1.0', '[unknown]', '[other]', 'x,y', 'a "q"', ' ', 'true', '日本', 'null', 'NA', '\n', '𝒳', '\uffff']
SAFE = ['a', 'b', 'B', 'é', 'x,y', 'a "q"', 'n1', '日本', 'long word', 'Z'] # words that a CSV cannot take for anything else
FLOATS = [0., -0., 1., -1., 2.5, 3.25, -7.125, 1e6, .1, 1e-3]
IDS = {pl.Int64: [3, 1, -7, 10, 2**40, 0, 12], pl.Int8: [3, 1, -7, 10, 100, 0, 12], pl.String: ['b', 'a', 'B', 'é', '10', '9', ''],
       pl.UInt64: [0, 1, 2**63, 2**64-1, 7, 2**62, 2**63-1]}
COLUMNS = dict(
    word=(pl.String, WORDS), tag=(pl.Categorical, ['u', 'v', 'w', '']), code=(pl.Int16, range(-3, 4)), count=(pl.UInt8, range(5)), flag=(pl.Boolean, [True, False]),
    big=(pl.Int64, [-2**63, 2**63-1, 0, 1]), huge=(pl.UInt64, [2**64-1, 2**63, 0]), amount=(pl.Float64, FLOATS), level=(pl.Float32, FLOATS), flat=(pl.Float64, [2.5]))
RATIOS = [[.6, .2, .2], [.7, .2, .1], [.8, .2], [1.], [1/3, 1/3, 1/3], [.1]*10, [.5, .5], [.34, .33, .33], [.9, .05, .05]]
START = datetime(1969, 12, 31, 22)


def fill(draw, safe=False, ids=None, min_sequences=1):
    "A frame of whole sequences, sorted; hypothesis draws the layout, a seeded generator the cells"
    rng = random.Random(draw(st.integers(0, 2**32)))
    id_type = draw(st.sampled_from(ids or list(IDS)))
    owners = rng.sample(IDS[id_type], draw(st.integers(min_sequences, 5)))
    cells = COLUMNS if not safe else {**{c: COLUMNS[c] for c in ('flag', 'amount', 'flat')}, 'word': (pl.String, SAFE), 'code': (pl.Int64, range(-3, 4))}
    cols = draw(st.lists(st.sampled_from(list(cells)), min_size=1, max_size=4, unique=True))
    data, at = {c: [] for c in ['sequenceId', 'itemPosition', *cols, 't', 'when', 'stage']}, 0
    for o in owners:
        first, t = rng.choice([0, 1, -5, 1000]), rng.randrange(8)
        stage = rng.randrange(3)
        for p in range(draw(st.integers(1, 14))):
            t += rng.randrange(3)
            for c, v in dict(sequenceId=o, itemPosition=first+p, t=t, when=START + timedelta(minutes=37*t), stage=stage).items(): data[c].append(v)
            for c in cols: data[c].append(rng.choice(list(cells[c][1])))
    schema = {'sequenceId': id_type, 'itemPosition': pl.Int64, **{c: cells[c][0] for c in cols}, 't': pl.Int64, 'when': pl.Datetime('us'), 'stage': pl.Int64}
    df = pl.DataFrame(data, schema=schema).sort('sequenceId', 'itemPosition')
    return df, cols, rng


def keys_for(draw, df, cols, rng):
    "A configuration that fits the frame"
    k = dict(selected_columns=rng.sample(cols, len(cols)))
    method = draw(st.sampled_from(['within_sequence', 'between_sequence', 'value_cutoff']))
    n_seq = df['sequenceId'].n_unique()
    if method == 'value_cutoff':
        edges = sorted(rng.sample(range(1, 20), rng.randint(1, 3)))
        by_time = draw(st.booleans())
        k.update(split_method=method, split_column='when' if by_time else 't', split_values=[START.replace(tzinfo=timezone.utc) + timedelta(minutes=37*e) for e in edges] if by_time else edges)
        if rng.random() < .5: k['selected_columns'].append(k['split_column'])
        n = len(edges)+1
    else:
        fits = [r for r in RATIOS if method == 'within_sequence' or len(r) <= n_seq]
        k.update(split_method=method, split_ratios=rng.choice(fits), seed=rng.randrange(10))
        n = len(k['split_ratios'])
    offset = draw(st.integers(0, 2))
    width = offset + draw(st.integers(1, 6))
    k.update(max_target_offset=offset, window_stride=rng.choice([None, 1, 2, 3, 7]))
    if k['window_stride'] is None: del k['window_stride']
    aligned = [i for i in range(n) if rng.random() < .3] if width-offset >= 1 else []
    if aligned: k.update(prediction_aligned_splits=aligned, prediction_length=rng.randint(1, width-offset), target_offset=offset)
    if draw(st.booleans()): k['window_length'] = width
    else: k['window_lengths'] = [width if i != 1 or 1 in aligned else max(offset+1, width + rng.choice([-1, 0, 2])) for i in range(n)]
    rules = {c: rng.choice([dict(top_k=2), dict(min_freq=2), dict(hashing=dict(num_buckets=3)), dict(k=1, hashing=dict(buckets=2, seed=-5)), dict(min_count=3, hashing=dict(num_buckets=4, seed=2**70))])
             for c in cols if c not in ('amount', 'level', 'flat') and rng.random() < .3}
    if rules: k['cardinality_config'] = rules
    if rng.random() < .2: k['curriculum_column'] = 'stage'
    if rng.random() < .3: k['normalize_on_all_data'] = True
    if rng.random() < .2: k['normalize_real_columns'] = False
    if 'count' in cols and rng.random() < .5 and 'count' not in rules: k['real_columns'] = ['count']
    k.update(draw(st.sampled_from([dict(), dict(merge_output=False), dict(merge_output=False, batches_per_file=2), dict(write_format='pt', merge_output=False, batches_per_file=3), dict(write_format='csv')])))
    return k


@st.composite
def cases(draw, **kw):
    df, cols, rng = fill(draw, **kw)
    return df, keys_for(draw, df, cols, rng), rng


def outcome(root, **keys):
    "What a run left, or that it was refused"
    try: job(root, **keys)
    except (ValueError, TypeError) as e: return f'refused: {e}'
    return stored(root)


@quick
@given(cases())
def test_against_a_plain_python_job(case):
    df, keys, rng = case
    with TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        path = write(tmp, df.sample(fraction=1, shuffle=True, seed=rng.randrange(99)))
        cfg = dict(keys, preprocessing_data_path=str(path.relative_to(tmp)), read_format='parquet')
        try: want = from_oracle(oracle.run(cfg, tmp), cfg, 't')
        except oracle.Refused as e: want = e
        got = outcome(tmp, **{**cfg, 'preprocessing_data_path': str(path)})
        if isinstance(want, oracle.Refused):
            assert isinstance(got, str), f'accepted, but: {want}'
            assert sorted(p.name for p in tmp.iterdir()) == ['input'], 'a refused run left something'
            return
        assert not isinstance(got, str), got
        for m in (*want.metadata.values(), *got.metadata.values()): m.pop('split_paths')
        problems = differences(want, got)
        assert not problems, '\n'.join([str(keys), *problems[:8]])


# ---------------------------------------------------------------- the same bytes from every layout
def left(root):
    "What a run left: bytes of windows; JSON without what tells of the input's files"
    def bare(o): return {k: bare(v) for k, v in o.items() if k not in ('split_paths', 'inputs')} if isinstance(o, dict) else o
    res = {}
    for f in sorted(p for d in ('data', 'configs') for p in (Path(root)/d).rglob('*') if p.is_file()):
        if '-split' not in f.relative_to(root).as_posix() and 'metadata_configs' not in f.parts: continue
        res[f.relative_to(root).as_posix()] = bare(json.loads(f.read_text(encoding='utf-8'))) if f.suffix == '.json' else f.read_bytes()
    return res


def each_layout(df, keys, rng, variants):
    "Output of the plain layout, then of each variant: {name: (bytes, windows)}"
    res = {}
    for name in ['plain', *variants]:
        with TemporaryDirectory() as tmp:
            d, fmt, parts, more = df, 'parquet', None, {}
            if 'shuffled' in name: d = d.sample(fraction=1, shuffle=True, seed=rng.randrange(99))
            if 'csv' in name: fmt = 'csv'
            if 'files' in name: parts = [rng.randrange(len(d)+1) for _ in range(3)] # some may be empty
            if 'two workers' in name: more = dict(n_cores=2)
            if 'all cores' in name: more = dict(n_cores=0)
            if 'by file' in name: more = dict(process_by_file=False)
            if 'pieces' in name: more = dict(allow_sequence_splitting=True, n_cores=3)
            path = write(tmp, d, fmt=fmt, parts=parts)
            got = outcome(tmp, preprocessing_data_path=str(path), read_format=fmt, **{**dict(n_cores=1), **keys, **more})
            res[name] = got.split(':')[0] if isinstance(got, str) else left(tmp), got
    return res


@slower
@given(cases(safe=True, ids=[pl.Int64]))
def test_equal_bytes_of_merged_files(case):
    "Rows shuffled, in one file or many, CSV or Parquet, with any number of workers: every byte of the windows and every figure is the same"
    df, keys, rng = case
    for k in 'merge_output', 'batches_per_file': keys.pop(k, None)
    if keys.get('write_format') == 'pt': keys['write_format'] = 'parquet'
    if not keys.get('prediction_aligned_splits'): pieces = ['pieces']
    else: pieces = []
    if keys.get('split_column') == 'when': df = df.with_columns(pl.col('when').dt.strftime('%Y-%m-%dT%H:%M:%SZ')) # a CSV has no other times
    got = each_layout(df, keys, rng, ['shuffled', 'files', 'shuffled files', 'two workers', 'all cores', 'two workers, shuffled files', 'csv', 'shuffled csv files', 'files, not by file', *pieces])
    want = got['plain'][0]
    for name, (have, _) in got.items():
        assert (have if isinstance(have, str) else have.keys()) == (want if isinstance(want, str) else want.keys()), f'{name}: {keys}'
        if not isinstance(want, str):
            for f in want: assert have[f] == want[f], f'{name}: {f} differs; {keys}'


@slower
@given(cases(safe=True, ids=[pl.Int64]))
def test_equal_windows_of_shards(case):
    "Files of shards are named after input files and workers; their windows are the same, and for shuffled rows the bytes too"
    df, keys, rng = case
    if keys.get('write_format') == 'csv': keys['write_format'] = 'pt'
    keys['merge_output'] = False
    keys.pop('curriculum_column', None) if rng.random() < .5 else None
    got = each_layout(df, keys, rng, ['shuffled', 'files', 'shuffled files', 'two workers', 'two workers, files'])
    want = got['plain']
    if isinstance(want[1], str):
        assert all(isinstance(o, str) for _, o in got.values())
        return
    assert got['shuffled'][0] == want[0], f'shuffled rows: {keys}'
    for name, (_, out) in got.items():
        assert isinstance(out, Output), f'{name}: {out}'
        for o in (out, want[1]):
            for m in o.metadata.values():
                m.pop('split_paths', None)
        problems = differences(want[1], out)
        assert not problems, '\n'.join([name, str(keys), *problems[:6]])


def test_equal_bytes_under_a_memory_limit(tmp_path):
    "Sorted in memory or on disk, in one process or several: the same"
    rng = np.random.default_rng(0)
    n = 60_000
    ids = rng.permutation(np.repeat(np.arange(600), 100))
    df = pl.DataFrame(dict(sequenceId=ids)).with_columns(itemPosition=pl.int_range(pl.len()).over('sequenceId'), word=pl.Series([f'w{i}' for i in rng.zipf(1.3, n) % 3000]),
                                                         code=pl.Series(rng.integers(-50, 50, n)), amount=pl.Series(rng.normal(size=n)))
    keys = dict(read_format='parquet', split_ratios=[.8, .1, .1], window_length=20, window_stride=10, cardinality_config=dict(word=dict(top_k=100)))
    res = {}
    for name, more in dict(plain={}, limited=dict(memory_limit=2**20), workers=dict(n_cores=2), both=dict(memory_limit=2**20, n_cores=2)).items():
        root = tmp_path/name
        job(root, preprocessing_data_path=str(write(root, df, parts=[7000, 30_000])), **keys, **more)
        res[name] = left(root)
    for name in res: assert res[name] == res['plain'], name


# ---------------------------------------------------------------- ledger, decoding, leakage
@slower
@given(cases(ids=[pl.Int64]))
def test_ledger_and_result(case):
    df, keys, rng = case
    with TemporaryDirectory() as tmp:
        path = write(tmp, df)
        try: res = job(tmp, preprocessing_data_path=str(path), read_format='parquet', **keys)
        except (ValueError, TypeError): return
        got = stored(tmp)
        res.ledger.check()
        entries = res.ledger.to_dict().values()
        assert sum(e['read'] for e in entries) == len(df) == sum(e['kept'] for e in entries), res.ledger
        assert [int(n) for n in res.windows] == [sum(map(len, got.splits['t', k])) for k in range(len(res.windows))] and len(res.splits) == len(res.windows)
        assert all(Path(p).exists() for p in res.splits) and Path(res.metadata_path).exists()


@quick
@given(cases(ids=[pl.Int64]))
def test_every_id_decodes(case):
    "Each stored id leads back to the value in the input; 1 only for values that were not fitted or not kept; 0 only where padding is"
    df, keys, rng = case
    keys['selected_columns'] = [c for c in keys['selected_columns'] if c not in ('t', 'when')]
    rows = {(r['sequenceId'], r['itemPosition']): r for r in df.to_dicts()}
    with TemporaryDirectory() as tmp:
        got = outcome(tmp, preprocessing_data_path=str(write(tmp, df)), read_format='parquet', **keys)
        if isinstance(got, str): return
    meta = got.metadata['t']
    for parts in got.splits.values():
        for part in parts:
            for c, a in part.features.items():
                if c not in meta['id_maps']: continue
                back = {i: v for v, i in meta['id_maps'][c].items()}
                assert len(back) == len(meta['id_maps'][c]) and meta['n_classes'][c] == max(3, max(back)+1)
                for n, (s, first, pad) in enumerate(zip(*(part.coords[k].tolist() for k in ('sequenceId', 'startItemPosition', 'leftPadLength')))):
                    assert not a[n, :pad].any()
                    for j in range(pad, a.shape[1]):
                        value = rows[s, first+j][c]
                        text = str(int(value)) if isinstance(value, (bool, int)) else value
                        i = int(a[n, j])
                        if i == 0: assert text == '[unknown]'
                        elif i == 1: assert text == '[other]' or text not in meta['id_maps'][c]
                        elif back[i].startswith('[hash_bucket:'): assert text not in meta['id_maps'][c]
                        else: assert back[i] == text


@slower
@given(cases(ids=[pl.Int64]))
def test_later_splits_do_not_leak(case):
    "Rows of later splits may hold anything: ids, statistics and the first split's windows stay as they are"
    df, keys, rng = case
    keys.pop('normalize_on_all_data', None)
    keys['selected_columns'] = [c for c in keys['selected_columns'] if c not in ('t', 'when')]
    with TemporaryDirectory() as tmp:
        path = write(tmp, df)
        cfg = dict(keys, preprocessing_data_path=str(path.relative_to(tmp)), read_format='parquet')
        try: plain = oracle.run(cfg, tmp)
        except oracle.Refused: return
    K = len(plain.windows)
    spans = {} # rows of the first split: by sequence
    for w in plain.windows[0]: spans[w['sequenceId']] = w['splitStartItemPosition'], w['splitEndItemPosition']
    first = [s in spans and spans[s][0] <= p < spans[s][1] for s, p in zip(df['sequenceId'].to_list(), df['itemPosition'].to_list())]
    other = {c: pl.Series([rng.choice(list(COLUMNS[c][1])) if c != 'word' else rng.choice(['new', 'a', 'other']) for _ in first], dtype=pl.String if df.schema[c] == pl.Categorical else df.schema[c]).cast(df.schema[c])
             for c in plain.features}
    changed = df.with_columns(pl.when(pl.Series(first)).then(pl.col(c)).otherwise(v).alias(c) for c, v in other.items())
    res = []
    for d in df, changed:
        with TemporaryDirectory() as tmp:
            got = outcome(tmp, preprocessing_data_path=str(write(tmp, d)), read_format='parquet', **keys)
            if isinstance(got, str): return
            res.append(got)
    a, b = (o.metadata['t'] for o in res)
    for k in 'id_maps', 'n_classes', 'selected_columns_statistics': assert a[k] == b[k], k
    for o in res: o.splits, o.own, o.metadata = {('t', 0): o.splits['t', 0]}, {}, {}
    assert not differences(*res)


# ---------------------------------------------------------------- numbers
def rows(n=10, **cols):
    return pl.DataFrame({'sequenceId': pl.Series([0]*n, dtype=pl.Int64), 'itemPosition': pl.Series(range(n), dtype=pl.Int64), **cols})


def right_or_refused(check, df, **keys):
    "A refusal, or a run whose output passes `check`"
    try: got = run(df, **keys)
    except (ValueError, TypeError) as e:
        assert str(e)
        return None
    check(got)
    return got


def only(got, c, split=0): return got.splits['t', split][0].features[c]


EXTREME = [1.7976931348623157e308, -1.7976931348623157e308, 5e-324, -5e-324, 0., -0., 2.2250738585072014e-308, 1e-300, 1e300, 1.]


FORMS = [dict(), dict(merge_output=False), dict(layout='wide'), dict(layout='wide', merge_output=False), dict(write_format='csv'),
         *(dict(write_format=f, merge_output=False) for f in ('pt', 'arrow', 'bin'))]


def features(df, **keys):
    "The windows of split 0, read by the package itself, in the dtypes in which they are stored"
    from fastseqprep.blockfiles import read_block
    with TemporaryDirectory() as tmp:
        res = job(tmp, preprocessing_data_path=str(write(tmp, df)), read_format='parquet', **{**dict(split_ratios=[1.], window_length=len(df), max_target_offset=0, normalize_real_columns=False), **keys})
        return {k: np.array(v) for k, v in read_block(res.splits[0]).features.items()}


@pytest.mark.parametrize('dtypes', [None, 'compact', 'standard'])
@pytest.mark.parametrize('form', FORMS, ids=lambda f: '-'.join(map(str, f.values())) or 'long')
def test_extreme_floats_pass_unaltered(form, dtypes):
    "In every format and layout, whatever is said of dtypes: each number is stored as it was"
    x = features(rows(x=EXTREME), **form, dtypes=dtypes)['x']
    assert x.astype(float).tobytes() == np.array([EXTREME]).tobytes()
    for values in [16777217., *[1.]*9], [0.]*9 + [1e-300], [1.]*9 + [1e300], [.1]*10, [-16777217, *range(9)]:
        real = dict(real_columns=['x']) if isinstance(values[0], int) else {}
        x = features(rows(x=values), **form, **real, dtypes=dtypes)['x']
        assert x.astype(float)[0].tolist() == values, x.dtype


@pytest.mark.parametrize('form', FORMS[2:4] + FORMS[6:], ids=str)
def test_compact_numbers_need_no_more_than_they_are(form):
    "32 bits for what they hold exactly, and for what is standardised"
    def kind(values, **keys): return features(rows(x=values), **form, **{**dict(split_ratios=None, split_method='value_cutoff', split_column='t', split_values=[8], window_length=8), **keys})['x'].dtype
    def of(values, **keys): return features(rows(x=values), **form, **keys)['x'].dtype.name
    assert of([.5, 2.25]*5) == 'float32' and of([.1]*10) == 'float64'
    assert of([.5]*9 + [.1]) == 'float64' # the last row counts as much as the first
    assert of([.1 + i for i in range(10)], normalize_real_columns=True) == 'float32'
    assert of([.5]*9 + [None], nulls=dict(x='mean')) == 'float32' and of([.5, .5, 1.]*3 + [None], nulls=dict(x='mean')) == 'float64' # what fills the gap counts, too
    assert of(list(range(10)), real_columns=['x']) == 'float32' and of([2**24+1, *range(9)], real_columns=['x']) == 'float64'
    late = rows(20, x=[.25*(i % 7) for i in range(19)] + [1e300])
    assert features(late, **form, split_ratios=[.9, .1], normalize_real_columns=True)['x'].dtype == np.float64 # far from what was fitted


@pytest.mark.filterwarnings('error')
@pytest.mark.parametrize('dtype,most', [(pl.Int64, 2**63-1), (pl.UInt64, 2**64-1), (pl.UInt64, 2**63+1), (pl.Int64, 2**53+1), (pl.Int64, -2**63+1)])
@pytest.mark.parametrize('normalize', [True, False])
def test_integers_that_no_float_holds_are_refused_as_numbers(dtype, most, normalize):
    "Also the largest, which become a float beyond all integers; what a float holds passes"
    near = dict({2**63-1: 2**62, 2**64-1: 2**63, 2**63+1: 2**63, 2**53+1: 2**53, -2**63+1: -2**63})[most]
    def df(v): return rows(num=pl.Series([v, *range(9)], dtype=dtype))
    keys = dict(real_columns=['num'], normalize_real_columns=normalize, split_ratios=[1.], window_length=10)
    with pytest.raises(ValueError, match=f"'num' has the value {most} .*which no float holds exactly"): run(df(most), **keys)
    got = only(run(df(near), **keys), 'num')[0]
    assert np.isfinite(got).all() and (normalize or [int(v) for v in got] == [near, *range(9)])


def test_reused_types_do_not_round_integers(tmp_path):
    "A type that was chosen by the rows of an earlier run is chosen anew; one that was declared is kept, and refused where it does not fit"
    keys = dict(read_format='parquet', layout='wide', real_columns=['num'], normalize_real_columns=False, split_ratios=[1.], window_length=10, max_target_offset=0)
    small, large = rows(num=list(range(10))), rows(num=[2**24+1, *range(9)])
    def types(name, df, **more): return [str(t) for t in job(tmp_path, preprocessing_data_path=str(write(tmp_path, df, name=name)), **keys, **more) and json.loads((tmp_path/'configs'/'metadata_configs'/f'{name}.json').read_text())['column_data_types'].values()]
    reuse = dict(metadata_config_path='configs/metadata_configs/a.json')
    assert types('a', small) == ['Float32'] and types('b', large, **reuse) == ['Float64'] and types('c', small, **reuse) == ['Float32']
    assert stored(tmp_path).splits['b', 0][0].features['num'][0].tolist() == [2**24+1, *range(9)]
    with pytest.raises(ValueError, match="16777217 .*which Float32 does not hold exactly"): types('d', large, **reuse, dtypes='standard')


def test_the_manifest_tells_how_to_make_it_again(tmp_path):
    "Seed, versions, inputs and settings; equal runs give equal bytes, and the metadata can be used for other rows"
    import hashlib, platform, pyarrow
    import fastseqprep
    path = write(tmp_path, rows(k=[1, 2]*5, x=[float(i) for i in range(10)]), parts=[3])
    keys = dict(preprocessing_data_path=str(path), read_format='parquet', split_method='within_sequence', split_ratios=[.6, .4], window_length=4, seed=77)
    res = job(tmp_path/'p', **keys)
    files = Path(res.metadata_path), tmp_path/'p/data/t.manifest.json'
    first = [f.read_bytes() for f in files]
    meta, m = map(json.loads, first)
    assert m['facts']['seed'] == 77 and m['facts']['versions'] == dict(fastseqprep=fastseqprep.__version__, python=platform.python_version(), numpy=np.__version__, polars=pl.__version__, pyarrow=pyarrow.__version__)
    assert {o['name']: o['sha256'] for o in m['inputs']} == {n: hashlib.sha256((path/n).read_bytes()).hexdigest() for n in ('p0.parquet', 'sub/p1.parquet')}
    assert m['config']['window_length'] == 4 and 'project_root' not in m['config'] and not {'seed', 'versions', 'inputs', 'settings'} & meta.keys()
    job(tmp_path/'p', **keys)
    assert [f.read_bytes() for f in files] == first
    again = job(tmp_path/'p', **keys, dataset_name='later', metadata_config_path='configs/metadata_configs/t.json')
    assert json.loads(Path(again.metadata_path).read_text())['id_maps'] == meta['id_maps'] and {o.name for o in again.manifest.inputs} == {'p0.parquet', 'sub/p1.parquet', 'configs/t.json'}


@pytest.mark.parametrize('more', [{}, dict(gaps='error'), dict(categorical_columns=['k'], real_columns=None), dict(nulls=dict(x='mean')), dict(duplicates='first')])
def test_a_source_says_the_same_to_a_made_configuration(more, tmp_path):
    "Roles and times of a `DataSource` count for keys as well as for a `PreprocessConfig` of them"
    from fastseqprep.config import PreprocessConfig
    from fastseqprep.preprocess import preprocess
    from fastseqprep.source import DataSource
    df = pl.DataFrame(dict(user=[1]*6 + [2]*4, at=[0, 3, 3, 7, 9, 12, 1, 5, 5, 6], k=[str(i % 3) for i in range(10)], n=range(10), x=[i/4 for i in range(10)]))
    if 'gaps' in more: df = df.with_columns(at=pl.int_range(pl.len()).over('user'))
    source = DataSource(df, cats=['k'], conts=['n', 'x'], entity_col='user', time_col='at', name='s')
    keys = dict(dataset_name='s', split_ratios=[.6, .4], window_length=3, max_target_offset=0, selected_columns=['k', 'n', 'x'], **more)
    got = {}
    for name, config in dict(keys=dict(keys, project_root=str(tmp_path/'keys')), made=PreprocessConfig(**keys, project_root=str(tmp_path/'made'))).items():
        try: preprocess(config, source, progress=False)
        except ValueError as e: got[name] = str(e)
        else: got[name] = left(tmp_path/name)
    assert got['keys'] == got['made']
    if more: return
    meta = json.loads((tmp_path/'made'/'configs'/'metadata_configs'/'s.json').read_text())
    assert set(meta['id_maps']) == {'k'} and set(meta['selected_columns_statistics']) == {'n', 'x'}


def test_a_dry_run_has_no_windows_to_show(tmp_path):
    "Not even those of an earlier run of the same name; the error is that of `Encoder.load`"
    from fastseqprep.encoder import Encoder
    from fastseqprep.preprocess import preprocess
    keys = dict(preprocessing_data_path=str(write(tmp_path, rows(k=[1, 2]*5))), read_format='parquet', split_ratios=[1.], window_length=4, project_root=str(tmp_path/'p'))
    def fails():
        dry = preprocess(keys, dry_run=True, progress=False)
        with pytest.raises(ValueError, match='is not what this run has written: it was a dry run') as a: dry.show_windows()
        return dry, str(a.value)
    fails()
    assert len(preprocess(keys, progress=False).show_windows(n=1))
    dry, said = fails()
    with pytest.raises(ValueError) as b: Encoder.load(dry)
    assert str(b.value) == said


@pytest.mark.parametrize('form', [*FORMS, dict(prediction_aligned_splits=[1], prediction_length=2, target_offset=0), dict(curriculum_column='stage', merge_output=False)], ids=lambda f: '-'.join(map(str, f.values())) or 'long')
@pytest.mark.parametrize('cells', [1, 40, 150])
def test_blocks_of_any_size_hold_the_same_windows(form, cells, tmp_path, monkeypatch):
    "A window at a time, some of a long sequence, or several sequences together: every coordinate, bound and value is that of the run in one block"
    import fastseqprep.preprocess as p
    from fastseqprep.blockfiles import read_block
    rng = random.Random(0)
    lengths = [1, 2, 3, 40, 5, 90, 2]
    df = pl.concat([rows(n, k=[rng.randrange(9) for _ in range(n)], x=[rng.random() for _ in range(n)], stage=[i % 3]*n).with_columns(sequenceId=pl.lit(i, pl.Int64), itemPosition=pl.col('itemPosition')+i*10-20) for i, n in enumerate(lengths)])
    whole, calls = p.windows_within, []
    monkeypatch.setattr(p, 'windows_within', lambda *a: calls.append(a[2]) or whole(*a))
    out = {}
    for name, most in dict(whole=p.BLOCK_CELLS, pieces=cells).items():
        monkeypatch.setattr(p, 'BLOCK_CELLS', most)
        calls.clear()
        res = job(tmp_path/name, preprocessing_data_path=str(write(tmp_path/name, df)), read_format='parquet', selected_columns=['k', 'x'], split_ratios=[.6, .4], window_length=5, window_stride=2, max_target_offset=0, **form)
        assert bool(calls) == (name == 'pieces')
        out[name] = [read_block(f) for f in res.splits], left(tmp_path/name)
    for a, b in zip(out['whole'][0], out['pieces'][0]):
        assert a.n == b.n > 0
        for (n, v), (_, w) in zip(a._arrays(), b._arrays()): assert np.array_equal(v, w), n
    assert out['whole'][1] == out['pieces'][1] # nothing in the files tells in which blocks they were made


def test_a_shard_that_would_be_too_large_is_cut(tmp_path, monkeypatch):
    "By its bytes, whatever `batches_per_file` is; the windows stay the same"
    import fastseqprep.preprocess as p
    from fastseqprep.blockfiles import read_block, split_files
    df = pl.concat([rows(n, k=list(range(n)), x=[float(i) for i in range(n)]).with_columns(sequenceId=pl.lit(i, pl.Int64)) for i, n in enumerate([30, 4, 50])])
    keys = dict(read_format='parquet', split_ratios=[1.], window_length=4, window_stride=1, max_target_offset=0, write_format='pt', merge_output=False)
    whole = job(tmp_path/'a', preprocessing_data_path=str(write(tmp_path/'a', df)), **keys)
    assert p.SHARD_BYTES == 256<<20 and len(split_files(whole.splits[0])) == 1
    monkeypatch.setattr(p, 'SHARD_BYTES', 10*2*4*8 + 7)
    cut = job(tmp_path/'b', preprocessing_data_path=str(write(tmp_path/'b', df)), **keys)
    sizes = [read_block(f).n for f in split_files(cut.splits[0])]
    assert max(sizes) == 10 and sum(sizes) == whole.windows[0] == 75
    a, b = read_block(whole.splits[0]), read_block(cut.splits[0])
    for (n, v), (_, w) in zip(a._arrays(), b._arrays()): assert np.array_equal(v, w), n


@pytest.mark.parametrize('values', [EXTREME, [1e308]*5 + [-1e308]*5, [5e-324]*9 + [1e-323], [1e16, 1e16+2]*5, [1e-200*i for i in range(10)], [3.7]*10])
def test_statistics_of_extreme_floats(values):
    "Mean and deviation as exact sums give them; nothing overflows"
    got = run(rows(x=values), split_ratios=[1.], window_length=10)
    mean, std = oracle.moments(values)
    s = got.metadata['t']['selected_columns_statistics']['x']
    assert s['mean'] == pytest.approx(mean, rel=1e-9, abs=1e-12*max(map(abs, values))) and s['std'] == pytest.approx(std, rel=1e-6)
    a = only(got, 'x')[0]
    assert np.isfinite(a).all()
    exact = [0.]*10 if std == 0 else [float((Fraction(v) - Fraction(mean))/(Fraction(std) + Fraction(1e-9))) for v in values]
    if std == 0 or std > 1e-12*abs(mean): np.testing.assert_allclose(a, exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('dtype', [pl.Float64, pl.Float32])
def test_what_is_not_finite_is_refused(bad, dtype, tmp_path):
    "The message names column and row, counted from 0 or from 1"
    df = rows(40, amount=pl.Series([1.]*33 + [bad] + [1.]*6, dtype=dtype))
    with pytest.raises(ValueError, match='amount') as e: run(df, tmp_path)
    assert re.search(r'\b3[34]\b', str(e.value)), f'the row is not named: {e.value}'
    assert sorted(p.name for p in tmp_path.iterdir()) == ['input']


def test_what_a_cast_makes_infinite_is_refused():
    with pytest.raises(ValueError, match='amount'): run(rows(amount=[1e300]*10), column_data_types=dict(amount='Float32'), normalize_real_columns=False)


@pytest.mark.parametrize('dtype,values', [(pl.Int64, [-2**63, 2**63-1, -1, 0, 2**53+1]), (pl.UInt64, [2**64-1, 2**63, 2**63-1, 2**53+1, 0]), (pl.Int128, [2**62, -2**63, 0, 5, 2**63-1])])
def test_integers_of_any_size_are_categories(dtype, values):
    got = run(rows(k=pl.Series(values*2, dtype=dtype)), split_ratios=[1.], window_length=10)
    assert got.metadata['t']['id_maps']['k'] == {str(v): 3+i for i, v in enumerate(sorted(values))}
    assert only(got, 'k')[0].tolist() == [3 + sorted(values).index(v) for v in values*2]


def test_strings_are_told_apart_and_ordered_by_code_point():
    words = ['', ' ', 'a', 'A', 'é', 'e\u0301', 'ß', 'ss', '日本', '𝒳', '\uffff', '\x00', 'a\x00', 'null', 'nan', '0012', '12', '12.0', '\n', '"', '\\', 'x'*5000]
    got = run(rows(len(words), w=words), split_ratios=[1.], window_length=len(words))
    order = sorted(words)
    assert got.metadata['t']['id_maps']['w'] == {**{w: 3+i for i, w in enumerate(order)}, '[unknown]': 0, '[other]': 1}
    assert only(got, 'w')[0].tolist() == [3 + order.index(w) for w in words]


@pytest.mark.parametrize('text,keys', [('0012 0013 0012 7', ['0012', '0013', '7']), ('1 2 x 3', ['1', '2', '3', 'x']), ('1 2 3 4', ['1', '2', '3', '4']),
                                       ('18446744073709551615 1 2 3', ['1', '18446744073709551615', '2', '3'])])
def test_codes_in_a_csv_stay_what_they_are(text, keys, tmp_path):
    (tmp_path/'t.csv').write_text('sequenceId,itemPosition,k\n' + ''.join(f'0,{i},{v}\n' for i, v in enumerate(text.split())))
    job(tmp_path, preprocessing_data_path=str(tmp_path/'t.csv'), split_ratios=[1.], window_length=4)
    m = stored(tmp_path).metadata['t']['id_maps']['k']
    assert sorted(k for k in m if k not in oracle.RESERVED) == keys


@pytest.mark.parametrize('values,why', [(['99999999999999999999', '1'], 'holds 99999999999999999999, which is no 64-bit integer'), (['-2', '18446744073709551615'], 'holds both -2 and 18446744073709551615, and no one 64-bit type has both')])
def test_what_is_said_of_integers_that_no_type_holds_can_be_done(values, why, tmp_path):
    (tmp_path/'t.csv').write_text('sequenceId,itemPosition,k,x\n' + ''.join(f'0,{i},{v},1\n' for i, v in enumerate(values)))
    keys = dict(split_ratios=[1.], window_length=2)
    with pytest.raises(ValueError) as e: job(tmp_path, preprocessing_data_path=str(tmp_path/'t.csv'), **keys)
    assert why in str(e.value) and 'hand the rows over as a Parquet file in which it is text, or leave it out of selected_columns' in str(e.value)
    job(tmp_path, preprocessing_data_path=str(tmp_path/'t.csv'), **keys, selected_columns=['x'])
    df = rows(2, k=values)
    job(tmp_path, preprocessing_data_path=str(write(tmp_path, df, name='u')), read_format='parquet', **keys)
    assert set(values) <= set(stored(tmp_path).metadata['u']['id_maps']['k'])
    with pytest.raises(ValueError, match=f'{why}; make it text where the data is made, or leave'):
        job(tmp_path, preprocessing_data_path=str(write(tmp_path, rows(2, k=pl.Series([int(v) for v in values], dtype=pl.Int128)), name='v')), read_format='parquet', **keys)


def test_a_file_of_the_other_format_is_named(tmp_path):
    "Before anything is read of it, and without its bytes in the message"
    df = rows(k=[1, 2]*5)
    parquet = write(tmp_path, df, fmt='parquet')
    text = write(tmp_path, df, name='u', fmt='csv')
    keys = dict(split_ratios=[1.], window_length=4)
    for more in {}, dict(selected_columns=['k']), dict(timestamps=dict(k=['hour'])):
        with pytest.raises(ValueError, match=r't\.parquet: is a Parquet file, and is to be read as csv: set read_format: parquet') as e: job(tmp_path, preprocessing_data_path=str(parquet), read_format='csv', **keys, **more)
        assert str(e.value).isprintable()
    with pytest.raises(ValueError, match="u.csv: cannot be read as parquet: it is text that begins with 'sequenceId,itemPosition,k'; if it is a CSV file, set read_format: csv"): job(tmp_path, preprocessing_data_path=str(text), read_format='parquet', **keys)
    (tmp_path/'odd.csv').write_bytes(b'\x00\x01\x1b[31m' + b'y'*5000 + b',x\n1,2\n')
    with pytest.raises(ValueError, match='sequenceId') as e: job(tmp_path, preprocessing_data_path=str(tmp_path/'odd.csv'), selected_columns=['x'], **keys)
    assert str(e.value).isprintable() and len(str(e.value)) < 1000


@pytest.mark.parametrize('fmt', ['parquet', 'csv'])
def test_empty_files_of_a_folder_are_passed_over(fmt, tmp_path):
    "Without a byte, or without a row: the same windows, and the same counts"
    df = rows(k=[1, 2]*5)
    folder = write(tmp_path, df, fmt=fmt, parts=[4])
    keys = dict(read_format=fmt, split_ratios=[1.], window_length=4)
    res = job(tmp_path/'a', preprocessing_data_path=str(folder), **keys)
    for name in f'0.{fmt}', f'sub/zz.{fmt}': (folder/name).write_bytes(b'')
    if fmt == 'csv': (folder/'only-names.csv').write_text('sequenceId,itemPosition,k\n')
    else: df[:0].write_parquet(folder/'only-names.parquet')
    more = job(tmp_path/'b', preprocessing_data_path=str(folder), **keys)
    assert left(tmp_path/'a') == left(tmp_path/'b')
    assert more.ledger.check() and sum(e['read'] for e in more.ledger.to_dict().values()) == 10 == sum(e['kept'] for e in res.ledger.to_dict().values())
    for f in folder.rglob(f'*.{fmt}'): f.write_bytes(b'')
    with pytest.raises(ValueError, match='all files are empty'): job(tmp_path/'c', preprocessing_data_path=str(folder), **keys)


def test_an_integer_that_no_type_holds_is_kept_or_refused(tmp_path):
    (tmp_path/'t.csv').write_text('sequenceId,itemPosition,k\n0,0,99999999999999999999999\n0,1,1\n')
    try: job(tmp_path, preprocessing_data_path=str(tmp_path/'t.csv'), split_ratios=[1.], window_length=4)
    except ValueError as e:
        assert "'k'" in str(e) and '99999999999999999999999' in str(e)
        return
    assert '99999999999999999999999' in stored(tmp_path).metadata['t']['id_maps']['k']


def test_rows_after_the_first_hundred_decide_the_type_too(tmp_path):
    (tmp_path/'t.csv').write_text('sequenceId,itemPosition,k,x\n' + ''.join(f'0,{i},{i % 3},{i % 5}\n' for i in range(150)) + '0,150,1.5,2.5\n')
    job(tmp_path, preprocessing_data_path=str(tmp_path/'t.csv'), split_ratios=[1.], window_length=4)
    meta = stored(tmp_path).metadata['t']
    assert meta['id_maps'] == {} and set(meta['selected_columns_statistics']) == {'k', 'x'}


def test_dates_before_1970_split_and_stay():
    days = [date(1969, 12, 28) + timedelta(days=i) for i in range(10)]
    got = run(rows(d=days, k=[1]*10), split_method='value_cutoff', split_column='d', split_values=[date(1970, 1, 1)], split_ratios=None)
    assert [only(got, 'd', k).ravel().tolist() for k in range(2)] == [[-4, -3, -2, -1], [0, 1, 2, 3, 2, 3, 4, 5]]


@pytest.mark.parametrize('unit', ['ms', 'us', 'ns'])
@pytest.mark.parametrize('zone', [None, 'UTC', 'America/Mexico_City', 'Asia/Kathmandu'])
def test_a_cut_is_an_instant_in_any_unit_and_zone(unit, zone):
    "One tick before the cut is before it; the stored integer is the column's own"
    per = dict(ms=10**3, us=10**6, ns=10**9)[unit]
    ticks = [-per, -1, 0, 1, per]
    s = pl.Series(ticks).cast(pl.Datetime(unit, 'UTC' if zone else None))
    if zone: s = s.dt.convert_time_zone(zone)
    got = run(rows(5, at=s, k=[1]*5), split_method='value_cutoff', split_column='at', split_values=['1970-01-01T00:00:00Z'], split_ratios=None, window_length=3)
    assert [only(got, 'at', k).ravel().tolist() for k in range(2)] == [[0, -per, -1], [0, 1, per]]


def test_nanoseconds_beside_real_numbers_are_exact_or_refused():
    at = pl.Series([1_700_000_000_000_000_001 + i for i in range(10)]).cast(pl.Datetime('ns'))
    keys = dict(split_method='value_cutoff', split_column='at', split_values=['2030-01-01T00:00:00Z'], split_ratios=None, window_length=10)
    want = [1_700_000_000_000_000_001 + i for i in range(10)]
    def exact(got): assert only(got, 'at')[0].astype(object).tolist() == want
    right_or_refused(exact, rows(at=at, x=[float(i) for i in range(10)]), **keys)
    exact(run(rows(at=at, x=[float(i) for i in range(10)]), **keys, write_format='pt', merge_output=False))
    with pytest.raises(ValueError, match='use layout wide, pt, arrow or bin, .*or leave at out'): run(rows(at=at, x=[float(i) for i in range(10)]), **keys)


def test_midnights_in_nanoseconds_fit_the_long_layout():
    "A double holds them exactly, so there is nothing to refuse"
    day = 86_400*10**9
    want = [1_704_067_200*10**9 + i*day for i in range(10)]
    keys = dict(split_method='value_cutoff', split_column='at', split_values=['2030-01-01T00:00:00Z'], split_ratios=None, window_length=10)
    assert only(run(rows(at=pl.Series(want).cast(pl.Datetime('ns')), x=[float(i) for i in range(10)]), **keys), 'at')[0].astype(object).tolist() == want


def test_positions_at_the_ends_of_their_range():
    "Padding and the end of a split must fit beside them, or the run is refused"
    def check(got):
        p = got.splits['t', 0][0].coords
        assert p['startItemPosition'].tolist() == [first-2] and p['splitEndItemPosition'].tolist() == [first+2]
    for first in -2**63, -2**63+1, 2**63-2, 2**63-3:
        df = pl.DataFrame(dict(sequenceId=[1, 1], itemPosition=[first, first+1], k=[1, 2]))
        got = right_or_refused(check, df, split_ratios=[1.])
        assert (got is None) == (first in (-2**63, -2**63+1, 2**63-2)), first


def test_ids_at_the_ends_of_their_range():
    ids = [-2**63, 2**63-1, 0, -1]
    got = run(pl.DataFrame(dict(sequenceId=ids, itemPosition=[0]*4, k=[1, 2, 3, 4])), split_ratios=[1.])
    assert got.splits['t', 0][0].coords['sequenceId'].tolist() == sorted(ids)


def test_unsigned_ids_are_not_folded():
    "2⁶³ and 2⁶⁴-1 are two sequences, in their order, after the small ones"
    ids = [2**64-1, 2**63, 5, 2**63+1]
    got = run(pl.DataFrame(dict(sequenceId=pl.Series(ids, dtype=pl.UInt64), itemPosition=[0]*4, k=ids), schema_overrides=dict(k=pl.UInt64)), split_ratios=[1.])
    assert got.splits['t', 0][0].coords['sequenceId'].tolist() == [0, 1, 2, 3]
    assert only(got, 'k')[:, -1].tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize('ids', [[1., 2., 3., 4.], [2.**53, 2.**53+2, 1., 2.]])
def test_float_ids_are_refused(ids):
    with pytest.raises((ValueError, TypeError), match='sequenceId'): run(pl.DataFrame(dict(sequenceId=ids, itemPosition=[0]*4, k=[1]*4)))


def test_float_positions_that_are_not_whole_are_refused():
    with pytest.raises(ValueError, match='itemPosition'): run(pl.DataFrame(dict(sequenceId=[1]*3, itemPosition=[0., 1.5, 2.], k=[1]*3)))


def test_decimals_enums_and_labels():
    from decimal import Decimal
    df = rows(4, d=pl.Series([Decimal('1.10'), Decimal('2.20'), Decimal('3.30'), Decimal('4.40')], dtype=pl.Decimal(10, 2)),
              e=pl.Series(['x', 'y', 'x', 'z'], dtype=pl.Enum(['z', 'y', 'x', 'unused'])), c=pl.Series(['b', 'a', 'b', 'a'], dtype=pl.Categorical))
    got = run(df, split_ratios=[1.], normalize_real_columns=False)
    assert only(got, 'd')[0].tolist() == [1.1, 2.2, 3.3, 4.4]
    assert only(got, 'e')[0].tolist() == [3, 4, 3, 5] and only(got, 'c')[0].tolist() == [4, 3, 4, 3] # by the label, not by the order in which it was declared


def test_a_label_that_means_mask_is_refused():
    with pytest.raises(ValueError, match='mask'): run(rows(4, w=['a', '[mask]', 'b', 'a']), split_ratios=[1.])


def test_a_million_distinct_strings(tmp_path):
    n = 1_000_000
    df = pl.DataFrame(dict(sequenceId=np.repeat(np.arange(n//100), 100), itemPosition=np.tile(np.arange(100), n//100))).with_columns(w=pl.format('w{}', (pl.int_range(n)*7919) % n))
    job(tmp_path, preprocessing_data_path=str(write(tmp_path, df)), read_format='parquet', split_ratios=[.9, .1], window_length=50, normalize_on_all_data=True, write_format='pt', merge_output=False)
    meta = json.loads((tmp_path/'configs'/'metadata_configs'/'t.json').read_text())
    assert meta['n_classes'] == {'w': n+3}
    ids = meta['id_maps']['w']
    assert len(ids) == n+2 and ids['w0'] == 3 and ids['w999999'] == n+2 and ids['w10'] == 5


def test_inputs_that_lie_among_what_is_replaced(tmp_path, monkeypatch):
    "A run never takes its own inputs away, be they listed by an earlier run or only named as outputs are"
    from fastseqprep.preprocess import preprocess
    monkeypatch.chdir(tmp_path)
    df = pl.DataFrame(dict(sequenceId=[1]*20+[2]*20, itemPosition=[*range(20)]*2, a=[f'x{i%5}' for i in range(40)]))
    keys = dict(project_root='.', read_format='parquet', split_ratios=[.8, .2], window_length=4, window_stride=2, dataset_name='d')
    Path('data').mkdir()
    df.write_parquet('data/d-split0.parquet')
    with pytest.raises(ValueError, match='d-split0.parquet lies where .* would be replaced'): preprocess({**keys, 'preprocessing_data_path': 'data/d-split0.parquet'}, progress=False)
    assert pl.read_parquet('data/d-split0.parquet').equals(df) and not Path('configs').exists()
    Path('data/d-split0.parquet').rename('data/rows.parquet')
    preprocess({**keys, 'preprocessing_data_path': 'data/rows.parquet'}, progress=False)
    with pytest.raises(ValueError, match='d-split1.parquet lies where'): preprocess({**keys, 'preprocessing_data_path': 'data/d-split1.parquet'}, progress=False)
    assert pl.read_parquet('data/rows.parquet').equals(df)
