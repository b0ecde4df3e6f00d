"An epoch is planned once: each record once, the same batches for any number of ranks and workers, an exact length."
import itertools, json, pickle, subprocess, sys, time
from itertools import zip_longest

import numpy as np, polars as pl, pyarrow as pa, pyarrow.parquet as pq, pytest, torch
from torch.utils.data import DataLoader

from fastseqprep.dataloader import EpochDataLoader, PRAGMADataLoader, pack_batch, place_from_torchdata, pragma_dl
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


@pytest.mark.parametrize('kw', [dict(max_tokens=40), dict(max_tokens=333, shuffle=True), dict(max_tokens=10_000, max_batch_events=11), dict(max_tokens=100, max_batch_events=7, mask=True)])
def test_a_record_over_the_budget_loses_its_oldest_events(shards, kw):
    whole = PRAGMADataLoader(shards, oversize='alone', **kw)
    ds = PRAGMADataLoader(shards, oversize='cut', **kw)
    budget, most = kw['max_tokens'], kw.get('max_batch_events', 10**9)
    assert (whole.recs.ntoks > budget).any() or (whole.recs.events.lengths > most).any()
    seen = []
    for b in ds:
        seen += b['uids']
        assert len(b['event_tokens']) + int(b['profile_mask'].sum() + b['lifelong_mask'].sum()) <= budget and len(b['event_user']) <= most
    assert sorted(seen) == [f'u{i:04}' for i in range(200)]
    for i in range(200):
        full, short = whole.recs.record(i), ds.recs.record(i)
        sizes = np.array([len(e) for e in full['events']], int)
        fixed = len(full['profile']) + len(full['lifelong'])
        keep = max((k for k in range(len(sizes)+1) if k <= most and fixed + sizes[len(sizes)-k:].sum() <= budget))
        assert [e.tolist() for e in short['events']] == [e.tolist() for e in full['events'][len(sizes)-keep:]]
        assert short['event_time'].tolist() == full['event_time'][len(sizes)-keep:].tolist()
    if 'mask' not in kw: assert [key(b) for b in PRAGMADataLoader(shards, oversize='cut', **kw)] == [key(b) for w in [DataLoader(PRAGMADataLoader(shards, oversize='cut', **kw), batch_size=None, num_workers=2)] for b in w]


@pytest.mark.parametrize('how', ['fork', 'forkserver', 'spawn'])
def test_workers_cut_what_is_cut_here(shards, how):
    make = lambda **kw: pragma_dl(shards, max_tokens=60, max_batch_events=25, oversize='cut', shuffle=True, **kw)
    want = [key(b) for b in make()]
    got = list(make(num_workers=2, multiprocessing_context=how, timeout=WAIT))
    assert [key(b) for b in got] == want
    assert max(len(b['event_tokens']) for b in got) <= 60 and max(len(b['event_user']) for b in got) <= 25


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


OPTIONS = [dict(), dict(whole_value=True), dict(exact_share=.3), dict(exact_share=.3, whole_value=True, unk_targets=True), dict(unk_targets=True, p_unk=.5), dict(p_tok=1., p_event=0., p_key=0.)]


@pytest.mark.parametrize('kw', OPTIONS, ids=str)
def test_bunches_are_batches_made_one_by_one(shards, kw):
    "For every option of masks, budgets with one batch in a bunch or 32, an oversize record, ranks, and a start in mid-bunch"
    rng = np.random.default_rng(0)
    for budget in dict(max_tokens=60_000), dict(max_tokens=700), dict(max_tokens=90), dict(batch_size=7), dict(max_tokens=500, max_events=3, max_event_toks=2):
        for world in 1, 3:
            ds = PRAGMADataLoader(shards, shuffle=True, mask=True, seed=3, rank=world-1, world_size=world, **budget, **kw)
            plan, todo = ds.plan_of(1), ds.steps(1)
            want = []
            for k in todo:
                idx = plan.share(k, ds.rank, world)
                if len(idx): b = ds.masker(ds.recs.gather(idx), ds.recs.record_hash[idx], 1)   # the simple way: wide tokens, one batch
                else: b = {k: v for k, v in ds.batch(idx, 1, rows=1).items()}
                want.append([v if k == 'uids' else (v.shape, np.asarray(v).tobytes()) for k, v in b.items()])
            for start in {0, 1, len(plan)-1, int(rng.integers(len(plan)))}:
                got = [key({k: v for k, v in b.items() if k != 'real'}) for b in ds.batches(1, start=start)]
                assert got == want[start:]
            assert [key({k: v for k, v in b.items() if k != 'real'}) for b in ds.batches(1, worker=1, n_workers=3)] == want[1::3]


def test_unknown_values_are_no_targets_unless_told(tmp_path):
    folder = write_shards(tmp_path/'s', (60,))
    for f in folder.glob('*.parquet'):
        t = pq.read_table(f)
        val = t['val_id'].to_numpy().copy()
        val[::3] = 2
        pq.write_table(t.set_column(t.schema.get_field_index('val_id'), 'val_id', pa.array(val)), f)
    labels = lambda **kw: torch.cat([b['event_labels'] for b in pragma_dl(folder, mask=True, **kw)])
    for kw in {}, dict(num_workers=1, timeout=WAIT):
        assert (labels(unk_targets=True, **kw) == 2).any() and not (labels(**kw) == 2).any() and (labels(**kw) > 2).any()


def test_batches_of_a_bunch_share_nothing(shards):
    ds = PRAGMADataLoader(shards, max_tokens=300, shuffle=True, mask=True)
    want = [key(b) for b in ds.batches(0)]
    for b, w in zip(ds.batches(0), want, strict=True):
        assert key(b) == w
        for k, v in b.items():
            if k != 'uids':
                assert v.is_contiguous()
                v.zero_()


def test_the_loader_under_it_needs_no_torch(shards):
    code = f"""import sys; sys.modules['torch'] = None
import numpy as np
from fastseqprep.loader import RecordLoader
for world in 1, 2:
    ds = RecordLoader({str(shards)!r}, max_tokens=700, shuffle=True, mask=True, rank=0, world_size=world)
    for b in ds: print(int(b['event_tokens'].sum()), int(b['event_labels'].sum()), b['uids'])
    ds.load_state_dict(ds.state_dict())
print(ds.epoch)"""
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=WAIT)
    want = [f"{int(b['event_tokens'].sum())} {int(b['event_labels'].sum())} {b['uids']}" for world in (1, 2)
            for b in PRAGMADataLoader(shards, max_tokens=700, shuffle=True, mask=True, rank=0, world_size=world)]
    assert out.stdout.splitlines() == [*want, '1'], out.stderr


def real(b): return [u for u, r in zip(b['uids'], b['real'].tolist()) if r] if 'real' in b else b['uids']


@pytest.mark.parametrize('per_rank', [False, True])
@pytest.mark.parametrize('last', ['fill', 'drop'])
def test_equal_lengths_on_all_ranks(shards, per_rank, last):
    plan = PRAGMADataLoader(shards, max_tokens=300, shuffle=True).plan_of(0)
    for world in 2, 3, 50:
        ranks = [PRAGMADataLoader(shards, max_tokens=300, shuffle=True, mask=True, per_rank=per_rank, last=last, rank=r, world_size=world) for r in range(world)]
        got = [list(ds) for ds in ranks]
        n = (len(plan)-plan.is_short*(last == 'drop'))
        n = n if not per_rank else n//world if last == 'drop' else -(-n//world)
        assert {len(g) for g in got} == {len(PRAGMADataLoader(shards, max_tokens=300, shuffle=True, per_rank=per_rank, last=last, rank=0, world_size=world))} == {n}
        uids = ranks[0].recs.uid_list
        for k in range(n): # the same steps for any number of ranks
            want = plan[k] if not per_rank else np.concatenate(plan[k*world:(k+1)*world])
            assert sorted(flat(real(g[k]) for g in got)) == sorted(uids(want))
            for g in got:
                b = g[k]
                assert len(b['uids']) == len(b['real']) == len(b['history_offsets'])-1 == len(b['profile']) >= 1
                assert b['real'].all() or (b['uids'] == [None] and len(b['event_labels']) == 0)
        if last == 'drop' and per_rank: assert all(b['real'].all() for g in got for b in g)
        assert all(list(b) == list(got[0][0]) and all(b[k].dtype == got[0][0][k].dtype for k in b if k != 'uids') for g in got for b in g)


def test_each_record_once_over_ranks_and_workers(tmp_path):
    "1 to 5 ranks, 0 to 4 workers, four shards of 60, 1, 17 and 2 records: in real processes, with more ranks than shards"
    folder = write_shards(tmp_path/'skewed', (60, 1, 17, 2))
    kw = dict(max_tokens=700, shuffle=True)
    plan = PRAGMADataLoader(folder, **kw).plan_of(0)
    everyone = [f'u{i:04}' for i in range(80)]
    for world, per_rank in itertools.product(range(1, 6), (False, True)):
        streams = {}
        for r in range(world):
            for n in range(5):
                dl = pragma_dl(folder, num_workers=n, timeout=WAIT if n else 0, multiprocessing_context='fork' if n else None, rank=r, world_size=world, per_rank=per_rank, **kw)
                got = [real(b) for b in dl]
                assert len(got) == len(plan.steps(world, per_rank=per_rank))
                assert streams.setdefault(r, got) == got            # for any number of workers
        assert sorted(flat(flat(streams.values()))) == everyone
        steps = [sorted(flat(streams[r][k] for r in streams)) for k in range(len(streams[0]))]
        batches = [sorted(PRAGMADataLoader(folder, **kw).recs.uid_list(b)) for b in plan]
        assert steps == (batches if not per_rank else [sorted(flat(batches[k:k+world])) for k in range(0, len(plan), world)])


def test_rules_reach_the_plan(shards):
    events = PRAGMADataLoader(shards, max_batch_events=100)
    n = events.recs.lengths()['events']
    assert all(n[b].sum() <= 100 or len(b) == 1 for b in events.plan_of(0))
    for kw in dict(n_classes=4), dict(n_classes=4, class_by='events'), dict(lookahead=8), dict(shuffle='hash'), dict(shuffle='block', block=10), dict(max_batch_events=99):
        ds = PRAGMADataLoader(shards, **{'max_tokens': 500, 'shuffle': True, **kw})
        assert sorted(flat(b['uids'] for b in ds)) == [f'u{i:04}' for i in range(200)]
    ds = PRAGMADataLoader(shards, max_tokens=500, oversize='refuse', records=np.arange(50, 100))
    with pytest.raises(ValueError, match="Record 'u0077' has 3,001 tokens, more than max_tokens=500"): len(ds)


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


def test_record_numbers_are_whole(shards):
    with pytest.raises(ValueError, match='float64'): PRAGMADataLoader(shards, records=[1.7])


def test_chosen_records_only(shards):
    every = PRAGMADataLoader(shards)
    odd = PRAGMADataLoader(shards, max_tokens=300, shuffle=True, records=np.arange(len(every.recs)) % 2 == 1)
    assert sorted(flat(b['uids'] for b in odd)) == every.recs.uid_list(np.arange(1, len(every.recs), 2))


def test_two_loops_at_once(shards):
    dl = pragma_dl(shards, max_tokens=2000, shuffle=True, num_workers=1, timeout=WAIT)
    first = iter(dl)
    plain = PRAGMADataLoader(shards, max_tokens=2000, shuffle=True)
    want = [[b['uids'] for b in plain] for _ in range(3)]
    got = [next(first)['uids']], []                                    # the first has begun, so the second is the next epoch
    for pair in zip_longest(first, dl):
        for seen, b in zip(got, pair):
            if b is not None: seen.append(b['uids'])
    assert list(got) == want[:2] and [b['uids'] for b in dl] == want[2]


def test_a_loader_made_by_hand(shards):
    ds = PRAGMADataLoader(shards, max_tokens=2000, shuffle=True)
    want = [[key(b) for b in ds] for _ in range(2)]
    for kw in dict(num_workers=2), dict(num_workers=2, persistent_workers=True), dict(num_workers=0):
        ds = PRAGMADataLoader(shards, max_tokens=2000, shuffle=True)
        dl = DataLoader(ds, batch_size=None, **kw)
        for e in (0, 1, 0):
            ds.set_epoch(e)
            assert len(dl) == len(want[e]) and [key(b) for b in dl] == want[e]


@pytest.mark.parametrize('kw', [dict(), dict(persistent_workers=True), dict(multiprocessing_context='spawn')], ids=str)
def test_a_dataset_that_is_not_told_its_place_gives_none(shards, kw):
    ds = PRAGMADataLoader(shards, max_tokens=2000, shuffle=True)
    dl = DataLoader(ds, batch_size=None, num_workers=2, timeout=WAIT, **kw)
    assert ds.state_dict()['next_batch'] == 0
    it = iter(dl)
    next(it)
    with pytest.raises(RuntimeError, match='made by hand .* pragma_dl'): ds.state_dict()
    list(it)
    with pytest.raises(RuntimeError, match='made by hand'): ds.state_dict()
    ds.set_epoch(1)
    state = ds.state_dict()
    assert (state['epoch'], state['next_batch']) == (1, 0)              # where the next one begins is known
    assert len(list(dl)) == len(ds.plan_of(1))
    with pytest.raises(RuntimeError, match='made by hand'): ds.state_dict()
    ds.load_state_dict({**state, 'next_batch': 2})
    assert ds.state_dict()['next_batch'] == 2
    own = pragma_dl(shards, max_tokens=2000, shuffle=True, num_workers=2, timeout=WAIT)
    for k, b in enumerate(own): assert own.state_dict()['next_batch'] == k+1
    mixed = EpochDataLoader(ds, batch_size=None, num_workers=2, timeout=WAIT, collate_fn=as_is)    # the same dataset, now in good hands
    for k, b in enumerate(mixed): assert mixed.state_dict()['next_batch'] == k+3
    alone = DataLoader(ds, batch_size=None)
    for k, b in enumerate(alone): assert ds.state_dict()['next_batch'] == k+1                      # in this process it is known


def as_is(b): return b


@pytest.mark.parametrize('asked, kw', [(True, {}), (False, dict(shuffle=True)), (False, dict(mask=True)), (None, {})], ids=str)
def test_an_epoch_that_comes_twice_by_hand_is_warned_of(tmp_path, asked, kw):
    "In the worker, so on its stderr: if order or masks should have been others"
    shards = write_shards(tmp_path/'s', (40,))
    code = f"""import torch
from torch.utils.data import DataLoader
from fastseqprep.dataloader import PRAGMADataLoader
ds = PRAGMADataLoader({str(shards)!r}, max_tokens=500, **{ {'shuffle': True} if asked else kw})
dl = DataLoader(ds, batch_size=None, num_workers=2, multiprocessing_context='fork')
for e in (0, 1):
    if {asked}: ds.set_epoch(e)
    list(dl)"""
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=WAIT)
    assert out.returncode == 0, out.stderr
    assert out.stderr.count('batches of epoch 0 once more') == (asked is False), out.stderr


def test_batches_are_not_put_into_batches(shards):
    for kw in dict(), dict(batch_size=4), dict(num_workers=1, timeout=WAIT):
        with pytest.raises(TypeError, match='batch_size=None'): next(iter(DataLoader(PRAGMADataLoader(shards), **kw)))
    assert len(next(iter(DataLoader([{'x': torch.zeros(2)}]*3, batch_size=3)))['x']) == 3          # others are joined as ever


def test_epochs_are_whole_numbers_from_0(shards):
    for dl in PRAGMADataLoader(shards, shuffle=True), pragma_dl(shards, shuffle=True):
        dl.set_epoch(3)
        for e in -1, 1.5, 'a', None, True, 2**63, 2**64: 
            with pytest.raises(ValueError, match='0 to 2[*][*]63-1'): dl.set_epoch(e)
        assert dl.epoch == 3
        dl.set_epoch(np.uint8(5))
        assert json.loads(json.dumps(dl.state_dict()))['epoch'] == 5
    state = PRAGMADataLoader(shards, shuffle=True).state_dict()
    with pytest.raises(ValueError, match='epoch=9223372036854775808'): PRAGMADataLoader(shards, shuffle=True).load_state_dict({**state, 'epoch': 2**63})
    want = [b['uids'] for b in PRAGMADataLoader(shards, max_tokens=2000, shuffle=True).batches(2**63-2)]
    dl = pragma_dl(shards, max_tokens=2000, shuffle=True, num_workers=1, persistent_workers=True, timeout=WAIT)
    list(dl)
    dl.set_epoch(2**63-2)
    assert [b['uids'] for b in dl] == want


def test_parts_of_a_state_that_are_no_dicts_are_named(shards):
    ds = PRAGMADataLoader(shards, shuffle=True, mask=True)
    state = ds.state_dict()
    for k in 'plan', 'mask':
        for bad in [1], 'x', 3, True, *([None] if k == 'plan' else []):
            with pytest.raises(ValueError, match=f'The state has {k}=.*expected a dict'): ds.load_state_dict({**state, k: bad})
    with pytest.raises(ValueError, match='without masks'): ds.load_state_dict({**state, 'mask': None})


@pytest.mark.parametrize('n', [0, 1, 2, 3])
def test_a_state_of_torchdata_goes_into_any_loader(tmp_path, n):
    Stateful = pytest.importorskip('torchdata.stateful_dataloader', reason="torchdata is not installed; it is in the extra 'dev'").StatefulDataLoader
    shards = write_shards(tmp_path/'s', (60, 1, 17, 2))
    make = lambda **kw: PRAGMADataLoader(shards, **{'max_tokens': 700, 'shuffle': True, 'mask': True, **kw})
    stateful = lambda ds, n: Stateful(ds, batch_size=None, num_workers=n, collate_fn=as_is, **(dict(timeout=WAIT) if n else {}))
    want = [[key(b) for b in make().batches(e)] for e in range(2)]
    steps = len(want[0])
    for k in {0, 1, 2, steps//2, steps-1, steps, steps+1}:
        dl = stateful(make(), n)
        it = iter(dl)
        for _ in range(min(k, steps)): next(it)
        if k > steps: assert not list(it)
        state = json.loads(json.dumps(dl.state_dict()))
        place = place_from_torchdata(state)
        assert (place['epoch'], place['next_batch']) == ((0, k) if k <= steps else (1, 0)), k
        if k not in (2, steps-1): continue
        ds = make()
        ds.load_state_dict(place)
        assert [key(b) for b in stateful(ds, (n+1) % 4)] == want[0][k:]  # other workers of the same kind of loader
        dl = pragma_dl(shards, max_tokens=700, shuffle=True, mask=True, num_workers=1, timeout=WAIT)
        dl.load_state_dict(place)
        assert [key(b) for b in dl] == want[0][k:] and [key(b) for b in dl] == want[1]
        ranks = [make(rank=r, world_size=2) for r in range(2)]
        for r in ranks: r.load_state_dict(place)
        assert sorted(u for r in ranks for b in r for u in real(b)) == sorted(ds.recs.uid_list(np.concatenate(ds.plan_of(0)[k:])))
        again = stateful(make(), n)                                     # and of one that went on itself
        again.load_state_dict(state)
        next(iter(again))
        assert place_from_torchdata(again.state_dict())['next_batch'] == k+1
    with pytest.raises(ValueError, match='other data'): PRAGMADataLoader(write_shards(tmp_path/'o', (60,), seed=4), max_tokens=700, shuffle=True, mask=True).load_state_dict(place)
    for bad, words in [({}, 'no place'), (None, 'no place'), ({**state, '_steps_since_snapshot': 2}, 'snapshot_every_n_steps=1')]:
        with pytest.raises(ValueError, match=words): place_from_torchdata(bad)
    if n > 1:
        del state['_snapshot']['_worker_snapshots']['worker_1']
        with pytest.raises(ValueError, match='one place for each worker'): place_from_torchdata(state)


def test_workers_get_names_not_data_and_never_load_polars(shards):
    ds = PRAGMADataLoader(shards, max_tokens=300, shuffle=True, mask=True)
    data = pickle.dumps(ds)
    assert len(data) < 3000
    code = f'import pickle, sys\nds = pickle.loads({data!r})\nprint(sum(len(b["uids"]) for b in ds), len([m for m in sys.modules if m.startswith("polars")]))'
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=WAIT)
    assert out.stdout.split() == ['200', '0'], out.stderr


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc')
def test_memory_is_flat(tmp_path):
    "Workers that live on do not grow from epoch to epoch"
    dl = pragma_dl(write_shards(tmp_path/'m', (600,)), max_tokens=1000, shuffle=True, mask=True, num_workers=2, persistent_workers=True, timeout=WAIT)
    def resident(): return sum(int(l.split()[1]) for w in dl._iterator._workers for l in open(f'/proc/{w.pid}/status') if l.startswith(('RssAnon', 'RssShmem')))
    sizes = []
    for epoch in range(12):
        for b in dl: pass
        sizes.append(resident())
    assert max(sizes[-3:]) < max(sizes[2:5]) + 4000                    # kB


def test_ids_come_through_a_torch_loader_as_they_are(shards):
    b = next(iter(pragma_dl(shards, num_workers=1, timeout=WAIT)))
    assert isinstance(b['uids'], list) and all(type(u) is str for u in b['uids'])
    assert isinstance(pragma_dl(shards), EpochDataLoader) and isinstance(pragma_dl(shards), DataLoader)


# ---------------------------------------------------------------- mistakes

def test_mistakes_are_named(shards, tmp_path):
    for bad, words in [(dict(rank=3, world_size=3), 'rank=3'), (dict(rank=1), 'both rank and world_size'), (dict(last='keep'), "'keep'"), (dict(p_tok=.5), 'p_tok .*mask=True'), (dict(entity_col='client'), "'client'")]:
        with pytest.raises(ValueError, match=words): PRAGMADataLoader(shards, **bad)
    with pytest.raises(TypeError, match='p_token'): PRAGMADataLoader(shards, mask=True, p_token=.5)
    with pytest.raises(ValueError, match='at least one record'): pack_batch([])
    with pytest.raises(FileNotFoundError, match='nowhere'): PRAGMADataLoader(tmp_path/'nowhere')


# ---------------------------------------------------------------- what is left alone, and what is refused

@pytest.mark.parametrize('n', [0, 2])
def test_no_global_generator_is_touched(shards, n):
    import random
    dl = pragma_dl(shards, max_tokens=700, shuffle=True, mask=True, num_workers=n, timeout=WAIT if n else 0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert sum(len(b['uids']) for _ in range(2) for b in dl) == 2*len(dl.dataset.recs)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize('kw', [dict(), dict(num_workers=2, timeout=WAIT), dict(num_workers=2, timeout=WAIT, persistent_workers=True)])
def test_an_iterator_of_which_nothing_is_taken_begins_nothing(shards, kw):
    plain = pragma_dl(shards, max_tokens=700, shuffle=True)
    want = [[b['uids'] for b in plain] for _ in range(3)]
    dl = pragma_dl(shards, max_tokens=700, shuffle=True, **kw)
    def whole(it): return [b['uids'] for b in it]
    iter(dl)
    assert whole(iter(dl)) == want[0]
    kept = iter(dl), iter(dl)
    assert dl.epoch == 1 and dl.state_dict()['next_batch'] == 0
    assert whole(dl) == want[1]
    del kept
    dl.load_state_dict({**dl.state_dict(), 'epoch': 2, 'next_batch': 3})
    iter(dl)
    assert whole(dl) == want[2][3:]


def test_the_state_is_cheap_with_many_records(shards, monkeypatch):
    "It is asked for after each batch, so what does not change is hashed once"
    import fastseqprep.loader as loader
    ds, n = PRAGMADataLoader(shards, records=np.arange(50), shuffle=True, max_tokens=300), []
    monkeypatch.setattr(loader, 'sha256', lambda *a, hash=loader.sha256: n.append(1) or hash(*a))
    states = [ds.state_dict() for _ in ds]
    assert len(states) > 3 and len(n) == 2 and len({s['plan']['records'] for s in states}) == 1
    states[0]['plan']['seed'] = 5
    assert ds.state_dict()['plan']['seed'] == 0


def test_a_split_by_shards_leaves_both_sides():
    from fastseqprep.dataloader import split_shards
    for n in 2, 3, 10:
        for share in 0, .01, .2, .5, 1-1/n:
            train, valid = split_shards(range(n), share)
            assert train and valid and train+valid == list(range(n))
    for n, share in (2, 1.), (2, .9), (5, 1), (5, 1.2), (5, -.1):
        with pytest.raises(ValueError, match=f'of {n} shards leaves none for training'): split_shards(range(n), share)


def test_a_rule_that_makes_no_plan_is_refused_before_anything_is_read(tmp_path):
    for kw, words in [(dict(max_tokens=None), 'max_tokens=None'), (dict(batch_size='3'), "batch_size='3'"), (dict(batch_size=2.5), 'batch_size=2.5'), (dict(batch_size=True), 'batch_size=True'),
                      (dict(max_tokens='9', n_classes=1.5), "max_tokens='9'; n_classes.*1.5"), (dict(max_tokens=None, oversize='cut'), 'max_tokens=None'), (dict(seed=.5), 'seed=0.5')]:
        with pytest.raises(ValueError, match=words): pragma_dl(tmp_path/'nowhere', **kw)


def test_a_second_iteration_of_persistent_workers_ends_the_first(tmp_path):
    folder = write_shards(tmp_path/'s', (40,))
    want = [b['uids'] for b in pragma_dl(folder, max_tokens=300)]
    kw = dict(max_tokens=300, num_workers=2, timeout=WAIT, multiprocessing_context='fork')
    dl = pragma_dl(folder, persistent_workers=True, **kw)
    for taken in 0, 2:
        dl.set_epoch(0)
        one = iter(dl)
        for _ in range(taken): next(one)
        dl.set_epoch(0)
        two = iter(dl)
        with pytest.raises(RuntimeError, match='newer iteration'): next(one)
        assert [b['uids'] for b in two] == want
    assert [b['uids'] for b in dl] == want
    for n in 0, 2:                                                     # without persistent workers each has its own
        dl = pragma_dl(folder, **{**kw, 'num_workers': n, 'timeout': WAIT if n else 0, 'multiprocessing_context': 'fork' if n else None})
        one, two = iter(dl), iter(dl)
        assert [next(one)['uids'], next(two)['uids']] == [want[0]]*2
