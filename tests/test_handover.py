"Batches that come from workers may be kept for as long as one likes."
import gc, os

import numpy as np, pytest

from fastseqprep.dataloader import EpochDataLoader, PRAGMADataLoader, pragma_dl
from fastseqprep.handover import Ring
from test_dataloader import WAIT, key, write_shards

pytestmark = pytest.mark.filterwarnings('ignore:This DataLoader will create')


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
        for i, parcels in enumerate(sent):
            f, args = parcels[0].__reduce__()
            b = f(*args)
            assert b['x'].tolist() == [i]*100 and b['y'].tolist() == [i]*1000


@pytest.mark.parametrize('how', ['fork', 'forkserver', 'spawn'])
@pytest.mark.parametrize('kw', [dict(max_tokens=30), dict(max_tokens=12_000, rank=0, world_size=40), dict(max_tokens=30, oversize='cut')], ids=str)
def test_records_over_the_budget_come_from_workers_as_they_are(tmp_path, how, kw):
    "Contents, not ids alone: such batches are larger than a slot"
    shards = write_shards(tmp_path/'s', (150, 1, 40, 9))
    make = lambda **more: pragma_dl(shards, shuffle=True, mask=True, seed=3, **kw, **more)
    want = [key(b) for b in make()]
    for n in (1, 2) if how == 'fork' else (2,): assert [key(b) for b in make(num_workers=n, multiprocessing_context=how, timeout=WAIT)] == want, n


@pytest.mark.parametrize('collate', [{}, dict(collate_fn=None)], ids=['given', "torch's own"])
def test_sealed_parcels_pass_through_a_collate_function(tmp_path, collate):
    shards = write_shards(tmp_path/'s', (150,))
    kw = dict(max_tokens=30, shuffle=True)
    want = [key(b) for b in PRAGMADataLoader(shards, **kw)]
    dl = EpochDataLoader(PRAGMADataLoader(shards, **kw), batch_size=None, num_workers=2, timeout=WAIT, **(collate or dict(collate_fn=lambda b: b)), multiprocessing_context='fork')
    assert [key(b) for b in dl] == want
