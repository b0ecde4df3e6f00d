"""Payloads: every recorded verdict, both readers against torch, and random batches there and back."""
import io, json
from pathlib import Path

import numpy as np, pytest
from hypothesis import given, settings, strategies as st, HealthCheck

from fastseqprep.payload import LayoutSpec, StoredTensorBatch, concatenate_pt_batches, coordinate_names, layout_registry, load_pt_payload, read_pt_payload, save_pt_payload
from fastseqprep.ptfile import write_pt

torch = pytest.importorskip('torch')
cases = Path(__file__).parent/'cases'
recorded = sorted((cases/'payload').glob('*.json'))


def recorded_batch(path):
    "A recorded example: the batch and what is known of it"
    d, z = json.loads(path.read_text()), dict(np.load(path.with_suffix('.npz')))
    under = lambda prefix: {k.removeprefix(prefix): v for k, v in z.items() if k.startswith(prefix)}
    return StoredTensorBatch(under('sequences/'), *(z[c] for c in coordinate_names), under('depth_valid_masks/'), z.get('sample_positions'), tuple(d['curriculum_columns'])), d


def as_payload(b):
    "The dict in a file, written out by hand"
    return dict(format='sequifier_tensor_batch', version=5, sequences=b.sequences, metadata=dict(depth_valid_masks=b.depth_valid_masks, sample_positions=b.sample_positions, curriculum_columns=list(b.curriculum_columns)),
                **{c: getattr(b, c) for c in coordinate_names})


def tensors(x):
    if isinstance(x, np.ndarray): return torch.from_numpy(x.copy())
    return {k: tensors(v) for k, v in x.items()} if isinstance(x, dict) else x


def same(a, b):
    a, b = as_payload(a.numpy()), as_payload(b.numpy())
    def check(x, y):
        assert type(x) is type(y)
        if isinstance(x, dict):
            assert list(x) == list(y)
            for k in x: check(x[k], y[k])
        elif isinstance(x, np.ndarray): assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        else: assert x == y
    check(a, b)


def test_there_are_cases(): assert len(recorded) == 25


@pytest.mark.parametrize('path', recorded, ids=lambda p: p.stem)
@pytest.mark.parametrize('kind', ['arrays', 'tensors', 'saved', 'saved by torch'])
def test_recorded_verdicts(tmp_path, path, kind):
    b, d = recorded_batch(path)
    args = dict(layouts=d['layouts'], n_classes=d['n_classes'])
    file = tmp_path/'x.pt'
    def attempt():
        if kind == 'arrays': return b.validate(args['layouts'], n_classes=args['n_classes'])
        if kind == 'tensors': return b.tensors().validate(args['layouts'], n_classes=args['n_classes'])
        if kind == 'saved':
            save_pt_payload(b, file, **args)
            return load_pt_payload(file, **args)
        torch.save(tensors(as_payload(b)), file)
        try: read = read_pt_payload(file, mmap=True, values=True, **args)
        except ValueError:
            with pytest.raises(ValueError): load_pt_payload(file, **args)
            raise
        same(read, load_pt_payload(file, **args))
        return read
    if d['verdict'] == 'ok': same(attempt(), b)
    else:
        with pytest.raises(ValueError): attempt()
        assert kind != 'saved' or not file.exists()


@pytest.mark.parametrize('path', sorted((cases/'windows').glob('*/data/*/*.pt')), ids=lambda p: p.stem)
def test_files_of_other_programs(tmp_path, path):
    name = path.parent.name.split('-split')[0]
    meta = json.loads((path.parents[2]/f'configs/metadata_configs/{name}.json').read_text())
    args = dict(layouts=meta['depth_layouts'], n_classes=meta['n_classes'])
    a, b = load_pt_payload(path, **args), read_pt_payload(path, values=True, **args)
    same(a, b)
    save_pt_payload(b, tmp_path/'x.pt', **args)
    same(load_pt_payload(tmp_path/'x.pt', mmap=True, **args), a)
    x, y = torch.load(path, weights_only=True), torch.load(tmp_path/'x.pt', weights_only=True)
    assert list(x) == list(y) and list(x['sequences']) == list(y['sequences']) and x['metadata']['curriculum_columns'] == y['metadata']['curriculum_columns']


@st.composite
def batches(draw, layouts=st.booleans()):
    "A valid batch with any dtypes, and its layouts"
    n, w = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    pads = rng.integers(0, w+1, n)
    real = np.arange(w) >= pads[:, None]
    specs, masks, features = {}, {}, {}
    numbers = lambda dtype, shape: (rng.normal(size=shape)*9).astype(dtype) if dtype.startswith('f') else rng.integers(0, 100, shape).astype(dtype)
    for i in range(draw(st.integers(0, 2))):
        d, gaps = draw(st.integers(1, 4)), draw(st.booleans())
        mask = rng.random((n, w, d)) < .5 if gaps else np.arange(d) < rng.integers(0, d+1, (n, w, 1))
        masks[f'l{i}'] = mask & real[:, :, None]
        specs[f'l{i}'] = LayoutSpec(f'p{i}', (f'deep{i}',), d, allow_gaps=gaps)
        features[f'deep{i}'] = numbers(draw(st.sampled_from(['int64', 'float32', 'uint8'])), (n, w, d))
    for i in range(draw(st.integers(0 if features else 1, 4))): features[f'c{i}'] = numbers(draw(st.sampled_from(['int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64', 'float16', 'float32', 'float64'])), (n, w))
    order = draw(st.permutations(sorted(features)))
    c = draw(st.integers(0, 2))
    positions = None if not c else rng.integers(-9, 9, n if c == 1 and draw(st.booleans()) else (n, c))
    i64 = lambda lo, hi: rng.integers(lo, hi, n)
    start = i64(-100, 100)
    return StoredTensorBatch({k: features[k] for k in order}, i64(-2**63, 2**63-1), i64(0, 9), i64(-9, 9), pads, start, start+i64(1, 9), masks, positions, tuple(f'u{i}' for i in range(c))), specs


@given(batches())
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_batch_comes_back(tmp_path, made):
    b, specs = made
    file = tmp_path/'x.pt'
    save_pt_payload(b, file, layouts=specs)
    first = file.read_bytes()
    for layouts in (specs, {k: s.to_dict() for k, s in specs.items()}, None):
        same(load_pt_payload(file, layouts=layouts), b)
        same(read_pt_payload(file, layouts=layouts, mmap=False), b)
    same(read_pt_payload(file), b)
    save_pt_payload(b.tensors(), file, layouts=specs)
    assert file.read_bytes() == first


@given(batches(), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_joining_undoes_cutting(made, data):
    b, specs = made
    cut = sorted(data.draw(st.lists(st.integers(0, len(b)), max_size=3)))
    part = lambda i, j: StoredTensorBatch({k: v[i:j] for k, v in b.sequences.items()}, *(getattr(b, c)[i:j] for c in coordinate_names), {k: v[i:j] for k, v in b.depth_valid_masks.items()},
                                          None if b.sample_positions is None else b.sample_positions[i:j], b.curriculum_columns)
    pieces = [part(i, j) for i, j in zip([0, *cut], [*cut, len(b)])]
    same(concatenate_pt_batches(pieces), b)
    same(concatenate_pt_batches([p.tensors() for p in pieces]), b)
    same(concatenate_pt_batches([pieces[0].tensors(), *pieces[1:]]), b)


@given(batches(), st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_one_wrong_value_is_found(made, data):
    "Each kind of fault, put into a valid batch"
    b, specs = made
    n, w = len(b), next(iter(b.sequences.values())).shape[1]
    kind = data.draw(st.sampled_from(['nan', 'id', 'pad', 'bounds', 'mask on padding', 'gap', 'coordinate', 'length', 'mask dtype', 'no layout', 'names']))
    n_classes = None
    if kind in ('nan', 'id', 'pad', 'bounds') and not n: return
    row = data.draw(st.integers(0, max(n-1, 0)))
    if kind == 'nan':
        floats = [k for k, v in b.sequences.items() if v.dtype.kind == 'f']
        if not floats: return
        v = b.sequences[data.draw(st.sampled_from(floats))]
        v.reshape(n, -1)[row, -1] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    elif kind == 'id':
        ints = [k for k, v in b.sequences.items() if v.dtype.kind != 'f']
        if not ints: return
        k = data.draw(st.sampled_from(ints))
        n_classes = {k: int(b.sequences[k].max())}
    elif kind == 'pad': b.left_pad_lengths[row] = data.draw(st.sampled_from([-1, w+1]))
    elif kind == 'bounds': b.split_end_item_positions[row] = b.split_start_item_positions[row]
    elif kind == 'coordinate': b.sequence_ids = b.sequence_ids.astype(data.draw(st.sampled_from(['int32', 'uint64', 'float64'])))
    elif kind == 'length': b.subsequence_ids = np.append(b.subsequence_ids, 0)
    elif kind == 'names': b.curriculum_columns = (*b.curriculum_columns, 'one more')
    elif kind == 'no layout':
        if not specs: return
        specs = {}
    else:
        if not specs: return
        name = data.draw(st.sampled_from(sorted(specs)))
        m = b.depth_valid_masks[name]
        if kind == 'mask dtype': b.depth_valid_masks[name] = m.astype(np.int8)
        elif kind == 'mask on padding':
            if not n or not b.left_pad_lengths[row]: return
            m[row, 0, 0] = True
        else:
            if not n or m.shape[2] < 2 or specs[name].allow_gaps or b.left_pad_lengths[row] == w: return
            m[row, -1, 0], m[row, -1, 1] = False, True
    with pytest.raises(ValueError, match='cannot be stored'): b.validate(specs, n_classes=n_classes)
    with pytest.raises(ValueError, match='cannot be stored'): b.tensors().validate(specs, n_classes=n_classes)


def flat(**changes):
    i = np.arange(2)
    args = dict(sequences=dict(a=np.array([[3, 4], [0, 5]])), sequence_ids=i, subsequence_ids=i*0, start_item_positions=i, left_pad_lengths=i, split_start_item_positions=i*0, split_end_item_positions=i+1)
    return StoredTensorBatch(**(args | changes))


def test_large_finite_values_are_finite():
    "Their sum overflows, they do not"
    flat(sequences=dict(a=np.full((2, 2), 1.7e308))).validate()
    flat(sequences=dict(a=np.array([[1.7e308, 1.7e308], [-1.7e308, -1.7e308]]))).validate()


def test_a_tensor_that_numpy_does_not_have_is_refused():
    with pytest.raises(ValueError, match='float32 or float16'): flat(sequences=dict(a=torch.zeros(2, 2, dtype=torch.bfloat16))).validate()


@pytest.mark.parametrize('v', [4, 6, '5', 5.5, None, True])
def test_other_versions_are_refused_with_a_way_out(tmp_path, v):
    write_pt(tmp_path/'x.pt', as_payload(flat()) | dict(version=v))
    for read in (load_pt_payload, read_pt_payload):
        with pytest.raises(ValueError, match='preprocess the data again'): read(tmp_path/'x.pt')


@pytest.mark.parametrize('change', [
    dict(format=None), dict(format='other'), dict(extra=1), dict(metadata=None), dict(metadata={}), dict(metadata=dict(depth_valid_masks={}, sample_positions=None, curriculum_columns=[], more=1)),
    dict(metadata=dict(depth_valid_masks={}, sample_positions=None, curriculum_columns=None)), dict(metadata=dict(depth_valid_masks=None, sample_positions=None, curriculum_columns=[])),
    dict(metadata=dict(depth_valid_masks={}, sample_positions=[1, 2], curriculum_columns=['c'])), dict(sequences=None), dict(sequences={}), dict(sequences=dict(a=[1, 2])), dict(sequence_ids=None),
    dict(sequence_ids=np.int64(3)), dict(sequences=dict(a=np.zeros(2)))], ids=str)
def test_wrong_entries_are_refused(tmp_path, change):
    write_pt(tmp_path/'x.pt', {k: np.asarray(v) if isinstance(v, np.generic) else v for k, v in (as_payload(flat()) | change).items()})
    for read in (load_pt_payload, read_pt_payload):
        with pytest.raises(ValueError, match='x.pt'): read(tmp_path/'x.pt')
    for k in as_payload(flat()):
        write_pt(tmp_path/'x.pt', {a: b for a, b in as_payload(flat()).items() if a != k})
        for read in (load_pt_payload, read_pt_payload):
            with pytest.raises(ValueError): read(tmp_path/'x.pt')


@pytest.mark.parametrize('content', [(1, 2), [1], torch.zeros(3), {1: 2}], ids=str)
def test_other_contents_are_refused(tmp_path, content):
    torch.save(content, tmp_path/'x.pt')
    for read in (load_pt_payload, read_pt_payload):
        with pytest.raises(ValueError, match='x.pt'): read(tmp_path/'x.pt')


def test_no_code_is_run(tmp_path):
    class Runs:
        def __reduce__(self): return open, (str(tmp_path/'ran'), 'w')
    torch.save(dict(as_payload(flat()), format=Runs()), tmp_path/'x.pt')
    for read in (load_pt_payload, read_pt_payload):
        with pytest.raises(ValueError, match='x.pt'): read(tmp_path/'x.pt')
    assert not (tmp_path/'ran').exists()


def test_remote_payloads():
    save_pt_payload(flat(), 'memory://payloads/x.pt')
    same(load_pt_payload('memory://payloads/x.pt'), flat())
    same(read_pt_payload('memory://payloads/x.pt'), flat())


@pytest.mark.parametrize('member', ['data/0', 'data.pkl'])
def test_a_flipped_byte_is_found(tmp_path, member):
    "torch compares no check sums; we do wherever the whole file is read"
    import zipfile
    save_pt_payload(flat(), tmp_path/'x.pt')
    with zipfile.ZipFile(tmp_path/'x.pt') as z: info = z.getinfo(f'archive/{member}')
    raw = bytearray((tmp_path/'x.pt').read_bytes())
    at = raw.index(b'PK\3\4', info.header_offset)+30+int.from_bytes(raw[info.header_offset+26:info.header_offset+28], 'little')+int.from_bytes(raw[info.header_offset+28:info.header_offset+30], 'little')
    at += 6 if member == 'data/0' else raw[at:].index(b'sequences')
    raw[at] ^= 4
    (tmp_path/'x.pt').write_bytes(raw)
    for read in (load_pt_payload, lambda p: read_pt_payload(p, mmap=False)):
        with pytest.raises(ValueError, match='x.pt'): read(tmp_path/'x.pt')
    if member == 'data/0': assert torch.load(tmp_path/'x.pt', weights_only=True)['sequences']['a'].max() > 2**40


@pytest.mark.parametrize('change,words', [(dict(left_pad_lengths=np.array([0, 9])), 'left padding 9'), (dict(split_end_item_positions=np.array([5, 0])), 'start before the end')])
def test_a_mapped_payload_has_its_coordinates_checked(tmp_path, change, words):
    write_pt(tmp_path/'x.pt', as_payload(flat(**change)))
    with pytest.raises(ValueError, match=words): read_pt_payload(tmp_path/'x.pt')
    write_pt(tmp_path/'x.pt', as_payload(flat()))
    with pytest.raises(ValueError, match='vocabulary'):
        write_pt(tmp_path/'x.pt', as_payload(flat(sequences=dict(a=np.ones((2, 2))))))
        read_pt_payload(tmp_path/'x.pt', n_classes=dict(a=3))


def test_a_failed_check_leaves_the_old_file(tmp_path):
    save_pt_payload(flat(), tmp_path/'x.pt')
    with pytest.raises(ValueError): save_pt_payload(flat(), tmp_path/'x.pt', n_classes=dict(a=3))
    same(load_pt_payload(tmp_path/'x.pt'), flat())
    assert [p.name for p in tmp_path.iterdir()] == ['x.pt']


def test_layouts_are_checked():
    ok = dict(position_column='p', columns=['a'], context_length=2)
    for bad in (dict(ok, columns=[]), dict(ok, columns=['a', 'a']), dict(ok, context_length=0), dict(ok, context_length=True), dict(ok, position_base=2), dict(ok, position_base=True), dict(ok, position_base=1.0), dict(ok, allow_gaps=1), dict(ok, allow_gaps='yes'), dict(ok, more=1), dict(columns=['a'])):
        with pytest.raises(ValueError, match='layout'): layout_registry(dict(x=bad))
    with pytest.raises(ValueError, match="'a' belongs"): layout_registry(dict(x=ok, y=ok))
    assert layout_registry(dict(x=ok))['x'].to_dict() == dict(ok, position_base=0, allow_gaps=False)
