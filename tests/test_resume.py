"Training that stops at any step goes on with the rest of the epoch, under the same or another number of ranks and workers."
import json, os, signal, subprocess, sys
from itertools import zip_longest

import numpy as np, pyarrow as pa, pyarrow.parquet as pq, pytest, torch

from fastseqprep.dataloader import PRAGMADataLoader, pragma_dl
from test_dataloader import WAIT, flat, key, real, write_shards

pytestmark = pytest.mark.filterwarnings('ignore:This DataLoader will create')


@pytest.fixture(scope='module')
def shards(tmp_path_factory):
    folder = write_shards(tmp_path_factory.mktemp('resume')/'shards', (60, 1, 17, 2))
    PRAGMADataLoader(folder)
    return folder


def loader(shards, n=0, **kw):
    return pragma_dl(shards, **{'max_tokens': 700, 'shuffle': True, 'num_workers': n, 'timeout': WAIT if n else 0, 'multiprocessing_context': 'fork' if n else None, **kw})


def stopped(dl, epoch, k):
    "The loader after it gave `k` batches of an epoch, and the state then"
    dl.set_epoch(epoch)
    it = iter(dl)
    for _ in range(k): next(it)
    return dl.state_dict()


def labelled(b):
    "Each real record of a masked batch with its labels"
    row = b['event_user'].repeat_interleave(b['event_offsets'].diff())
    return [(u, b['event_labels'][row==i].tolist()) for i, u in enumerate(b['uids']) if u is not None]


def test_resume_at_every_step_on_one_rank(shards):
    plain = loader(shards)
    epochs = [[key(b) for b in plain] for _ in range(3)]
    n = len(epochs[0])
    assert n >= 6
    for k in range(n+1):                                               # before the first … after the last
        state = json.loads(json.dumps(stopped(loader(shards, k % 3), 0, k)))
        assert (state['epoch'], state['next_batch']) == (0, k)
        for workers in (0, 1, 3):
            dl = loader(shards, workers)
            dl.load_state_dict(state)
            assert len(dl) == len(epochs[k==n])                        # that of the whole epoch, as always
            if k == n: dl.set_epoch(0)                                 # what is left of it: nothing
            assert [key(b) for b in dl] == epochs[0][k:], (k, workers)
            if workers == k % 2: assert [[key(b) for b in dl] for _ in range(2)] == epochs[1:]   # later epochs are whole


def test_the_end_of_an_epoch_and_the_start_of_the_next(shards):
    plain = loader(shards)
    epochs = [[b['uids'] for b in plain] for _ in range(3)]
    dl = loader(shards, 2)
    states = [dl.state_dict() for b in dl]
    assert states[-1]['next_batch'] == len(epochs[0])                  # all received, the loop has not seen the end
    after = dl.state_dict()
    assert (after['epoch'], after['next_batch']) == (1, 0)             # it has
    first_of_next = stopped(dl, 1, 1)
    for state, rest in [(states[-2], [epochs[0][-1:], epochs[1]]), (states[-1], epochs[1:]), (after, epochs[1:]), (first_of_next, [epochs[1][1:], epochs[2]])]:
        for workers in 0, 2:
            again = loader(shards, workers)
            again.load_state_dict(state)
            assert again.state_dict() == state and again.epoch == (state is not states[-2])
            assert [[b['uids'] for b in again] for _ in range(2)] == rest


@pytest.mark.parametrize('per_rank', [False, True])
def test_resume_at_every_step_with_other_ranks(shards, per_rank):
    plan = PRAGMADataLoader(shards, max_tokens=700, shuffle=True).plan_of(0)
    ds = lambda r, w: PRAGMADataLoader(shards, max_tokens=700, shuffle=True, mask=True, rank=r, world_size=w, per_rank=per_rank)
    names = ds(0, 1).recs.uid_list
    whole = dict(flat(map(labelled, ds(0, 1))))                         # each record's masks
    for world in 1, 2, 3, 5:
        n = len(ds(0, world))
        for k in range(n+1):
            ranks = [ds(r, world) for r in range(world)]
            seen = []
            for dl in ranks:
                it = iter(dl)
                seen += [u for _ in range(k) for u in real(next(it))]
            states = [dl.state_dict() for dl in ranks]
            assert all(s == states[0] for s in states)                 # any rank may save it
            at = min(k*(world if per_rank else 1), len(plan))
            assert states[0]['next_batch'] == at and sorted(seen) == sorted(names(np.concatenate([np.zeros(0, int), *plan[:at]])))
            other = (k+world) % 5 + 1
            again = [ds(r, other) for r in range(other)]
            for dl in again: dl.load_state_dict(states[0])
            assert len({len(dl) for dl in again}) == 1
            kept = [list(dl) for dl in again]
            assert all(whole[u] == labels for u, labels in flat(map(labelled, flat(kept))))
            rest = [[real(b) for b in got] for got in kept]
            assert sorted(seen + flat(flat(rest))) == [f'u{i:04}' for i in range(80)]
            for j, step in enumerate(zip_longest(*rest)):
                batches = plan[at+j] if not per_rank else np.concatenate(plan[at+j*other:at+(j+1)*other])
                assert sorted(flat(step)) == sorted(names(batches))
            assert sorted(u for dl in again for b in dl for u in real(b)) == [f'u{i:04}' for i in range(80)]


def test_resume_with_other_ranks_and_workers_in_processes(shards):
    names = [f'u{i:04}' for i in range(80)]
    changes = [((2, 2), (1, 0)), ((1, 3), (3, 1)), ((3, 1), (2, 2)), ((2, 1), (4, 2))]
    n = len(PRAGMADataLoader(shards, max_tokens=700, shuffle=True))
    for k in range(1, n):                                              # at every step, each time with other numbers before and after
        (w0, n0), (w1, n1) = changes[k % len(changes)]
        seen, states = [], []
        for r in range(w0):
            dl = loader(shards, n0, rank=r, world_size=w0)
            for b, _ in zip(dl, range(k)):
                seen += real(b)
                states.append(dl.state_dict())
        for r in range(w1):
            dl = loader(shards, n1, rank=r, world_size=w1, persistent_workers=n1 > 0)
            dl.load_state_dict(states[-1])
            seen += flat(real(b) for b in dl)
            assert dl.epoch == 1 and len(list(dl)) == len(dl.dataset.plan_of(1))
        assert sorted(seen) == names


def test_what_workers_prefetched_is_not_counted(shards):
    dl = loader(shards, 2, prefetch_factor=4)
    it = iter(dl)
    for k in range(3):
        next(it)
        assert dl.state_dict()['next_batch'] == k+1
    del it
    assert dl.state_dict()['next_batch'] == 3                          # where the loop broke off


def test_persistent_workers_begin_where_they_are_told(shards):
    plain = loader(shards)
    epochs = [[b['uids'] for b in plain] for _ in range(4)]
    dl = loader(shards, 2, persistent_workers=True)
    list(dl)
    dl.load_state_dict(stopped(loader(shards), 2, 4))
    assert [[b['uids'] for b in dl] for _ in range(2)] == [epochs[2][4:], epochs[3]]
    state = dl.state_dict()
    dl.load_state_dict({**state, 'epoch': 1, 'next_batch': 1})
    dl.set_epoch(1)                                                    # as a training loop would; the place is kept
    assert [b['uids'] for b in dl] == epochs[1][1:]


def test_torchdata(shards):
    StatefulDataLoader = pytest.importorskip('torchdata.stateful_dataloader', reason="torchdata is not installed; it is in the extra 'dev'").StatefulDataLoader
    plain = loader(shards)
    epochs = [[b['uids'] for b in plain] for _ in range(2)]
    n = len(epochs[0])
    for workers in 0, 1, 3:
        make = lambda: StatefulDataLoader(PRAGMADataLoader(shards, max_tokens=700, shuffle=True), batch_size=None, num_workers=workers, collate_fn=as_is)
        for k in sorted({1, 2, n//2, n-1, n}):
            dl = make()
            it = iter(dl)
            got = [next(it)['uids'] for _ in range(k)]
            state = dl.state_dict()
            assert got == epochs[0][:k]
            del it, dl
            again = make()
            again.load_state_dict(state)
            assert [b['uids'] for b in again] == epochs[0][k:], (workers, k)
            again.dataset.set_epoch(1)
            assert [b['uids'] for b in again] == epochs[1]


def as_is(b): return b


def test_foreign_states_are_refused(shards, tmp_path):
    state = stopped(loader(shards), 0, 2)
    other = write_shards(tmp_path/'other', (60, 1, 17, 2), seed=1)
    for folder, kw, words in [(other, {}, 'other data'), (shards, dict(max_event_toks=2), 'other data'), (shards, dict(seed=1), 'seed=0, but this loader has seed=1'),
                              (shards, dict(max_tokens=500), 'max_tokens=700'), (shards, dict(shuffle=False), 'shuffle=True'), (shards, dict(records=np.arange(40)), 'records=None')]:
        dl = loader(folder, **kw)
        with pytest.raises(ValueError, match=words): dl.load_state_dict(state)
        assert (dl.epoch, dl.state_dict()['next_batch'], len(dl)) == (0, 0, len(dl.dataset.plan_of(0)))     # as it was
    dl = loader(shards)
    with pytest.raises(ValueError, match='plan version 99'): dl.load_state_dict({**state, 'plan_version': 99})
    for junk in ({}, None, {'epoch': 1}, [1]):
        with pytest.raises(ValueError, match='not what state_dict'): dl.load_state_dict(junk)
    same = write_shards(tmp_path/'same', (60, 1, 17, 2))               # the same records elsewhere are the same data
    dl = loader(same, rank=0, world_size=2, num_workers=2)
    dl.load_state_dict(state)
    assert len(dl) == len(dl.dataset.plan_of(0)) and len(list(dl)) == len(dl)-2


def test_places_that_are_none_are_refused(shards):
    dl = loader(shards)
    state = stopped(loader(shards), 0, 2)
    n = len(dl)
    for k in (-1, n+1, 10**12, 1.0, '2', None, True):
        with pytest.raises(ValueError, match='next_batch='): dl.load_state_dict({**state, 'next_batch': k})
    for e in (-1, .5, '0', None, True, 2**64):
        with pytest.raises(ValueError, match='epoch='): dl.load_state_dict({**state, 'epoch': e})
    for k in ('plan_version', 'data', 'manifest', 'plan', 'mask', 'epoch', 'next_batch'):
        with pytest.raises(ValueError, match=f'lacks {k}, .*set_epoch'): dl.load_state_dict({i: v for i, v in state.items() if i != k})
    with pytest.raises(ValueError, match='lacks plan_version, plan, mask'): dl.load_state_dict({i: v for i, v in state.items() if i not in ('mask', 'plan', 'plan_version')})
    assert (dl.epoch, dl.state_dict()['next_batch']) == (0, 0)         # as it was
    dl.load_state_dict({**state, 'next_batch': n-1})
    assert len(list(dl)) == 1


def test_one_other_value_is_other_data(tmp_path):
    "One token of 100,000 differs, far from any sample; all lengths are the same"
    n = 100_000
    rows = lambda: dict(user_id=np.arange(n)//100, key=np.repeat('k', n), key_id=np.full(n, 5), val_id=np.arange(n) % 900+3, val_pos=np.zeros(n, np.int64), time=np.arange(n),
                        logsec=np.zeros(n), source_idx=np.zeros(n, np.int64), event_idx=np.arange(n) % 100, hour=np.zeros(n), dow=np.ones(n), dom=np.ones(n))
    for name in 'ab':
        r = rows()
        if name == 'b': r['val_id'][54_321] += 1
        (tmp_path/name).mkdir()
        pq.write_table(pa.table(r), tmp_path/name/'shard_0.parquet')
    a, b = (pragma_dl(tmp_path/n, entity_col='user_id', max_tokens=5000) for n in 'ab')
    state = stopped(a, 0, 3)
    assert np.array_equal(a.dataset.recs.ntoks, b.dataset.recs.ntoks)
    with pytest.raises(ValueError, match='other data'): b.load_state_dict(state)
    a.load_state_dict(state)


def test_the_manifest_is_part_of_the_identity(tmp_path):
    from fastseqprep.store import Manifest, OutputFile, write_manifest
    for name in 'abc':
        write_shards(tmp_path/name, (30,))
        if name != 'c': write_manifest(tmp_path/name, Manifest(job='events', outputs=[OutputFile.of(tmp_path/name, 'shard_0.parquet')], entity_col='user_id', facts=dict(name=name)))
    a, b, c = (loader(tmp_path/n) for n in 'abc')
    state = stopped(a, 0, 1)
    with pytest.raises(ValueError, match='other data, with the manifest'): b.load_state_dict(state)
    for dl in a, c: dl.load_state_dict(state)                          # a copy without a manifest is the same data
    assert json.loads(json.dumps(state)) == state and len(json.dumps(state)) < 900


def test_other_masks_are_refused(shards):
    from types import SimpleNamespace
    tok = lambda h: SimpleNamespace(val_vocab={'[PAD]': 0, '[MASK]': 1, '[UNK]': 2, '[NULL]': 3}, hash=h)
    state = stopped(loader(shards, mask=True), 0, 2)
    for n in 0, 2:                                                     # the same, in processes too
        dl = loader(shards, n, mask=True)
        dl.load_state_dict(json.loads(json.dumps(state)))
        list(dl)
    for kw, words in [(dict(p_tok=.2), 'p_tok=0.15, but this loader has p_tok=0.2'), (dict(exact_share=.3), 'exact_share=None'), (dict(whole_value=True), 'whole_value'),
                      (dict(unk_targets=True), 'unk_targets'), (dict(ignore=-1), 'ignore'), (dict(tok=tok('x')), 'ids=.*tokenizer=None, but'), (dict(mask=False), 'mask=True')]:
        dl = loader(shards, **{'mask': True, **kw})
        with pytest.raises(ValueError, match=words): dl.load_state_dict(state)
    with pytest.raises(ValueError, match='mask=False'): loader(shards, mask=True).load_state_dict(stopped(loader(shards), 0, 2))
    state = stopped(loader(shards, mask=True, tok=tok('x')), 0, 2)
    with pytest.raises(ValueError, match="tokenizer='x', but this loader has tokenizer='y'"): loader(shards, mask=True, tok=tok('y')).load_state_dict(state)
    loader(shards, mask=True, tok=tok('x')).load_state_dict(state)


TRAIN = '''
import json, os, signal, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from fastseqprep.dataloader import pragma_dl
shards, folder, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
torch.set_num_threads(1)
dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=2)
dl = pragma_dl(shards, max_tokens=700, shuffle=True, num_workers=1, multiprocessing_context='fork', timeout=120)
assert (dl.dataset.rank, dl.dataset.world_size) == (rank, 2)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.EmbeddingBag(600, 8), torch.nn.Linear(8, 1)))
opt = torch.optim.SGD(model.parameters(), lr=.1)
seen = []
for step, b in enumerate(dl):
    if step == 2: # received, not trained on
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    out = model(b['event_tokens'][:, 1].reshape(1, -1))
    opt.zero_grad()
    (out**2).sum().backward()
    opt.step()
    seen += [u for u, r in zip(b['uids'], b['real'].tolist()) if r]
    torch.save(model.module.state_dict(), f'{folder}/model{rank}.pt')
    with open(f'{folder}/rank{rank}.json', 'w') as f: json.dump(dict(state=dl.state_dict(), seen=seen, weight=model.module[1].weight.tolist()), f)
'''


@pytest.mark.skipif(not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason='torch was built without gloo')
def test_killed_on_two_ranks_goes_on_with_one(shards, tmp_path):
    runs = [subprocess.Popen([sys.executable, '-c', TRAIN, str(shards), str(tmp_path), str(r)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for r in range(2)]
    try: said = [p.communicate(timeout=WAIT)[0] for p in runs]
    finally:
        for p in runs: p.kill()
    assert [p.returncode for p in runs] == [-signal.SIGKILL]*2, said
    left = [json.loads((tmp_path/f'rank{r}.json').read_text()) for r in range(2)]
    assert left[0]['state'] == left[1]['state'] and left[0]['weight'] == left[1]['weight'] and left[0]['state']['next_batch'] == 2
    dl = loader(shards)
    dl.load_state_dict(left[0]['state'])
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(600, 8), torch.nn.Linear(8, 1))
    model.load_state_dict(torch.load(tmp_path/'model0.pt', weights_only=True))
    assert model[1].weight.tolist() == left[0]['weight']
    opt, rest, losses = torch.optim.SGD(model.parameters(), lr=.1), [], []
    for b in dl:                                                       # one rank trains on
        loss = (model(b['event_tokens'][:, 1].reshape(1, -1))**2).sum()
        opt.zero_grad(); loss.backward(); opt.step()
        rest += b['uids']
        losses.append(loss.item())
    assert np.isfinite(losses).all() and model[1].weight.tolist() != left[0]['weight']
    before = [left[r]['seen'] for r in range(2)]
    assert all(before) and sorted(flat(before) + rest) == [f'u{i:04}' for i in range(80)]
    assert sorted(flat(before)) == sorted(flat(dl.dataset.recs.uid_list(b) for b in dl.dataset.plan_of(0)[:2]))
