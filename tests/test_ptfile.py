"""Tensor files: against torch.save byte for byte and torch.load value for value, and hostile files that must be refused."""
import io, os, pickle, random, subprocess, sys, zipfile

import numpy as np, pytest
from hypothesis import given, settings, strategies as st, HealthCheck

from fastseqprep import ptfile
from fastseqprep.files import StoreError
from fastseqprep.ptfile import Parts, pt_dtypes, read_pt, write_pt

torch = pytest.importorskip('torch')


def values(dtype, shape, seed=0):
    "Any bits of a dtype; floats with NaN and infinities among them"
    rng = np.random.default_rng(seed)
    if dtype == 'bool': return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape))*np.dtype(dtype).itemsize), dtype).reshape(shape)


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def as_torch(x):
    if isinstance(x, np.ndarray): return torch.from_numpy(x.copy())
    return {k: as_torch(v) for k, v in x.items()} if isinstance(x, dict) else x


@pytest.mark.parametrize('dtype', pt_dtypes)
@pytest.mark.parametrize('shape', [(), (1,), (7,), (0,), (3, 5), (0, 4), (4, 0), (2, 3, 4), (2, 0, 3, 1)])
def test_each_dtype_and_shape(tmp_path, dtype, shape):
    x = values(dtype, shape)
    write_pt(tmp_path/'x.pt', dict(x=x))
    for mmap in (False, True):
        same(torch.load(tmp_path/'x.pt', weights_only=True, mmap=mmap)['x'].numpy(), x)
        same(read_pt(tmp_path/'x.pt', mmap=mmap)['x'], x)
    torch.save(dict(x=as_torch(x)), tmp_path/'t.pt')
    same(read_pt(tmp_path/'t.pt')['x'], x)


def test_bytes_are_those_of_torch(tmp_path):
    tree = dict(format='text', version=5, sequences={f'column {i}': values(d, (i+1, 6), i) for i, d in enumerate(pt_dtypes*23)},
                metadata=dict(empty={}, none=None, names=['a', 'b', 'ü'], flag=True, big=2**40, small=-3, half=.5), n=np.arange(70_000))
    torch.save(as_torch(tree), tmp_path/'t.pt')
    write_pt(tmp_path/'x.pt', tree, root='t')
    a, b = (tmp_path/'t.pt').read_bytes(), (tmp_path/'x.pt').read_bytes()
    end = a.index(b't/.data/serialization_id')-30
    assert a[:end] == b[:end] and end > 500_000
    write_pt(tmp_path/'y.pt', tree, root='t')
    assert (tmp_path/'y.pt').read_bytes() == b


tree = st.recursive(
    st.none() | st.booleans() | st.integers(-2**70, 2**70) | st.text(max_size=5) | st.floats(allow_nan=False)
    | st.builds(lambda d, s, seed: values(d, s, seed), st.sampled_from(pt_dtypes), st.lists(st.integers(0, 3), max_size=3).map(tuple), st.integers(0, 9)),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=4), x, max_size=4), max_leaves=12)


def equal(a, b):
    if isinstance(b, torch.Tensor): b = b.numpy()
    if isinstance(a, np.ndarray): return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict): return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list): return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@given(tree)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_tree_comes_back(tmp_path, x):
    path = tmp_path/'x.pt'
    write_pt(path, dict(x=x))
    assert equal(dict(x=x), read_pt(path)) and equal(dict(x=x), torch.load(path, weights_only=True))
    assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize('array', [np.arange(24.).reshape(4, 6).T, np.arange(24)[::2], np.arange(24)[::-1], np.arange(6, dtype='>i4'), np.broadcast_to(np.int8(3), (3, 2))])
def test_arrays_in_any_memory_order(tmp_path, array):
    write_pt(tmp_path/'x.pt', dict(x=array))
    assert (torch.load(tmp_path/'x.pt', weights_only=True)['x'].numpy() == array).all() and (read_pt(tmp_path/'x.pt')['x'] == array).all()


def test_parts_are_written_as_one(tmp_path):
    x = np.random.default_rng(0).normal(size=(1000, 30))
    write_pt(tmp_path/'a.pt', dict(x=x))
    for cuts in ([0, 1000], [0, 1, 999, 1000], [0, 400, 400, 1000]):
        write_pt(tmp_path/'b.pt', dict(x=Parts([x[i:j] for i, j in zip(cuts, cuts[1:])])))
        assert (tmp_path/'a.pt').read_bytes() == (tmp_path/'b.pt').read_bytes()


@pytest.mark.parametrize('limit', [0, 100, 5_000, 20_000])
def test_files_beyond_four_gigabytes(tmp_path, monkeypatch, limit):
    "The large-file form of the archive, from a size that can be tested"
    x = dict(a=np.arange(1000), b=np.zeros((0, 3)), c=np.arange(5), d=np.arange(3000))
    if limit: monkeypatch.setattr(ptfile, '_big', limit)
    write_pt(tmp_path/'x.pt', x)
    for got in (read_pt(tmp_path/'x.pt'), torch.load(tmp_path/'x.pt', weights_only=True), torch.load(tmp_path/'x.pt', weights_only=True, mmap=True)): assert equal(x, got)


def test_storages_are_aligned(tmp_path):
    write_pt(tmp_path/'x.pt', {c*i: np.arange(i) for i, c in enumerate('abcdefghij')})
    for v in read_pt(tmp_path/'x.pt').values():
        if v.size: assert v.ctypes.data % 64 == 0


def test_torch_files_open(tmp_path):
    base = torch.arange(60).reshape(6, 10)
    x = dict(base=base, row=base[2], column=base[:, 3], turned=base.T, step=base[::2, 1::3], wide=torch.ones(3, 1).expand(3, 4), s=torch.tensor(2.5))
    for proto in (2, 3):
        torch.save(x, tmp_path/'t.pt', pickle_protocol=proto)
        for mmap in (True, False):
            got = read_pt(tmp_path/'t.pt', mmap=mmap)
            assert all((got[k] == x[k].numpy()).all() and got[k].shape == tuple(x[k].shape) for k in x)


def test_writing_and_reading_need_no_torch(tmp_path):
    code = f"import sys, numpy as np; from fastseqprep.payload import *; from fastseqprep.ptfile import *; write_pt({str(tmp_path/'x.pt')!r}, dict(x=np.arange(3))); read_pt({str(tmp_path/'x.pt')!r}); sys.exit('torch' in sys.modules or 'polars' in sys.modules)"
    assert subprocess.run([sys.executable, '-c', code]).returncode == 0


# ---- hostile files

def with_description(path, code, members=None):
    "A tensor file with this description"
    with zipfile.ZipFile(path, 'w') as z:
        z.writestr('archive/data.pkl', code)
        z.writestr('archive/data/0', bytes(48))
        for k, v in (members or {}).items(): z.writestr(k, v)
    return path


class Runs:
    def __reduce__(self): return os.system, ('echo never',)


@pytest.mark.parametrize('x', [Runs(), dict(a=Runs()), np.arange(3), {1, 2}, object, b'bytes', complex(1), {1: 2}], ids=lambda o: type(o).__name__)
def test_pickles_of_anything_else_are_refused(tmp_path, x):
    for proto in (2, 4):
        with pytest.raises(StoreError): read_pt(with_description(tmp_path/'x.pt', pickle.dumps(x, proto)))


tensor = lambda offset=0, shape=(2, 3), stride=(3, 1), n=6, key='0', kind='LongStorage', name='_rebuild_tensor_v2': (
    b'\x80\x02ctorch._utils\n'+name.encode()+b'\n((X\7\0\0\0storagectorch\n'+kind.encode()+b'\nX'+len(key).to_bytes(4, 'little')+key.encode()+b'X\3\0\0\0cpu'
    + ptfile._pickled_int(n)+b'tQ'+ptfile._pickled_int(offset)+b'('+b''.join(map(ptfile._pickled_int, shape))+b't('+b''.join(map(ptfile._pickled_int, stride))+b't\x89ccollections\nOrderedDict\n)RtR.')


@pytest.mark.parametrize('code,words', [
    (tensor(offset=1), 'reaches beyond'), (tensor(offset=-1), 'unknown kind'), (tensor(shape=(3, 3)), 'reaches beyond'), (tensor(stride=(1000, 1)), 'reaches beyond'),
    (tensor(stride=(-3, 1)), 'unknown kind'), (tensor(stride=(1,)), 'unknown kind'), (tensor(n=7), 'does not fit'), (tensor(key='1'), 'missing'), (tensor(key='../version'), 'missing'),
    (tensor(kind='BFloat16Storage'), 'does not need'), (tensor(kind='load'), 'does not need'), (tensor(name='_rebuild_parameter'), 'does not need'),
    (tensor(shape=(2**40, 2**20), stride=(0, 0)), 'over a storage of'), (tensor()[:-1], ''), (tensor()[:60], ''), (b'', ''), (b'.', ''), (b'\x80\x02}q\0.more', None), (b'\x80\x02R.', ''),
    (b'\x80\x02(.', ''), (b'\x80\x02h\5.', ''), (b'\x80\x02}(K\1K\2u.', 'not a text'), (b'\x80\x02K\1K\2.', 'not complete'), (b'\x80\x02cos\nsystem\n.', 'os system'), (b'\x80\x02ios\nsystem\n.', ''),
    (b'\x80\x02K\1q\0ccollections\nOrderedDict\n(tRb.', ''), (b'\x80\x02}(K\1R.', '')])
def test_broken_descriptions_are_refused(tmp_path, code, words):
    path = with_description(tmp_path/'x.pt', code)
    if words is None: assert read_pt(path) == {}  # what follows the end is not looked at
    else:
        with pytest.raises(StoreError, match=words or 'description'): read_pt(path)


def test_a_tensor_by_hand_opens(tmp_path): assert (read_pt(with_description(tmp_path/'x.pt', tensor())) == np.zeros((2, 3))).all()


@pytest.mark.filterwarnings('ignore:Duplicate name')
def test_broken_archives_are_refused(tmp_path):
    x, path = dict(x=np.arange(100)), tmp_path/'x.pt'
    write_pt(path, x)
    good = path.read_bytes()
    for cut in (0, 1, 100, len(good)//2, len(good)-1):
        path.write_bytes(good[:cut])
        with pytest.raises(StoreError): read_pt(path)
    path.write_bytes(good.replace(np.arange(100).tobytes()[80:120], b'\7'*40))
    with pytest.raises(StoreError, match='check sum'): read_pt(path, mmap=False)
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as z: z.writestr('archive/data.pkl', tensor())
    with pytest.raises(StoreError, match='compressed'): read_pt(path)
    with_description(path, tensor(), {'other/data/0': bytes(48)})
    with pytest.raises(StoreError, match='two members'): read_pt(path)
    with_description(path, tensor(), {'archive/byteorder': b'middle'})
    with pytest.raises(StoreError, match='byte order'): read_pt(path)
    with_description(path, tensor(kind='BoolStorage', n=48), {})
    assert read_pt(path).dtype == bool
    with zipfile.ZipFile(path, 'w') as z: z.writestr('archive/data.pkl', tensor(kind='BoolStorage')), z.writestr('archive/data/0', bytes([0, 1, 2, 3, 4, 5]))
    with pytest.raises(StoreError, match='truth values'): read_pt(path)
    torch.save(x, path, _use_new_zipfile_serialization=False)
    with pytest.raises(StoreError, match='before 1.6'): read_pt(path)


def test_files_of_the_other_byte_order(tmp_path):
    with zipfile.ZipFile(tmp_path/'x.pt', 'w') as z:
        z.writestr('archive/data.pkl', tensor()), z.writestr('archive/byteorder', 'big'), z.writestr('archive/data/0', np.arange(6, dtype='>i8').tobytes())
    assert read_pt(tmp_path/'x.pt').tolist() == [[0, 1, 2], [3, 4, 5]]


def test_damaged_bytes_never_crash(tmp_path):
    "Random damage: read, or refused with our error"
    write_pt(tmp_path/'x.pt', dict(a=np.arange(20), b=np.zeros((3, 4), bool), names=['x']))
    good, rng = (tmp_path/'x.pt').read_bytes(), random.Random(0)
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 6)): bad[rng.randrange(len(bad))] = rng.randrange(256)
        (tmp_path/'y.pt').write_bytes(bad)
        try: read_pt(tmp_path/'y.pt', mmap=rng.random()<.5)
        except StoreError: pass


def test_remote_files(tmp_path):
    x = dict(a=np.arange(6).reshape(2, 3))
    write_pt('memory://tensors/x.pt', x)
    assert equal(x, read_pt('memory://tensors/x.pt'))
    out = io.BytesIO()
    write_pt(out, x)
    assert equal(x, torch.load(io.BytesIO(out.getvalue()), weights_only=True))
