"Training that stops at any step goes on with the rest of the epoch, under the same or another number of ranks and workers."
import json, os, signal, subprocess, sys
from itertools import zip_longest

import numpy as np, pytest, torch

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
            assert len(dl) == n-k
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
    for state, rest in [(states[-2], [epochs[0][-1:], epochs[1]]), (states[-1], [[], epochs[1]]), (after, epochs[1:]), (first_of_next, [epochs[1][1:], epochs[2]])]:
        for workers in 0, 2:
            again = loader(shards, workers)
            again.load_state_dict(state)
            assert again.state_dict() == state
            assert [[b['uids'] for b in again] for _ in range(2)] == rest


@pytest.mark.parametrize('per_rank', [False, True])
def test_resume_at_every_step_with_other_ranks(shards, per_rank):
    plan = PRAGMADataLoader(shards, max_tokens=700, shuffle=True).plan_of(0)
    ds = lambda r, w: PRAGMADataLoader(shards, max_tokens=700, shuffle=True, mask=True, rank=r, world_size=w, per_rank=per_rank)
    names = ds(0, 1).recs.uid_list
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
            rest = [[real(b) for b in dl] for dl in again]
            assert sorted(seen + flat(flat(rest))) == [f'u{i:04}' for i in range(80)]
            for j, step in enumerate(zip_longest(*rest)):
                batches = plan[at+j] if not per_rank else np.concatenate(plan[at+j*other:at+(j+1)*other])
                assert sorted(flat(step)) == sorted(names(batches))
            assert sorted(u for dl in again for b in dl for u in real(b)) == [f'u{i:04}' for i in range(80)]


def test_resume_with_other_ranks_and_workers_in_processes(shards):
    names = [f'u{i:04}' for i in range(80)]
    for (w0, n0), (w1, n1) in [((2, 2), (1, 0)), ((1, 3), (3, 1)), ((3, 1), (2, 2))]:
        seen, states = [], []
        for r in range(w0):
            dl = loader(shards, n0, rank=r, world_size=w0)
            for b, _ in zip(dl, range(3)):
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
    dl = loader(same, mask=True, rank=0, world_size=2, num_workers=2)
    dl.load_state_dict(state)
    assert len(dl) == len(dl.dataset.plan_of(0))-2


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
    rest = flat(b['uids'] for b in dl)
    before = [left[r]['seen'] for r in range(2)]
    assert all(before) and sorted(flat(before) + rest) == [f'u{i:04}' for i in range(80)]
    assert sorted(flat(before)) == sorted(flat(dl.dataset.recs.uid_list(b) for b in dl.dataset.plan_of(0)[:2]))
