"Batches that come from workers may be kept for as long as one likes."
import gc, io, os
from multiprocessing import get_context

import numpy as np, pytest, torch

from fastseqprep import handover
from fastseqprep.dataloader import EpochDataLoader, PRAGMADataLoader, pragma_dl
from fastseqprep.handover import Ring
from test_dataloader import WAIT, key, write_shards

pytestmark = pytest.mark.filterwarnings('ignore:This DataLoader will create')


def double(b): return {k: v*2 for k, v in b.items() if isinstance(v, torch.Tensor)}

def as_pair(b): return b['event_tokens']+1, b['uids']

@pytest.fixture(scope='module')
def shards(tmp_path_factory): return write_shards(tmp_path_factory.mktemp('handover')/'shards', (120, 3, 30))


@pytest.mark.parametrize('kw', [dict(num_workers=2), dict(num_workers=3, persistent_workers=True), dict(num_workers=1, prefetch_factor=1, multiprocessing_context='spawn')])
def test_batches_that_are_kept_stay_as_they_are(shards, kw):
    plain = PRAGMADataLoader(shards, max_tokens=150, shuffle=True, mask=True)
    want = [[key(b) for b in plain] for _ in range(2)]
    assert len(want[0]) > 50                                            # many more than there are slots
    dl = pragma_dl(shards, max_tokens=150, shuffle=True, mask=True, timeout=WAIT, **kw)
    kept = [list(dl) for _ in range(2)]
    del dl
    gc.collect()
    assert [[key(b) for b in e] for e in kept] == want


def test_a_part_of_a_batch_is_enough_to_keep_it(shards):
    plain = [b['event_tokens'].clone() for b in PRAGMADataLoader(shards, max_tokens=150, shuffle=True)]
    dl = pragma_dl(shards, max_tokens=150, shuffle=True, num_workers=2, timeout=WAIT)
    kept = [b['event_tokens'][1::2] for b in dl]
    assert all((a == b[1::2]).all() for a, b in zip(kept, plain))


def test_epochs_that_are_broken_off_lose_no_slots(shards):
    dl = pragma_dl(shards, max_tokens=1000, shuffle=True, num_workers=2, persistent_workers=True, timeout=WAIT)
    want = PRAGMADataLoader(shards, max_tokens=1000, shuffle=True)
    for _ in range(6):
        for b in dl: break
    del b
    want.set_epoch(6)
    assert [key(b) for b in dl] == [key(b) for b in want]
    gc.collect()
    assert dl._iterator.ring.free.all()


@pytest.mark.skipif(not os.path.isdir('/dev/shm'), reason='shared memory is not a folder here')
def test_shared_memory_is_given_back(shards):
    before = set(os.listdir('/dev/shm'))
    for kw in dict(num_workers=2), dict(num_workers=2, persistent_workers=True):
        dl = pragma_dl(shards, max_tokens=500, shuffle=True, timeout=WAIT, **kw)
        for _ in range(2): batches = list(dl)
        del dl, batches
        gc.collect()
    assert not {o for o in set(os.listdir('/dev/shm'))-before if f'_{os.getpid()}_' in o}


@pytest.mark.parametrize('how', [None, 'spawn'])
def test_plans_of_persistent_workers_are_those_of_the_epoch(tmp_path, how):
    "Whatever epoch is asked for next, and wherever the one before was left"
    shards = write_shards(tmp_path/'shards', (60, 1, 17, 2))
    make = lambda **kw: pragma_dl(shards, max_tokens=500, shuffle=True, mask=True, seed=3, **kw)
    alone = make()
    want = {e: [(b['uids'], b['event_labels'].tolist()) for b in alone.dataset.batches(e)] for e in range(9)}
    dl = make(num_workers=2, persistent_workers=True, timeout=120, multiprocessing_context=how)
    for epoch, taken in (0, None), (1, 3), (2, 1), (7, None), (8, 2), (1, None), (0, 4), (0, None), (5, 3), (6, None):
        dl.set_epoch(epoch)
        got = [(b['uids'], b['event_labels'].tolist()) for b, _ in zip(dl, range(10**6 if taken is None else taken))]
        assert got == (want[epoch] if taken is None else want[epoch][:taken]), epoch
    state = dl.state_dict()
    again = make(num_workers=2, persistent_workers=True, timeout=120, multiprocessing_context=how)
    again.load_state_dict(state)
    assert again.epoch == 7 and [b['uids'] for b in again] == [u for u, _ in want[7]]


def test_what_waits_in_the_queue_is_not_written_to():
    "Batches that find no room lie in the slot in part; they are pickled when the next ones have been made there"
    ring = Ring(1, 2, 4096)
    def make(i):
        def batches(empty):
            a = empty(100, np.int64)
            a[:] = i
            return [dict(x=a, y=np.full(1000, i))]
        return batches
    def unlike(i): return lambda empty: [*make(i)(empty), dict(z=i)]
    for how in make, unlike:
        sent = [ring.send(0, how(i)) for i in range(5)]
        for i, message in enumerate(sent):
            f, args = message[0].__reduce__() if isinstance(message, list) else message.__reduce__()
            b = f(*args)
            if isinstance(b, list): b = b[0]
            assert b['x'].tolist() == [i]*100 and b['y'].tolist() == [i]*1000


@pytest.mark.parametrize('how', ['fork', 'forkserver', 'spawn'])
@pytest.mark.parametrize('kw', [dict(max_tokens=30), dict(max_tokens=60, rank=5, world_size=6), dict(max_tokens=30, oversize='cut')], ids=str)
def test_records_over_the_budget_come_from_workers_as_they_are(tmp_path, how, kw):
    "Contents, not ids alone: such batches are larger than a slot"
    shards = write_shards(tmp_path/'s', (150, 1, 40, 9))
    make = lambda **more: pragma_dl(shards, shuffle=True, mask=True, seed=3, **kw, **more)
    want = [key(b) for b in make()]
    assert any(b['uids'] == [None] for b in make()) == ('rank' in kw)   # a rank that gets no record in some step
    for n in (1, 2) if how == 'fork' else (2,): assert [key(b) for b in make(num_workers=n, multiprocessing_context=how, timeout=WAIT)] == want, n


@pytest.mark.parametrize('collate', [{}, dict(collate_fn=None)], ids=['given', "torch's own"])
def test_sealed_parcels_pass_through_a_collate_function(tmp_path, collate):
    shards = write_shards(tmp_path/'s', (150,))
    kw = dict(max_tokens=30, shuffle=True)
    want = [key(b) for b in PRAGMADataLoader(shards, **kw)]
    dl = EpochDataLoader(PRAGMADataLoader(shards, **kw), batch_size=None, num_workers=2, timeout=WAIT, **(collate or dict(collate_fn=lambda b: b)), multiprocessing_context='fork')
    assert [key(b) for b in dl] == want


def test_a_forked_process_frees_nothing(shards, monkeypatch):
    "It has copies of the batches that are kept here, and lets go of them"
    monkeypatch.setattr(handover, 'bunch_size', lambda *a: 2)           # so that slots are soon used again
    dl = pragma_dl(shards, max_tokens=150, shuffle=True, mask=True, num_workers=1, timeout=WAIT)
    it = iter(dl)
    kept = [next(it) for _ in range(6)]
    want = [key(b) for b in kept]
    def let_go():
        kept.clear()
        gc.collect()
    p = get_context('fork').Process(target=let_go)
    p.start(); p.join()
    assert p.exitcode == 0
    rest = [key(b) for b in it]
    assert len(rest) > 40 and [key(b) for b in kept] == want


def test_writing_into_a_batch_changes_no_other(shards):
    want = [key(b) for b in PRAGMADataLoader(shards, max_tokens=150, shuffle=True, mask=True)]
    dl = pragma_dl(shards, max_tokens=150, shuffle=True, mask=True, num_workers=2, timeout=WAIT)
    got = []
    for b in dl:
        got.append(key(b))
        for v in b.values():
            if isinstance(v, torch.Tensor): v.zero_()
    assert got == want


@pytest.mark.parametrize('n', [0, 2])
def test_a_subclass_makes_batches_in_its_own_way(shards, n):
    class Extra(PRAGMADataLoader):
        def make(self, groups, *args, **kw):
            bunch = super().make(groups, *args, **kw)
            for b in bunch: b['extra'] = np.array([len(b['uids'])])
            return bunch
    dl = EpochDataLoader(Extra(shards, max_tokens=500), batch_size=None, num_workers=n, timeout=WAIT if n else 0, multiprocessing_context='fork' if n else None)
    assert [b['extra'].tolist() for b in dl] == [[len(b['uids'])] for b in PRAGMADataLoader(shards, max_tokens=500)]


@pytest.mark.parametrize('how', ['fork', 'spawn'])
@pytest.mark.parametrize('collate', [double, as_pair], ids=['a batch', 'a tuple'])
def test_a_collate_function_gets_each_batch_where_it_is_made(shards, how, collate):
    make = lambda **kw: EpochDataLoader(PRAGMADataLoader(shards, max_tokens=500, shuffle=True), batch_size=None, collate_fn=collate, **kw)
    flat = lambda o: [v.tolist() if isinstance(v, torch.Tensor) else v for v in (o.values() if isinstance(o, dict) else o)]
    want = list(map(flat, make()))
    assert list(map(flat, make(num_workers=2, timeout=WAIT, multiprocessing_context=how))) == want


@pytest.mark.parametrize('room', [0, 60_000, 400_000])
def test_little_shared_memory(shards, monkeypatch, room):
    "Slots take no more than there is; without slots batches travel in blocks of their own"
    rings, ring_for = [], handover.ring_for
    monkeypatch.setattr('fastseqprep.dataloader.ring_for', lambda *a, **kw: rings.append(r := ring_for(*a, room=room, **kw)) or r)
    got = [key(b) for b in pragma_dl(shards, max_tokens=150, shuffle=True, mask=True, num_workers=2, timeout=WAIT)]
    assert got == [key(b) for b in PRAGMADataLoader(shards, max_tokens=150, shuffle=True, mask=True)]
    assert len(rings[0][0].slots) <= room and (rings[0][0].n_slots == 0) == (room < 100_000)


def test_shared_memory_that_is_full(monkeypatch):
    made = Ring.__init__
    def full(self, n_workers, n_slots, size):
        if n_slots: raise RuntimeError('unable to allocate shared memory(shm)')
        made(self, n_workers, n_slots, size)
    monkeypatch.setattr(Ring, '__init__', full)
    assert handover.ring_for(12_000, 2, 2)[0].n_slots == 0


def test_keeping_all_batches_takes_few_files(tmp_path):
    "A block of shared memory is an open file: one for a bunch of batches, not one for each"
    shards = write_shards(tmp_path/'s', (600,))
    open_files = lambda: len(os.listdir('/proc/self/fd'))
    if not os.path.isdir('/proc/self/fd'): pytest.skip('open files cannot be counted here')
    dl = pragma_dl(shards, max_tokens=150, shuffle=True, num_workers=2, timeout=WAIT)
    before = open_files()
    kept = list(dl)
    assert len(kept) > 200 and open_files()-before < len(kept)/8


def test_a_saved_batch_is_no_larger_than_it_is(shards):
    b = next(iter(pragma_dl(shards, max_tokens=500, num_workers=2, timeout=WAIT)))
    alone = next(iter(pragma_dl(shards, max_tokens=500)))
    sizes = []
    for o in (b, alone):
        f = io.BytesIO()
        torch.save(o, f)
        sizes.append(len(f.getvalue()))
    assert sizes[0] < 1.2*sizes[1]


def test_what_a_loader_of_planned_batches_refuses(shards):
    ds = PRAGMADataLoader(shards, max_tokens=500)
    with pytest.raises(ValueError, match='in_order=False would give'): EpochDataLoader(ds, batch_size=None, num_workers=2, in_order=False)
    for n in '2', 1.5, -1:
        with pytest.raises(ValueError, match='num_workers is the number of worker processes'): EpochDataLoader(ds, batch_size=None, num_workers=n)
