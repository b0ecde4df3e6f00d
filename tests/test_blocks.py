"""Blocks of windows: every format there and back, bytes that do not depend on how blocks are cut, and the files and metadata of other programs."""
import json, subprocess, sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np, polars as pl, pyarrow as pa, pyarrow.parquet as pq, pytest
from hypothesis import given, settings, strategies as st, HealthCheck

from fastseqprep.blockfiles import BlockWriter, _LongParquet, block_writer, read_block, split_files
from fastseqprep.blocks import *
from fastseqprep.files import StoreError, read_bytes
from fastseqprep.metadata import IdMap, dataset_metadata, split_metadata, write_metadata
from fastseqprep.payload import LayoutSpec, coordinate_names, load_pt_payload

cases = Path(__file__).parent/'cases'/'windows'
names = ['int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64', 'float16', 'float32', 'float64']
polars_name = {n: n.capitalize().replace('Ui', 'UI') for n in names}
all_formats = [('parquet', 'long'), ('csv', 'long'), ('parquet', 'wide'), ('arrow', 'wide'), ('pt', 'wide'), ('bin', 'wide')]
wide_formats = [f for f in all_formats if f[1] == 'wide']


def same(a, b):
    a, b = list(a._arrays()), list(b._arrays())
    assert [(k, v.dtype, v.shape) for k, v in a] == [(k, v.dtype, v.shape) for k, v in b]
    for (k, x), (_, y) in zip(a, b): assert x.tobytes() == y.tobytes(), k


def content(path):
    "All bytes of a file or folder"
    path = Path(path)
    return {p.name: p.read_bytes() for p in ([path] if path.is_file() else sorted(path.iterdir()))}


def write(fmt, layout, path, schema, blocks, **kw):
    with block_writer(fmt, layout, path, schema, **kw) as w:
        for b in blocks: w.write(b)
    return w


@st.composite
def blocks(draw, deep=True, dtypes=names):
    "A valid block of any features, with its schema"
    n, w = draw(st.integers(0, 9)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    def numbers(dtype, shape):
        if not dtype.startswith('f'): return rng.integers(np.iinfo(dtype).min//2**11, np.iinfo(dtype).max//2**11, shape, dtype, endpoint=True)
        return np.where(rng.random(shape) < .1, rng.integers(-3, 3, shape), rng.normal(size=shape)*10.**rng.integers(-4, 4, shape)).astype(dtype)
    pads = rng.integers(0, w+1, n)
    features, masks, specs = {}, {}, {}
    for i in range(draw(st.integers(0, 2)) if deep else 0):
        d = draw(st.integers(1, 3))
        masks[f'l{i}'] = (np.arange(d) < rng.integers(0, d+1, (n, w, 1))) & (np.arange(w) >= pads[:, None])[:, :, None]
        specs[f'l{i}'] = LayoutSpec('p', (f'deep{i}',), d)
        features[f'deep{i}'] = numbers(draw(st.sampled_from(dtypes)), (n, w, d))
    texts = st.sampled_from(['item', 'a,b', 'ü "q"', 'x/../y', '5', 'Zebra', 'apple', ' ', 'sub\\x', '日本'])
    for name in draw(st.lists(texts, min_size=0 if features else 1, max_size=4, unique=True)): features[name] = numbers(draw(st.sampled_from(dtypes)), (n, w))
    start, i64 = rng.integers(-50, 50, n), lambda lo, hi: rng.integers(lo, hi, n)
    cur = {f'stage{i}': i64(-2, 3) for i in range(draw(st.integers(0, 2)))}
    order = draw(st.permutations(sorted(features)))
    block = WindowBlock(np.sort(i64(-2**62, 2**62)), i64(0, 3), start+i64(-3, 3), pads, start, start+i64(1, 9), {k: features[k] for k in order}, masks, cur)
    return block, BlockSchema({k: polars_name[features[k].dtype.name] for k in order}, w, tuple(cur), specs)


def common(schema, fmt):
    try: return unified_dtype(schema.features, fmt)
    except ValueError: return None


@pytest.mark.parametrize('fmt,layout', wide_formats)
@given(blocks(), st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_wide_formats_there_and_back(tmp_path, fmt, layout, made, data):
    block, schema = made
    if fmt in ('parquet', 'arrow'): assert '5' not in coordinate_columns.values()
    cut = [0, *sorted(data.draw(st.lists(st.integers(0, block.n), max_size=3))), block.n]
    a, b = tmp_path/f'a.{fmt}', tmp_path/f'b.{fmt}'
    w = write(fmt, layout, a, schema, [block])
    write(fmt, layout, b, schema, [block[i:j] for i, j in zip(cut, cut[1:])])
    assert list(content(a).values()) == list(content(b).values())
    for mmap in (True, False): same(read_block(a, mmap=mmap), block)
    assert w.n == block.n == sum(w.entry()['left_pad_length_histogram'].values()) == sum(w.entry()['target_valid_from_histogram'].values())


@pytest.mark.parametrize('fmt', ['parquet', 'csv'])
@given(blocks(deep=False), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_long_formats_there_and_back(tmp_path, fmt, made, data):
    block, schema = made
    a, b = tmp_path/f'a.{fmt}', tmp_path/f'b.{fmt}'
    dtype = common(schema, fmt)
    if dtype is None:
        with pytest.raises(ValueError, match='no common dtype'): write(fmt, 'long', a, schema, [block])
        return
    cut = [0, *sorted(data.draw(st.lists(st.integers(0, block.n), max_size=3))), block.n]
    write(fmt, 'long', a, schema, [block])
    write(fmt, 'long', b, schema, [block[i:j] for i, j in zip(cut, cut[1:])])
    assert a.read_bytes() == b.read_bytes()
    same(read_block(a, schema.features), block)
    frame = (pl.read_parquet if fmt == 'parquet' else lambda p: pl.read_csv(p, infer_schema_length=None, schema_overrides=dict(inputCol=pl.String)))(a)
    rows = [[*(getattr(block, c)[i] for c in coordinate_names), *(v[i] for v in block.sample_positions.values()), name, *v[i].tolist()] for i in range(block.n) for name, v in block.features.items()]
    assert frame.columns == [*coordinate_columns.values(), *(curriculum_prefix+k for k in block.sample_positions), 'inputCol', *(str(i) for i in reversed(range(block.width)))]
    assert frame.rows() == [tuple(r) for r in rows]
    if fmt == 'parquet':
        assert frame.schema == {**dict.fromkeys(frame.columns, getattr(pl, dtype)), **dict.fromkeys(frame.columns[:6+len(block.sample_positions)], pl.Int64), 'inputCol': pl.String}


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_csv_floats_come_back_exactly(tmp_path, values):
    v = np.array(values).reshape(-1, 1)
    z = np.zeros(len(v), np.int64)
    block = WindowBlock(z, z, z, z, z, z+1, dict(x=v, id=np.full((len(v), 1), 4)))
    write('csv', None, tmp_path/'x.csv', BlockSchema.of(block), [block])
    same(read_block(tmp_path/'x.csv', dict(id='Int64')), block)
    assert ',id,4.0\n' in (tmp_path/'x.csv').read_text()


@pytest.mark.parametrize('fmt,layout', all_formats)
def test_many_row_groups(tmp_path, monkeypatch, fmt, layout):
    "Groups of windows end where the schema says, whatever the blocks"
    rng = np.random.default_rng(0)
    n, w = 1000, 5
    z = np.arange(n)
    block = WindowBlock(z, z*0, z, z%5, z-2, z+9, dict(a=rng.integers(0, 9, (n, w)), b=rng.normal(size=(n, w)).astype(np.float32)), {}, dict(stage=rng.integers(0, 3, n)))
    schema = BlockSchema.of(block)
    monkeypatch.setattr(BlockWriter, 'group_size', lambda self: 128)
    monkeypatch.setattr(_LongParquet, 'group_size', lambda self: 128)
    files = []
    for step in (1000, 999, 128, 100, 7):
        path = tmp_path/f'{step}.{fmt}'
        write(fmt, layout, path, schema, [block[i:i+step] for i in range(0, n, step)])
        files.append(list(content(path).values()))
        same(read_block(path, schema.features), block)
    assert all(f == files[0] for f in files)
    if fmt == 'parquet':
        groups = pq.ParquetFile(path).metadata
        assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [r*(2 if layout == 'long' else 1) for r in [128]*7+[104]]


def test_row_groups_are_bounded():
    for w, k in ((1, 1), (6, 5), (65, 5), (1000, 3), (100_000, 2)):
        schema = BlockSchema({f'f{i}': 'Int64' for i in range(k)}, w)
        long = object.__new__(_LongParquet)
        long.schema = schema
        assert 1 <= long.group_size()*k <= max(k, 262_144) and (long.group_size() == 1 or long.group_size()*k*w*8 <= 32 << 20)


def test_curriculum_order_of_shards(tmp_path):
    rng = np.random.default_rng(1)
    n = 60
    block = WindowBlock(np.repeat(np.arange(20), 3), np.tile(np.arange(3), 20), *[np.zeros(n, int)]*3, np.ones(n, int), dict(z=rng.integers(3, 9, (n, 2)), Ab=rng.normal(size=(n, 2)), b=rng.integers(3, 9, (n, 2))),
                        {}, dict(second=rng.integers(0, 3, n), first=rng.integers(-1, 2, n)))
    schema = BlockSchema.of(block)
    expected = sorted(range(n), key=lambda i: (block.sample_positions['second'][i], block.sample_positions['first'][i], block.sequence_ids[i], block.subsequence_ids[i]))
    for fmt, layout in all_formats:
        for step in (60, 7):
            path = tmp_path/f'{step}.{fmt}'
            write(fmt, layout, path, schema, [block[i:i+step] for i in range(0, n, step)], by_curriculum=True)
            got = read_block(path, schema.features)
            assert list(got.features) == (['Ab', 'b', 'z'] if layout == 'long' else ['z', 'Ab', 'b'])
            same(got, WindowBlock(*(getattr(block[expected], c) for c in coordinate_names), {k: block[expected].features[k] for k in got.features}, {}, block[expected].sample_positions))
        assert list(content(tmp_path/f'60.{fmt}').values()) == list(content(tmp_path/f'7.{fmt}').values())


@pytest.mark.parametrize('fmt,layout', all_formats)
def test_a_failed_run_leaves_what_was_there(tmp_path, fmt, layout):
    z = np.zeros(3, int)
    block = WindowBlock(z, z, z, z, z, z+1, dict(a=np.arange(6).reshape(3, 2)))
    schema = BlockSchema.of(block)
    path = tmp_path/f'x.{fmt}'
    write(fmt, layout, path, schema, [block])
    before = content(path)
    with pytest.raises(RuntimeError):
        with block_writer(fmt, layout, path, schema) as w:
            w.write(block[:2])
            raise RuntimeError
    with pytest.raises(ValueError, match='expected'):
        with block_writer(fmt, layout, path, schema) as w: w.write(block.map(lambda v: v[:, :1] if v.ndim > 1 else v))
    assert content(path) == before and [p.name for p in tmp_path.iterdir()] == [f'x.{fmt}']


def test_a_half_written_folder_is_not_read(tmp_path, monkeypatch):
    "Killed between the first and the last column, over an older folder: no windows rather than mixed ones"
    z = np.zeros(3, int)
    block = WindowBlock(z, z, z, z, z, z+1, dict(a=np.arange(6).reshape(3, 2)))
    write('bin', None, tmp_path/'x.bin', BlockSchema.of(block), [block])
    from fastseqprep import blockfiles
    monkeypatch.setattr(blockfiles, 'write_json', lambda *a: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt): write('bin', None, tmp_path/'x.bin', BlockSchema.of(block), [block])
    with pytest.raises(StoreError): read_block(tmp_path/'x.bin')


@pytest.mark.parametrize('fmt,layout', all_formats)
def test_remote_files(fmt, layout):
    z = np.arange(3)
    block = WindowBlock(z, z, z, z, z, z+1, dict(a=np.arange(6).reshape(3, 2), b=np.ones((3, 2))))
    path = f'memory://blocks/{layout}/x.{fmt}'
    write(fmt, layout, path, BlockSchema.of(block), [block])
    same(read_block(path, BlockSchema.of(block).features), block)


def test_more_columns_than_files_can_be_open(tmp_path):
    resource = pytest.importorskip('resource')
    z = np.zeros(2, int)
    block = WindowBlock(z, z, z, z, z, z+1, {f'f{i}': np.full((2, 2), i) for i in range(200)})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(150, limits[0]), limits[1]))
    try: write('bin', None, tmp_path/'x.bin', BlockSchema.of(block), [block[:1], block[1:]])
    finally: resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    same(read_block(tmp_path/'x.bin'), block)


def test_names_that_the_wide_layout_needs(tmp_path):
    z = np.zeros(1, int)
    for name in ('sequenceId', 'leftPadLength', curriculum_prefix+'x', mask_prefix+'x'):
        block = WindowBlock(z, z, z, z, z, z+1, {name: np.zeros((1, 2), int)})
        for fmt in ('parquet', 'arrow'):
            with pytest.raises(ValueError, match='uses itself'): block_writer(fmt, 'wide', tmp_path/'x', BlockSchema.of(block))
        for fmt in ('pt', 'bin', 'csv'):
            write(fmt, None, tmp_path/f'x.{fmt}', BlockSchema.of(block), [block])
            same(read_block(tmp_path/f'x.{fmt}'), block)
    with pytest.raises(ValueError, match='no place in the long layout'):
        block_writer('parquet', 'long', tmp_path/'x', BlockSchema(dict(a='Int64'), 2, layouts=dict(l=LayoutSpec('p', ('a',), 2))))
    assert sorted(p.name for p in tmp_path.iterdir()) == ['x.bin', 'x.csv', 'x.pt']


# ---- dtypes

ranges = {polars_name[n]: (int(np.iinfo(n).min), int(np.iinfo(n).max)) for n in names if 'int' in n}


@given(st.lists(st.sampled_from(list(polars_name.values())+['Date', "Datetime(time_unit='ns', time_zone='UTC')"]), min_size=1, max_size=6))
def test_unified_dtype_is_the_smallest_that_covers(dtypes):
    own = ['Int64' if d.startswith('Date') else d for d in dtypes]
    floats, ints = [d for d in own if d in ('Float16', 'Float32', 'Float64')], [d for d in own if d in ranges]
    exact = dict(Float16=2**11, Float32=2**24, Float64=2**65)
    if floats:
        def fits(t): return int(t[5:]) >= max(int(f[5:]) for f in floats) and all(max(-lo, hi) <= exact[t] for lo, hi in (ranges[i] for i in ints))
        assert unified_dtype(dtypes) == next(t for t in exact if fits(t)) and unified_dtype(dtypes, 'csv') == 'Float64'
        return
    lo, hi = min(ranges[i][0] for i in ints), max(ranges[i][1] for i in ints)
    order = ['UInt8', 'UInt16', 'UInt32', 'UInt64'] if all(i.startswith('U') for i in ints) else ['Int8', 'Int16', 'Int32', 'Int64']
    right = next((t for t in order if ranges[t][0] <= lo and hi <= ranges[t][1]), None)
    for fmt in ('parquet', 'csv'):
        if right: assert unified_dtype(dtypes, fmt) == right
        else:
            with pytest.raises(ValueError, match='no common dtype'): unified_dtype(dtypes, fmt)


@given(st.integers(1, 2**40))
def test_compact_dtypes_fit(n):
    t = compact_dtypes(dict(a='Int64'), dict(a=n))['a']
    smaller = [u for u in ranges if np.dtype(u.lower()).itemsize < np.dtype(t.lower()).itemsize]
    assert ranges[t][1] >= n-1 and all(ranges[u][1] < n-1 for u in smaller)


def exact_in(x, target):
    "Whether a float has an integer, by its size and the digits it needs"
    digits, largest = dict(float16=(11, 65504), float32=(24, 2**128), float64=(53, 2**1024))[target]
    x = abs(x)
    return not x or x <= largest and (x >> ((x & -x).bit_length()-1)).bit_length() <= digits


@pytest.mark.filterwarnings('error')
@given(st.sampled_from(['int64', 'uint64', 'int32', 'uint32', 'int16', 'uint16']), st.sampled_from(['float16', 'float32', 'float64']), st.data())
def test_altered_numbers(source, target, data):
    "Against Python's exact numbers, also where a float is beyond all integers of its source"
    lo, hi = ranges[polars_name[source]]
    ends = st.sampled_from([v for k in range(65) for d in (-1025, -513, -1, 0, 1, 513) for v in (2**k+d, -2**k-d) if lo <= v <= hi])
    v = np.array(data.draw(st.lists(st.integers(lo, hi) | ends, max_size=6)), source)
    assert altered(v, target).tolist() == [not exact_in(int(x), target) for x in v]


@pytest.mark.filterwarnings('error')
@given(st.lists(st.floats(), max_size=6), st.sampled_from(['float16', 'float32']))
def test_altered_floats(values, target):
    v = np.array(values, float)
    with np.errstate(all='ignore'): want = [bool(np.isfinite(x)) and float(np.dtype(target).type(x)) != x for x in v]
    assert altered(v, target).tolist() == want


@given(st.sampled_from([n for n in names]), st.sampled_from(names), st.data())
@settings(max_examples=300, deadline=None)
def test_strict_cast_keeps_or_refuses(source, target, data):
    "Against Python's exact numbers"
    if source[0] == 'f': one = st.floats(allow_nan=False, width=int(source[5:]))
    else: one = st.integers(*ranges[polars_name[source]])
    v = np.array(data.draw(st.lists(one, max_size=4)), source)
    if source == target: allowed = True
    elif source[0] == 'f':
        with np.errstate(over='ignore'): allowed = target[0] == 'f' and all(np.isfinite(np.array(float(x)).astype(target)) or not np.isfinite(x) for x in v)
    elif target[0] == 'f': allowed = all(exact_in(int(x), target) for x in v)
    else: allowed = all(ranges[polars_name[target]][0] <= int(x) <= ranges[polars_name[target]][1] for x in v)
    if not allowed:
        with pytest.raises(ValueError, match='the column'): strict_cast(v, target, 'the column')
        return
    got = strict_cast(v, target, 'the column')
    assert got.dtype == target
    if source[0] != 'f': assert [int(x) for x in got] == [int(x) for x in v]


def test_a_timestamp_is_not_rounded_in_the_long_layout(tmp_path):
    z = np.zeros(1, int)
    block = WindowBlock(z, z, z, z, z, z+1, dict(when=np.array([[1_700_000_000_000_000_001]]), x=np.array([[.5]])))
    with pytest.raises(ValueError, match="'when' in the long layout.*not exact"): write('parquet', 'long', tmp_path/'x.parquet', BlockSchema.of(block), [block])
    write('parquet', 'wide', tmp_path/'x.parquet', BlockSchema.of(block), [block])
    same(read_block(tmp_path/'x.parquet'), block)


def test_times_that_a_float_holds_are_written_long(tmp_path):
    "Midnight in nanoseconds needs few digits; what does not fit is told with a way out that exists"
    z, midnight = np.zeros(1, int), 1_704_067_200_000_000_000
    def block(t): return WindowBlock(z, z, z, z, z, z+1, dict(t=np.array([[t]]), x=np.array([[.5]])))
    write('parquet', 'long', tmp_path/'x.parquet', BlockSchema.of(block(midnight)), [block(midnight)])
    assert [int(o) for o in pl.read_parquet(tmp_path/'x.parquet').filter(inputCol='t')['0']] == [midnight]
    for t in (midnight+1, -2**63+1, 2**63-1):
        with pytest.raises(ValueError, match=rf"feature 't' in the long layout.*: {t} is not exact in float64; use layout wide, pt, arrow or bin, .*or leave t out$"): write('parquet', 'long', tmp_path/'x.parquet', BlockSchema.of(block(t)), [block(t)])


@given(st.sets(st.sampled_from('ab')))
def test_real_columns_are_halved_only_where_it_is_said(single):
    t = compact_dtypes(dict(a='Float64', b='Float64', c='Float32', d='Float16'), {}, single=single)
    assert t == dict(a='Float32' if 'a' in single else 'Float64', b='Float32' if 'b' in single else 'Float64', c='Float32', d='Float16')


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5) | st.just(',\n    '), lambda o: st.lists(o, max_size=4) | st.dictionaries(st.text(max_size=4), o, max_size=4), max_leaves=15)


json_keys = st.text(max_size=4) | st.integers() | st.booleans() | st.none() | st.floats(allow_nan=False, allow_infinity=False)
id_maps = st.dictionaries(st.text(max_size=4), st.integers(), max_size=4).map(IdMap)


@given(st.dictionaries(json_keys, json_values | id_maps, max_size=4), st.sampled_from([None, 1, 4]))
@settings(deadline=None)
def test_metadata_is_laid_out_as_json_does_it(meta, indent):
    with TemporaryDirectory() as tmp:
        write_metadata(Path(tmp)/'m.json', meta, indent=indent)
        assert (Path(tmp)/'m.json').read_text(encoding='utf-8') == json.dumps(meta, indent=indent, default=dict)


def test_a_wider_common_dtype(tmp_path):
    "Reused metadata may name columns that are wider than those that are written"
    z = np.zeros(1, int)
    block = WindowBlock(z, z, z, z, z, z+1, dict(a=np.array([[3, 4]], np.int8)))
    for name in ('Int64', 'Float64', 'Float32'):
        write('parquet', 'long', tmp_path/'x.parquet', BlockSchema(dict(a='Int8'), 2, common_dtype=name), [block])
        assert str(pl.read_parquet(tmp_path/'x.parquet').schema['0']) == name
    with pytest.raises(ValueError, match='not a dtype'): BlockSchema(dict(a='Int8'), 2, common_dtype='Text')


def test_imports_stay_light():
    code = "import sys, fastseqprep.blockfiles, fastseqprep.metadata; sys.exit(bool({'torch', 'pandas', 'polars', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


# ---- files of other programs

def declared(path):
    "Metadata that belongs to a recorded file"
    part = next(p for p in path.relative_to(cases).parts[1:] if '-split' in p)
    name, index = part.split('.')[0].rsplit('-split', 1)
    return json.loads((cases/path.relative_to(cases).parts[0]/f'configs/metadata_configs/{name}.json').read_text()), int(index)


@pytest.mark.parametrize('path', sorted(p for p in cases.rglob('*') if p.suffix in ('.parquet', '.csv', '.pt')), ids=lambda p: f'{p.relative_to(cases).parts[0]}-{p.name}')
def test_recorded_files_are_written_alike(tmp_path, path):
    meta, index = declared(path)
    block = read_block(path)
    dtypes = {c: meta['column_data_types'][c] for c in block.features or meta['column_data_types']}
    schema = BlockSchema(dtypes, meta['window_lengths'][index], tuple(block.sample_positions), meta['depth_layouts'])
    block = read_block(path, dtypes) if block.features else empty_block(schema)
    out = tmp_path/path.name
    w = write(path.suffix[1:], None, out, schema, [block[i:i+3] for i in range(0, block.n, 3)])
    if path.suffix == '.csv': assert out.read_bytes() == path.read_bytes()
    elif path.suffix == '.parquet':
        a, b = pl.read_parquet(path), pl.read_parquet(out)
        assert a.schema == b.schema and a.equals(b)
    else:
        torch = pytest.importorskip('torch')
        flat = lambda d: [kv for k, v in d.items() for kv in (flat(v) if isinstance(v, dict) else [(k, v)])]
        a, b = flat(torch.load(path, weights_only=True)), flat(torch.load(out, weights_only=True))
        assert [k for k, _ in a] == [k for k, _ in b]
        for (_, x), (_, y) in zip(a, b): assert (x.dtype == y.dtype and torch.equal(x, y)) if isinstance(x, torch.Tensor) else x == y
    listed = path.parent/'metadata.json'
    if listed.exists(): assert w.entry() in json.loads(listed.read_text())['batch_files']


@pytest.mark.parametrize('path', sorted(cases.glob('*/configs/metadata_configs/*.json')), ids=lambda p: p.parts[-4])
def test_recorded_metadata_is_written_alike(tmp_path, path):
    meta = json.loads(path.read_text())
    known = ('special_token_ids', 'tensor_payload_version', 'window_length', 'stored_window_layout_version')
    write_metadata(tmp_path/'m.json', dataset_metadata(**{k: v for k, v in meta.items() if k not in known}))
    assert (tmp_path/'m.json').read_bytes() == path.read_bytes()
    for folder in path.parents[2].glob('data/*-split*/metadata.json'):
        split = json.loads(folder.read_text())
        write_metadata(tmp_path/'s.json', split_metadata(meta, split['split_index'], split['batch_files'][::-1], split.get('curriculum_column')), indent=4)
        assert (tmp_path/'s.json').read_bytes() == folder.read_bytes()


def test_a_folder_of_shards_is_one(tmp_path):
    folder = cases/'61-sharded-parquet-two-workers/data/d-split0'
    parts = [read_block(f) for f in split_files(folder)]
    assert len(parts) == 3
    same(read_block(folder), WindowBlock.concat(parts))
    with pytest.raises(FileNotFoundError): split_files(tmp_path/'none')


def test_rows_in_another_order_are_understood(tmp_path):
    "Feature after feature instead of window after window, as an export may sort them"
    path = cases/'01-within-basic/data/d-split0.parquet'
    frame = pl.read_parquet(path)
    frame.sort('inputCol', maintain_order=True).write_parquet(tmp_path/'x.parquet')
    a, b = read_block(path), read_block(tmp_path/'x.parquet')
    b.features = {k: b.features[k] for k in a.features}
    same(a, b)
    frame[:-1].write_parquet(tmp_path/'x.parquet')
    with pytest.raises(StoreError, match='expected equally many'): read_block(tmp_path/'x.parquet')
    frame.drop('splitEndItemPosition').write_parquet(tmp_path/'x.parquet')
    with pytest.raises(StoreError, match='splitEndItemPosition'): read_block(tmp_path/'x.parquet')
    frame.drop('3').write_parquet(tmp_path/'x.parquet')
    with pytest.raises(StoreError, match='position columns'): read_block(tmp_path/'x.parquet')
    frame.with_columns(startItemPosition=pl.int_range(pl.len())).write_parquet(tmp_path/'x.parquet')
    with pytest.raises(StoreError, match='parallel'): read_block(tmp_path/'x.parquet')


def test_wide_files_of_polars_open(tmp_path):
    z = np.arange(4)
    block = WindowBlock(z, z, z, z, z, z+1, dict(a=np.arange(12, dtype=np.int16).reshape(4, 3), x=np.arange(24, dtype=np.float32).reshape(4, 3, 2)), dict(l=np.arange(24).reshape(4, 3, 2) % 2 > 0))
    frame = pl.from_arrow(wide_table(block))
    assert frame.schema['a'] == pl.Array(pl.Int16, 3) and frame.schema['x'] == pl.Array(pl.Float32, (3, 2))
    frame.write_parquet(tmp_path/'x.parquet')
    same(read_block(tmp_path/'x.parquet'), block)
    frame[1:3].write_ipc(tmp_path/'x.arrow')
    same(read_block(tmp_path/'x.arrow'), block[1:3])


def test_unknown_files(tmp_path):
    (tmp_path/'x.txt').write_text('x')
    with pytest.raises(StoreError, match='known by its ending'): read_block(tmp_path/'x.txt')
    (tmp_path/'x.csv').write_text((cases/'64-csv-output-int/data/d-split0.csv').read_text().replace(',9,', ',nine,'))
    with pytest.raises(StoreError, match='no numbers'): read_block(tmp_path/'x.csv')
