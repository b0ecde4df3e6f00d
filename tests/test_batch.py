"A model's loss and gradients over packed batches are those over the same records one by one, in every form of attention."
import copy, inspect, random
from unittest import mock

import numpy as np, pytest, torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from fastseqprep.batch import (Batch, block_mask, cu_seqlens, from_padded, level_offsets, max_length, prepend, real_rows, same_segment,
                               segment_blocks, segment_ids, segment_mask, segment_positions, split_first, to_nested, to_padded)
from fastseqprep.dataloader import pack_batch
from fastseqprep.masking import mask_batch

pytestmark = [pytest.mark.filterwarnings('ignore:The PyTorch API of nested tensors'),
              pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')]
D, H, KEYS, VALS = 16, 2, 12, 40
LEVELS = 'event', 'history', 'record_events', 'record'


@pytest.fixture(autouse=True, scope='module')
def one_thread():
    "Tensors as small as these are slower with more"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_record(uid, max_events=8):
    "0 to `max_events` events of 1 to 6 tokens, 0 to 3 profile tokens"
    rng = np.random.default_rng(uid)
    def toks(n): return np.stack([rng.integers(1, KEYS, n), rng.integers(3, VALS, n), rng.integers(0, 3, n)], 1)
    n_events, n_profile = (0 if uid % 5 == 0 else rng.integers(1, max_events+1)), rng.integers(0, 4)
    return dict(uid=uid, profile=toks(n_profile), profile_time=np.zeros(n_profile), lifelong=toks(0), lifelong_time=np.zeros(0),
                events=[toks(rng.integers(1, 7)) for _ in range(n_events)], event_time=np.sort(rng.random(n_events))[::-1].copy(),
                cal=rng.random((n_events, 3)))


def masked(recs): return mask_batch(pack_batch(recs), None, p_tok=.3)
def random_offsets(rng, n): return torch.tensor([0, *np.cumsum([rng.choice([0, 1, 2, 7, 19]) for _ in range(n)])])


# ---------------------------------------------------------------- a model of tokens in events in records

def split_heads(x): return x.unflatten(-1, (3, H, D//H)).unbind(-3)  # (..., n, 3·D) → three of (..., n, H, D/H)
def swap(x): return x.transpose(-3, -2)                              # places and heads
def sdpa(q, k, v, **kw): return swap(F.scaled_dot_product_attention(swap(q), swap(k), swap(v), **kw))

def attend_nested(qkv, offsets):
    if not len(qkv): return qkv[:, :D] # torch's nested attention wants a row
    return sdpa(*(to_nested(o, offsets) for o in split_heads(qkv))).values().flatten(-2)

def attend_padded(qkv, offsets):
    padded, mask = to_padded(qkv, offsets)
    return from_padded(sdpa(*split_heads(padded), attn_mask=mask[:, None, None]), mask)[0].flatten(-2)

def attend_dense(qkv, offsets):
    return sdpa(*(o[None] for o in split_heads(qkv)), attn_mask=segment_mask(offsets))[0].flatten(-2)

def attend_flex(qkv, offsets):
    from torch.nn.attention.flex_attention import flex_attention
    if not len(qkv): return qkv[:, :D]
    return swap(flex_attention(*(swap(o[None]) for o in split_heads(qkv)), block_mask=block_mask(offsets)))[0].flatten(-2)

def attend_all(qkv, offsets):
    "Wrong on purpose: everything looks at everything"
    return sdpa(*(o[None] for o in split_heads(qkv)))[0].flatten(-2)

FORMS = dict(nested=attend_nested, padded=attend_padded, dense=attend_dense)


class Model(nn.Module):
    "[EVT] and tokens meet in events, [USR] and events meet in records; a masked value is guessed from its token, event and record"
    def __init__(self):
        super().__init__()
        self.keys, self.vals, self.pos = nn.Embedding(KEYS, D), nn.Embedding(VALS, D), nn.Embedding(32, D)
        self.evt, self.usr = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))
        self.in_event, self.in_history, self.times, self.head = nn.Linear(D, 3*D), nn.Linear(D, 3*D), nn.Linear(4, D), nn.Linear(3*D, VALS)

    def embed(self, toks): return self.keys(toks[..., 0]) + self.vals(toks[..., 1]) + self.pos(toks[..., 2])

    def outputs(self, b, attend):
        dtype = self.evt.dtype
        x, offsets = prepend(self.embed(b['event_tokens']), level_offsets(b, 'event'), self.evt)
        x = x + attend(self.in_event(x), offsets)
        evt, tok, _ = split_first(x, offsets)
        evt = evt + self.times(torch.cat([b['event_time'][:, None], b['cal']], 1).to(dtype))
        usr = self.usr + (self.embed(b['profile'])*b['profile_mask'][..., None]).sum(1)
        h, offsets = prepend(evt, level_offsets(b, 'record_events'), usr)
        assert torch.equal(offsets, b['history_offsets'])
        h = h + self.pos(segment_positions(offsets))
        h = h + attend(self.in_history(h), offsets)
        usr, evt, _ = split_first(h, offsets)
        return torch.cat([tok, evt[segment_ids(b['event_offsets'])], usr[segment_ids(level_offsets(b, 'record'))]], 1), usr

    def forward(self, b, attend):
        x, _ = self.outputs(b, attend)
        real = real_rows(b)[segment_ids(level_offsets(b, 'record'))]
        return F.cross_entropy(self.head(x), b['event_labels'].where(real, -100), reduction='sum')

    def alone(self, b):
        "The loss of a batch of one record, by plain loops and nothing from the module under test"
        tok, evt, loss = [], [], self.head.weight.sum()*0
        ends = b['event_offsets'].tolist()
        def plain(qkv): return sdpa(*(o[None] for o in split_heads(qkv)))[0].flatten(-2)
        for i in range(len(ends)-1):
            x = torch.cat([self.evt[None], self.embed(b['event_tokens'][ends[i]:ends[i+1]])])
            x = x + plain(self.in_event(x))
            tok.append(x[1:])
            evt.append(x[0] + self.times(torch.cat([b['event_time'][i:i+1], b['cal'][i]]).to(x.dtype)))
        h = torch.stack([self.usr + self.embed(b['profile'][0]).sum(0), *evt])
        h = h + self.pos(torch.arange(len(h)))
        h = h + plain(self.in_history(h))
        for i in range(len(ends)-1):
            x = torch.cat([tok[i], h[i+1].expand_as(tok[i]), h[0].expand_as(tok[i])], 1)
            loss = loss + F.cross_entropy(self.head(x), b['event_labels'][ends[i]:ends[i+1]], reduction='sum')
        return loss


def loss_and_grads(model, losses):
    model.zero_grad()
    total = 0.
    for loss in losses:
        loss.backward()
        total += loss.item()
    return total, {k: p.grad.clone() for k, p in model.named_parameters()}

@pytest.fixture(scope='module')
def recs(): return [make_record(uid) for uid in range(1, 33)]

@pytest.fixture(scope='module')
def packs(recs):
    "The records in another order, in batches of 1 to 9"
    order, rng = recs.copy(), random.Random(0)
    rng.shuffle(order)
    sizes, at = [], 0
    while at < len(order): sizes.append((at, at := at + rng.randint(1, 9)))
    return [order[i:j] for i, j in sizes]

def model_of(dtype):
    torch.manual_seed(0)
    return Model().to(dtype)


@pytest.fixture(scope='module')
def unpacked(recs):
    "dtype → summed loss and gradients of the records one by one"
    models = {dtype: model_of(dtype) for dtype in (torch.float64, torch.float32)}
    return {dtype: loss_and_grads(model, (model.alone(masked([r])) for r in recs)) for dtype, model in models.items()}

both = pytest.mark.parametrize('dtype,tol', [(torch.float64, 1e-11), (torch.float32, 2e-5)], ids=['float64', 'float32'])


@both
@pytest.mark.parametrize('form', FORMS)
def test_packed_is_unpacked(packs, unpacked, form, dtype, tol):
    model, (want, want_grads) = model_of(dtype), unpacked[dtype]
    got, grads = loss_and_grads(model, (model(masked(p), FORMS[form]) for p in packs))
    assert want > 100 and abs(got-want) <= tol*want
    for k, g in want_grads.items():
        assert g.abs().max() > 0, f'{k} plays no part'
        torch.testing.assert_close(grads[k], g, rtol=tol, atol=tol*float(g.abs().max()), msg=k)


@both
def test_packed_is_unpacked_by_block_mask(packs, unpacked, dtype, tol):
    "FlexAttention has no gradients on a CPU, so the loss alone; its block mask is compared with the dense mask below"
    model = model_of(dtype)
    want, _ = unpacked[dtype]
    with torch.no_grad(): got = sum(model(masked(p), attend_flex).item() for p in packs)
    assert abs(got-want) <= tol*want


def test_a_leak_would_be_seen(packs, unpacked):
    model, (want, _) = model_of(torch.float64), unpacked[torch.float64]
    with torch.no_grad(): got = sum(model(masked(p), attend_all).item() for p in packs)
    assert abs(got-want) > 1e-3*want


@pytest.mark.parametrize('form', [*FORMS, 'flex'])
def test_no_record_sees_its_neighbours(recs, form):
    "Other tokens, profile and times in one record leave what comes out for the others as it was, bit for bit"
    attend, model = {**FORMS, 'flex': attend_flex}[form], model_of(torch.float32)
    b = masked(recs[:12])
    ids = segment_ids(level_offsets(b, 'record'))
    with torch.no_grad():
        out, usr = model.outputs(b, attend)
        for r in (2, 7, 10):
            changed = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in b.items()}
            changed['event_tokens'][ids == r, 1] = (changed['event_tokens'][ids == r, 1] + 7) % VALS
            changed['event_time'][changed['event_user'] == r] += 5
            changed['profile'][r, :, 1] = (changed['profile'][r, :, 1] + 7) % VALS
            out2, usr2 = model.outputs(changed, attend)
            others = torch.arange(12) != r
            assert torch.equal(out2[ids != r], out[ids != r]) and torch.equal(usr2[others], usr[others])
            assert not torch.isclose(usr2[r], usr[r]).all() and (out2[ids == r] != out[ids == r]).any(1).all()


@pytest.mark.parametrize('form', FORMS)
def test_gradient_stays_in_its_record(recs, form):
    model = model_of(torch.float64)
    b = masked(recs[:8])
    x = torch.randn(len(b['event_tokens']), D, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(model, 'embed', lambda toks: x if toks.ndim == 2 else model.vals(toks[..., 1])): _, usr = model.outputs(b, FORMS[form])
    usr[3].sum().backward()
    ids = segment_ids(level_offsets(b, 'record'))
    assert (x.grad[ids == 3] != 0).any(1).all() and (x.grad[ids != 3] == 0).all()


@pytest.mark.parametrize('form', FORMS)
def test_filled_records_do_not_count(recs, form):
    model = model_of(torch.float64)
    real = torch.tensor([True]*5 + [False]*3)
    filled = {**masked(recs[:8]), 'real': real}
    want, want_grads = loss_and_grads(model, [model(masked(recs[:5]), FORMS[form])])
    got, grads = loss_and_grads(model, [model(filled, FORMS[form])])
    assert abs(got-want) < 1e-11*want
    for k in grads: torch.testing.assert_close(grads[k], want_grads[k], rtol=1e-9, atol=1e-9, msg=k)


@pytest.mark.parametrize('form', FORMS)
def test_records_without_events(form):
    recs = [make_record(uid) for uid in (5, 10, 15)]
    model, b = model_of(torch.float32), masked(recs)
    assert not len(b['event_tokens'])
    out, usr = model.outputs(b, FORMS[form])
    assert out.shape == (0, 3*D) and usr.isfinite().all()
    loss = model(b, FORMS[form]); loss.backward()
    assert loss.item() == 0


# ---------------------------------------------------------------- the views

def test_levels_are_those_of_the_records(recs):
    b = pack_batch(recs)
    want = dict(event=[len(e) for r in recs for e in r['events']], history=[len(r['events'])+1 for r in recs],
                record_events=[len(r['events']) for r in recs], record=[sum(map(len, r['events'])) for r in recs])
    for level in LEVELS:
        offsets = level_offsets(b, level)
        assert offsets[0] == 0 and offsets.diff().tolist() == want[level]
        assert segment_ids(offsets).tolist() == [i for i, n in enumerate(want[level]) for _ in range(n)]
        assert segment_positions(offsets).tolist() == [p for n in want[level] for p in range(n)]
        assert max_length(offsets) == max(want[level])
        assert cu_seqlens(offsets).dtype == torch.int32 and torch.equal(cu_seqlens(offsets).long(), offsets)
    assert real_rows(b).tolist() == [True]*len(recs)


def test_batches_of_numpy_arrays(recs):
    b = pack_batch(recs)
    arrays = {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in b.items()}
    for level in LEVELS:
        o, a = level_offsets(b, level), level_offsets(arrays, level)
        for f in (lambda x: x), cu_seqlens, segment_ids, segment_positions:
            assert isinstance(f(a), np.ndarray) and str(f(a).dtype) in str(f(o).dtype) and f(a).tolist() == f(o).tolist()
        assert max_length(a) == max_length(o)
        values = np.random.default_rng(0).random((int(a[-1]), 3))
        padded, mask = to_padded(values, a, fill=-1)
        want, wanted = to_padded(torch.from_numpy(values), o, fill=-1)
        assert np.array_equal(padded, want.numpy()) and np.array_equal(mask, wanted.numpy())
        back, again = from_padded(padded, mask)
        assert np.array_equal(back, values) and np.array_equal(again, a)
        if level != 'history': assert torch.equal(to_nested(values, a).values(), torch.from_numpy(values))
    assert real_rows(arrays).tolist() == real_rows(b).tolist()


@pytest.mark.parametrize('kind', ['tensors', 'arrays'])
def test_methods_of_a_batch_are_the_functions(recs, kind):
    b = getattr(pack_batch(recs), kind)()
    for level in (*LEVELS, None):
        o = level_offsets(b, level)
        assert all((x == y).all() and x.dtype == y.dtype for x, y in [(b.offsets(level), o), (b.cu_seqlens(level), cu_seqlens(o)),
            (b.segment_ids(level), segment_ids(o)), (b.positions(level), segment_positions(o))])
        assert b.max_seqlen(level) == max_length(o) and b.real.all()
        if level in ('history', 'record_events'):
            for view in b.padded, b.nested:
                with pytest.raises(ValueError, match='no values for the level'): view(level=level)
            values = torch.randn(int(o[-1]), 2)
            if kind == 'tensors': assert torch.equal(b.padded(values, level)[0], to_padded(values, o)[0])
        else:
            assert (b.padded(level=level)[0] == to_padded(b['event_tokens'], o)[0]).all()
            assert torch.equal(b.nested(level=level).values(), torch.as_tensor(b['event_tokens']))
        for causal in False, True:
            got, want = b.block_mask(level, causal), block_mask(o, causal)
            assert all(torch.equal(x, y) if isinstance(x, torch.Tensor) else True for x, y in zip(got.as_tuple(), want.as_tuple()))


def test_a_batch_stays_one_on_its_way(recs):
    "Through torch's collating and pinning, copies and pickles; fastai's `to_device` gives a dict that becomes one again"
    from torch.utils.data import default_convert
    b = pack_batch(recs)
    with mock.patch.object(torch.Tensor, 'pin_memory', lambda t: t.clone()): ways = [b.pin_memory(), pin_memory(b), pin_memory([b])[0], b.arrays().pin_memory()]
    ways += [b.to('cpu'), b.to('cpu', non_blocking=True), b.arrays().to('cpu'), b.arrays().tensors(), default_convert(b), default_convert(b.arrays()), copy.copy(b), copy.deepcopy(b)]
    for o in ways:
        assert type(o) is Batch and list(o) == list(b) and o['uids'] == b['uids']
        assert all(torch.equal(o[k], b[k]) and o[k].dtype == b[k].dtype for k in b if k != 'uids')
    to_device = pytest.importorskip('fastai.torch_core').to_device
    assert torch.equal(Batch(to_device(b, 'cpu')).positions('record'), b.positions('record'))


@pytest.mark.parametrize('seed', range(20))
def test_there_and_back(seed):
    rng = random.Random(seed)
    offsets = random_offsets(rng, rng.randint(0, 8))
    values = torch.randn(int(offsets[-1]), 3, dtype=torch.float64)
    padded, mask = to_padded(values, offsets, width=max_length(offsets) + rng.choice([0, 3]), fill=-7)
    assert (padded[~mask] == -7).all() and torch.equal(mask.sum(1), offsets.diff())
    back, again = from_padded(padded, mask)
    assert torch.equal(back, values) and torch.equal(again, offsets)
    first = torch.randn(len(offsets)-1, 3, dtype=torch.float64)
    longer, new = prepend(values, offsets, first)
    rows = [torch.cat([f[None], values[i:j]]) for f, i, j in zip(first, offsets, offsets[1:])]
    assert torch.equal(longer, torch.cat([values[:0], *rows])) and new.diff().tolist() == [len(r) for r in rows]
    for x, y in zip(split_first(longer, new), (first, values, offsets)): assert torch.equal(x, y)
    nested = to_nested(values, offsets)
    assert torch.equal(nested.values(), values) and torch.equal(nested.offsets(), offsets)


def test_changes_of_form_have_right_gradients():
    offsets = torch.tensor([0, 2, 2, 5])
    x, first = torch.randn(5, 2, dtype=torch.float64, requires_grad=True), torch.randn(2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: to_padded(x, offsets)[0], x)
    assert torch.autograd.gradcheck(lambda x: from_padded(*to_padded(x, offsets))[0], x)
    assert torch.autograd.gradcheck(lambda x, f: prepend(x, offsets, f)[0], (x, first))
    assert torch.autograd.gradcheck(lambda x: split_first(x, [0, 2, 3, 5])[:2], x)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('seed', range(12))
def test_block_mask_is_that_of_torch(seed, causal):
    from torch.nn.attention.flex_attention import create_block_mask, create_mask
    rng = random.Random(seed)
    offsets = random_offsets(rng, rng.randint(1, 40)) if seed else torch.tensor([0, 128, 256, 384])
    n, ids, size = int(offsets[-1]), segment_ids(offsets), rng.choice([16, 32, 128])
    got, want = block_mask(offsets, causal, size), create_block_mask(same_segment(ids, causal), None, None, n, n, device='cpu', BLOCK_SIZE=size)
    assert got.shape == want.shape and got.seq_lengths == want.seq_lengths and got.BLOCK_SIZE == want.BLOCK_SIZE
    for name in ('', 'full_'):
        for side in ('kv', 'q'):
            for what in ('num_blocks', 'indices'):
                x, y = (getattr(m, f'{name}{side}_{what}') for m in (got, want))
                assert x.dtype == y.dtype and torch.equal(x, y)
    dense = segment_mask(offsets, causal)
    assert torch.equal(create_mask(got.mask_mod, None, None, n, n, device='cpu')[0, 0], dense)
    brute = (segment_ids(offsets)[:, None] == segment_ids(offsets)) & (torch.ones(n, n).tril().bool() | (not causal))
    assert torch.equal(dense, brute)


def test_causal_attention_by_block_mask():
    from torch.nn.attention.flex_attention import flex_attention
    offsets = torch.tensor([0, 100, 101, 290])
    q, k, v = torch.randn(3, 1, H, 290, 8)
    got = flex_attention(q, k, v, block_mask=block_mask(offsets, causal=True))
    want = torch.cat([F.scaled_dot_product_attention(*(x[:, :, i:j] for x in (q, k, v)), is_causal=True) for i, j in zip(offsets, offsets[1:])], 2)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_varlen_attention_takes_our_arguments():
    "Its kernels run on GPUs only; the checks before them run anywhere"
    varlen = pytest.importorskip('torch.nn.attention.varlen')
    assert list(inspect.signature(varlen.varlen_attn).parameters)[:7] == ['query', 'key', 'value', 'cu_seq_q', 'cu_seq_k', 'max_q', 'max_k']
    offsets = torch.tensor([0, 3, 7])
    q, cu = torch.empty(7, H, 16, dtype=torch.float16, device='meta'), cu_seqlens(offsets).to('meta')
    assert varlen.varlen_attn(q, q, q, cu, cu, max_length(offsets), max_length(offsets)).shape == q.shape


# ---------------------------------------------------------------- moving

def test_batch_through_a_loader(recs):
    "Batches stay batches in torch's loader, with workers too"
    batches = [Batch(pack_batch(recs[i:i+4])) for i in range(0, 12, 4)]
    for workers in (0, 1):
        got = list(DataLoader(batches, batch_size=None, num_workers=workers))
        assert [type(b) for b in got] == [Batch]*3
        for b, want in zip(got, batches):
            assert list(b) == list(want) and b['uids'] == want['uids']
            assert all(torch.equal(b[k], want[k]) and b[k].dtype == want[k].dtype for k in want if k != 'uids')


def test_loader_pins_a_batch(recs):
    b = Batch(pack_batch(recs[:3]), real=torch.ones(3, dtype=torch.bool))
    seen = []
    def pin(t): seen.append(id(t)); return t.clone()
    with mock.patch.object(torch.Tensor, 'pin_memory', pin): pinned = pin_memory(b)
    assert seen == [id(v) for v in b.values() if isinstance(v, torch.Tensor)] and len(seen) == len(b)-1
    assert type(pinned) is Batch and list(pinned) == list(b) and pinned['uids'] is b['uids']


@pytest.mark.skipif(not torch.cuda.is_available(), reason='pinning takes a GPU')
def test_loader_pins_for_a_gpu(recs):
    b, = DataLoader([Batch(pack_batch(recs[:3]))], batch_size=None, pin_memory=True)
    assert type(b) is Batch and all(v.is_pinned() for k, v in b.items() if k != 'uids')
    moved = b.to('cuda', non_blocking=True)
    for level in LEVELS: assert torch.equal(segment_ids(level_offsets(moved, level)).cpu(), segment_ids(level_offsets(b, level)))


def test_moving_waits_only_when_asked(recs):
    b, calls = Batch(pack_batch(recs[:3])), []
    def to(t, device, non_blocking): calls.append((device, non_blocking)); return t
    with mock.patch.object(torch.Tensor, 'to', to): b.to('cuda:1', non_blocking=True)
    assert calls == [('cuda:1', True)]*(len(b)-1)
    assert type(copy.copy(b)) is Batch


def test_copies_and_unions_are_batches():
    b = Batch(tokens=np.arange(5), record_offsets=np.array([0, 2, 5]))
    for o in b.copy(), b | {}, {} | b, b | b:
        assert type(o) is Batch and o is not b and list(o) == list(b) and o['tokens'] is b['tokens']
        assert o.max_seqlen() == 3
    assert list(b | {'x': 1}) == [*b, 'x'] and ({'tokens': 0} | b)['tokens'] is b['tokens'] and (b | {'tokens': 0})['tokens'] == 0
    with pytest.raises(TypeError): b | [('x', 1)]
    b |= {'x': 1}
    assert type(b) is Batch and b['x'] == 1


def test_the_level_may_come_first():
    b = Batch(tokens=np.arange(5), record_offsets=np.array([0, 2, 5])).tensors()
    for x, y in zip(b.padded('record'), b.padded(level='record')): assert x.equal(y)
    assert [o.tolist() for o in b.nested('record').unbind()] == [[0, 1], [2, 3, 4]]
    for f in b.padded, b.nested:
        with pytest.raises(ValueError, match="no level 'event'"): f('event')
        with pytest.raises(ValueError, match="values are 'record' and the level is 'record'"): f('record', 'record')
