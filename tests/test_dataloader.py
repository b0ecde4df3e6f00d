"An epoch is planned once: each record once, the same batches for any number of ranks and workers, an exact length."
import pickle, random, subprocess, sys, time, warnings
from itertools import zip_longest

import numpy as np, polars as pl, pyarrow as pa, pyarrow.parquet as pq, pytest, torch
from torch.utils.data import DataLoader

from fastseqprep.dataloader import EpochDataLoader, Plan, PRAGMADataLoader, batch_starts, pack_batch, permutation, pragma_dl
from fastseqprep.masking import mask_batch

pytestmark = pytest.mark.filterwarnings('ignore:This DataLoader will create', 'error:Length of IterableDataset')
WAIT = 120 # seconds after which a worker that hangs fails the test


def write_shards(folder, sizes=(150, 1, 40, 9), seed=0, text_ids=True):
    "Shards of very unequal size; records of 1 to some 200 tokens, one of 3000"
    rng, uid = np.random.default_rng(seed), 0
    folder.mkdir(exist_ok=True)
    for s, size in enumerate(sizes):
        cols = {k: [] for k in 'user_id key key_id val_id val_pos time logsec source_idx event_idx'.split()}
        for _ in range(size):
            n_events = 1000 if uid == 77 else int(rng.geometric(.05)) - 1
            event = np.concatenate([[-1], np.repeat(np.arange(n_events), 3)])
            key = np.where(event < 0, 5, np.r_[5, np.tile([6, 7, 7], n_events)])
            piece = np.r_[0, np.tile([0, 0, 1], n_events)]
            cols['user_id'] += [f'u{uid:04}' if text_ids else uid]*len(event)
            for k, v in dict(key=np.array(list('abcdefgh'))[key], key_id=key, val_id=rng.integers(3, 500, len(key)), val_pos=piece, time=event*60,
                             logsec=(event.max()-event)*1., source_idx=np.minimum(event, 0), event_idx=event).items(): cols[k] += v.tolist()
            uid += 1
        n = len(cols['key'])
        pq.write_table(pa.table({**cols, 'hour': np.full(n, 3.), 'dow': np.full(n, 2.), 'dom': np.full(n, 1.)}), folder/f'shard_{s}.parquet')
    return folder


@pytest.fixture(scope='module')
def shards(tmp_path_factory):
    folder = write_shards(tmp_path_factory.mktemp('loader')/'shards')
    PRAGMADataLoader(folder)
    return folder


def key(b): return [v if k == 'uids' else (v.shape, v.numpy().tobytes()) for k, v in b.items()]
def flat(uids): return [u for o in uids for u in o]


# ---------------------------------------------------------------- plan

def greedy(lengths, budget):
    batches = [[]]
    for i, n in enumerate(lengths):
        if batches[-1] and sum(lengths[j] for j in batches[-1]) + n > budget: batches.append([])
        batches[-1].append(i)
    return [b for b in batches if b]


def test_batches_are_filled_greedily():
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.choice([0, 1, 2, 5, 9, 30]) for _ in range(rng.randint(0, 40))]
        budget = rng.randint(1, 25)
        assert [o.tolist() for o in Plan(lengths, budget)[:]] == greedy(lengths, budget)
        shuffled = Plan(lengths, budget, shuffle=True, seed=3)
        order = shuffled.order.tolist()
        assert [o.tolist() for o in shuffled] == [[order[j] for j in b] for b in greedy([lengths[i] for i in order], budget)]
        assert len(shuffled) == len(list(shuffled)) and shuffled.n_tokens.sum() == sum(lengths)


def test_orders_never_change_from_release_to_release():
    assert permutation(10, 0, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert permutation(10, 5, 7).tolist() == [3, 0, 9, 5, 7, 4, 1, 6, 2, 8]
    assert permutation(100_000, 1, 2)[:5].tolist() == [11771, 22159, 87225, 21471, 70668]


def test_orders_are_uniform_and_unrelated():
    n = 20_000
    orders = [permutation(n, s, e) for s in range(3) for e in range(3)]
    assert all((np.sort(o) == np.arange(n)).all() for o in orders)
    assert abs(np.corrcoef(np.array(orders)) - np.eye(9)).max() < .04
    for o in orders: assert np.mean(abs(np.diff(np.argsort(o)))) == pytest.approx(n/3, rel=.03)


def test_records_of_the_plan_are_each_there_once_over_ranks_and_workers(shards):
    ds = PRAGMADataLoader(shards, max_tokens=300, shuffle=True)
    plan = ds.plan_of(4)
    for world in range(1, 6):
        for n in (0, 1, 2, 4, 9):
            seen = {}
            for w in range(max(n, 1)):
                for k in plan.for_worker(w, n):
                    assert k not in seen
                    seen[k] = [plan.share(k, r, world).tolist() for r in range(world)]
            assert sorted(seen) == list(range(len(plan)))
            for k, parts in seen.items(): assert [i for t in zip_longest(*parts) for i in t if i is not None] == plan[k].tolist()


# ---------------------------------------------------------------- in this process

def test_each_entity_once_and_length_exact(shards):
    for kw in dict(), dict(shuffle=True), dict(shuffle=True, batch_size=7), dict(shuffle=True, seed=9, max_tokens=100), dict(mask=True):
        ds = PRAGMADataLoader(shards, **{'max_tokens': 400, **kw})
        for epoch in range(4):
            n, got = len(ds), [b['uids'] for b in ds]
            assert len(got) == n
            assert sorted(flat(got)) == [f'u{i:04}' for i in range(200)]


def test_shuffle_crosses_shards_and_changes_with_seed_and_epoch(shards):
    uids = lambda **kw: flat(b['uids'] for b in PRAGMADataLoader(shards, **kw))
    assert uids() == [f'u{i:04}' for i in range(200)]
    ds = PRAGMADataLoader(shards, shuffle=True)
    first, second = flat(b['uids'] for b in ds), flat(b['uids'] for b in ds)
    assert len({tuple(o) for o in (first, second, uids(shuffle=True, seed=1), uids())}) == 4
    assert uids(shuffle=True) == first
    places = [i for i, u in enumerate(first) if u >= 'u0151'] # of the small shards
    assert min(places) < 40 and max(places) > 160


def test_lengths_need_no_data(shards, monkeypatch):
    ds = PRAGMADataLoader(shards, max_tokens=300, shuffle=True)
    monkeypatch.setattr(pq, 'ParquetFile', None)
    monkeypatch.setattr(type(ds.recs), 'gather', None)
    n = len(PRAGMADataLoader(shards, max_tokens=300, shuffle=True))
    assert n == len(ds) > 10


def test_loader_batches_are_packed_records(shards):
    ds = PRAGMADataLoader(shards, max_tokens=700, shuffle=True)
    for b, idx in zip(ds, ds.plan_of(0)):
        want = pack_batch([ds.recs.record(i) for i in idx])
        assert list(b) == list(want) and key(b) == key(want)
        assert all(b[k].dtype == want[k].dtype for k in b if k != 'uids')


def test_budget_and_oversize(shards):
    ds = PRAGMADataLoader(shards, max_tokens=500)
    sizes = [(len(b['event_tokens']) + int(b['profile_mask'].sum()), b['uids']) for b in ds]
    assert [u for n, u in sizes if n > 500] == [['u0077']]
    cut = PRAGMADataLoader(shards, max_tokens=500, max_events=10, max_event_toks=2)
    assert max(len(b['event_tokens']) for b in cut) <= 500 and cut.recs.ntoks.max() == 21


def test_masks_depend_on_the_record_alone(shards):
    def masks(**kw):
        res = {}
        for b in PRAGMADataLoader(shards, mask=True, **kw):
            ends = b['event_offsets'][b['history_offsets'] - torch.arange(len(b['history_offsets']))].tolist()
            res |= {u: b['event_labels'][s:t].tolist() for u, s, t in zip(b['uids'], ends, ends[1:])}
        return res
    base = masks()
    assert masks(max_tokens=100, shuffle=True) == base == masks(batch_size=3)
    assert masks(rank=0, world_size=3) | masks(rank=1, world_size=3) | masks(rank=2, world_size=3) == base
    assert masks(seed=1) != base != masks(p_tok=.3)
    b = next(iter(PRAGMADataLoader(shards, seed=5)))
    m = next(iter(PRAGMADataLoader(shards, seed=5, mask=True)))
    assert key(mask_batch(b, None, seed=5)) == key(m)


def test_ranks_have_equal_lengths_and_share_each_batch(shards):
    whole = [b['uids'] for b in PRAGMADataLoader(shards, max_tokens=300, shuffle=True)]
    for world in 2, 3, 50:
        ranks = [PRAGMADataLoader(shards, max_tokens=300, shuffle=True, rank=r, world_size=world) for r in range(world)]
        assert {len(ds) for ds in ranks} == {len(whole)}
        got = [[b['uids'] for b in ds] for ds in ranks]
        for k, want in enumerate(whole): assert sorted(flat(g[k] for g in got)) == sorted(want)


def test_integer_ids(tmp_path):
    ds = PRAGMADataLoader(write_shards(tmp_path/'ints', (20, 5), text_ids=False))
    uids = flat(b['uids'] for b in ds)
    assert uids == list(range(25)) and {type(u) for u in uids} == {int}


def test_epochs_in_this_process(shards):
    ds = PRAGMADataLoader(shards, max_tokens=300, shuffle=True)
    epochs = [[b['uids'] for b in ds] for _ in range(3)]
    ds.set_epoch(1)
    assert ds.epoch == 1 and [b['uids'] for b in ds] == epochs[1]
    assert [b['uids'] for b in ds] == epochs[2]
    ds.set_epoch(0)
    for b in ds: break
    it = iter(ds)
    assert ds.epoch == 1 and len(ds) == len(epochs[1])
    assert [b['uids'] for b in it] == epochs[1]


# ---------------------------------------------------------------- with workers

def test_any_number_of_workers_gives_the_same_stream(shards):
    pl.DataFrame({'a': range(10_000)}).lazy().group_by(b=pl.col('a') % 7).agg(pl.col('a').sum()).collect() # polars ran before the fork
    runs = {}
    for n in (0, 1, 2, 4, 9):
        dl = pragma_dl(shards, max_tokens=2500, shuffle=True, mask=True, num_workers=n, timeout=WAIT if n else 0, multiprocessing_context='fork' if n else None)
        runs[n] = []
        for _ in range(2):
            length, got = len(dl), [key(b) for b in dl]
            assert len(got) == length
            runs[n] += got
    assert len(runs[0]) > 2 and all(r == runs[0] for r in runs.values())


@pytest.mark.parametrize('how', ['fork', 'forkserver', 'spawn'])
def test_start_methods_and_persistent_workers(shards, how):
    pl.read_parquet(shards/'shard_0.parquet').group_by('user_id').len()
    plain = pragma_dl(shards, max_tokens=2000, shuffle=True, mask=True)
    want = [[key(b) for b in plain] for _ in range(3)]
    assert want[0] != want[1]
    dl = pragma_dl(shards, max_tokens=2000, shuffle=True, mask=True, num_workers=2, persistent_workers=True, timeout=WAIT, multiprocessing_context=how)
    assert [key(b) for b in dl] == want[0]
    for b in dl: break # epoch 1, left early
    assert len(dl) == len(want[2]) and [key(b) for b in dl] == want[2]
    dl.set_epoch(1)
    assert [key(b) for b in dl] == want[1]


class SlowStart(PRAGMADataLoader):
    "Workers that wake one after another, as on a busy machine"
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        if info is not None: time.sleep(.4*info.id)
        return super().__iter__()


def test_a_worker_that_wakes_late_reads_the_same_epoch(shards):
    want = PRAGMADataLoader(shards, 'user_id', 500, shuffle=True)
    dl = EpochDataLoader(SlowStart(shards, 'user_id', 500, shuffle=True), batch_size=None, num_workers=2, persistent_workers=True, collate_fn=lambda b: b, timeout=WAIT)
    for epoch in (0, 1, 2): assert [b['uids'] for b in dl] == [b['uids'] for b in want], epoch
    dl.set_epoch(1)
    want.set_epoch(1)
    assert [b['uids'] for b in dl] == [b['uids'] for b in want]


def test_chosen_records_only(shards):
    every = PRAGMADataLoader(shards)
    odd = PRAGMADataLoader(shards, max_tokens=300, shuffle=True, records=np.arange(len(every.recs)) % 2 == 1)
    assert sorted(flat(b['uids'] for b in odd)) == every.recs.uid_list(np.arange(1, len(every.recs), 2))


def test_two_loops_at_once(shards):
    dl = pragma_dl(shards, max_tokens=2000, shuffle=True, num_workers=1, timeout=WAIT)
    pairs = list(zip_longest(dl, dl))
    plain = PRAGMADataLoader(shards, max_tokens=2000, shuffle=True)
    for side in 0, 1: assert [p[side]['uids'] for p in pairs if p[side]] == [b['uids'] for b in plain]


def test_a_loader_made_by_hand(shards):
    ds = PRAGMADataLoader(shards, max_tokens=2000, shuffle=True)
    want = [[key(b) for b in ds] for _ in range(2)]
    for kw in dict(num_workers=2), dict(num_workers=2, persistent_workers=True), dict(num_workers=0):
        ds = PRAGMADataLoader(shards, max_tokens=2000, shuffle=True)
        dl = DataLoader(ds, batch_size=None, **kw)
        for e in (0, 1, 0):
            ds.set_epoch(e)
            assert len(dl) == len(want[e]) and [key(b) for b in dl] == want[e]


def test_workers_get_names_not_data_and_never_load_polars(shards):
    ds = PRAGMADataLoader(shards, max_tokens=300, shuffle=True, mask=True)
    data = pickle.dumps(ds)
    assert len(data) < 3000
    code = f'import pickle, sys\nds = pickle.loads({data!r})\nprint(sum(len(b["uids"]) for b in ds), len([m for m in sys.modules if m.startswith("polars")]))'
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=WAIT)
    assert out.stdout.split() == ['200', '0'], out.stderr


def test_ids_come_through_a_torch_loader_as_they_are(shards):
    b = next(iter(pragma_dl(shards, num_workers=1, timeout=WAIT)))
    assert isinstance(b['uids'], list) and all(type(u) is str for u in b['uids'])
    assert isinstance(pragma_dl(shards), EpochDataLoader) and isinstance(pragma_dl(shards), DataLoader)


# ---------------------------------------------------------------- mistakes

def test_mistakes_are_named(shards, tmp_path):
    for bad, words in [(dict(rank=3, world_size=3), 'rank=3'), (dict(p_tok=.5), 'p_tok .*mask=True'), (dict(entity_col='client'), "'client'")]:
        with pytest.raises(ValueError, match=words): PRAGMADataLoader(shards, **bad)
    with pytest.raises(TypeError, match='p_token'): PRAGMADataLoader(shards, mask=True, p_token=.5)
    with pytest.raises(ValueError, match='at least one record'): pack_batch([])
    with pytest.raises(FileNotFoundError, match='nowhere'): PRAGMADataLoader(tmp_path/'nowhere')
    with pytest.raises(IndexError, match='Batch 9 of a plan of 1'): Plan([1, 2])[9]
