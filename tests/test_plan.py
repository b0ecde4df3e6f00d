"A plan is a pure function of lengths, seed, epoch and rule; its orders never change, and its batches keep their budgets."
import random, subprocess, sys, tracemalloc
from itertools import zip_longest

import numpy as np, pytest
from hypothesis import given, settings, strategies as st

from fastseqprep.plan import OversizeError, Plan, batch_starts, block_permutation, hash_permutation, length_classes, lookahead_starts, permutation


def greedy(lengths, budget):
    batches = [[]]
    for i, n in enumerate(lengths):
        if batches[-1] and sum(lengths[j] for j in batches[-1]) + n > budget: batches.append([])
        batches[-1].append(i)
    return [b for b in batches if b]


# ---------------------------------------------------------------- orders

def test_orders_never_change_from_release_to_release():
    assert permutation(10, 0, 0).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert permutation(10, 5, 7).tolist() == [3, 0, 9, 5, 7, 4, 1, 6, 2, 8]
    assert permutation(100_000, 1, 2)[:5].tolist() == [11771, 22159, 87225, 21471, 70668]
    assert hash_permutation(np.arange(10), 10).tolist() == [8, 3, 7, 2, 6, 9, 5, 0, 1, 4]
    assert hash_permutation([0, 10**12], 10**13).tolist() == [8351060582813, 6484532681429]
    assert block_permutation(10, 4).tolist() == [9, 8, 0, 2, 1, 3, 5, 4, 6, 7]


def test_plans_never_change_from_release_to_release():
    lens = permutation(500, 9) % 97 + 3
    assert Plan(lens, 500, shuffle=True).lookahead == 256 and not any(Plan(lens, 500, **kw).lookahead for kw in (dict(shuffle=False), dict(shuffle='hash'), dict(shuffle=True, n_classes=2), dict(shuffle=True, batch_size=4)))
    keys = {name: Plan(lens, 500, shuffle=True, seed=3, epoch=2, **kw).key[:12] for name, kw in dict(
        plain=dict(lookahead=0), ahead=dict(lookahead=16), usual={}, classes=dict(n_classes=5), count=dict(batch_size=9), events=dict(n_events=lens//3, max_batch_events=70)).items()}
    keys |= {how: Plan(lens, 500, shuffle=how, seed=3, epoch=2, lookahead=0).key[:12] for how in ('block', 'hash')}
    assert keys == {'plain': '30e3126cf185', 'ahead': '57c43cc6b53a', 'classes': '6fa89d18fbef', 'count': 'd5610d1925ec', 'events': '75c2739e133a', 'block': '30e3126cf185', 'usual': '3a5dc513ddee', 'hash': '15b3e31200e0'}


def orders(n, seed, epoch):
    yield permutation(n, seed, epoch)
    yield hash_permutation(np.arange(n), n, seed, epoch)


def test_orders_are_uniform_and_unrelated():
    n = 20_000
    for kind in zip(*[orders(n, s, e) for s in range(3) for e in range(3)]):
        assert all((np.sort(o) == np.arange(n)).all() for o in kind)
        assert abs(np.corrcoef(np.array(kind)) - np.eye(9)).max() < .04
        for o in kind: assert np.mean(abs(np.diff(np.argsort(o)))) == pytest.approx(n/3, rel=.03)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64-1), st.integers(0, 2**40), st.integers(1, 500))
def test_every_order_holds_each_record_once(n, seed, epoch, block):
    for o in (*orders(n, seed, epoch), block_permutation(n, block, seed, epoch)): assert (np.sort(o) == np.arange(n)).all()


# ---------------------------------------------------------------- batches

def test_batches_are_filled_greedily():
    rng = random.Random(0)
    for _ in range(200):
        lengths = [rng.choice([0, 1, 2, 5, 9, 30]) for _ in range(rng.randint(0, 40))]
        budget = rng.randint(1, 25)
        assert [o.tolist() for o in Plan(lengths, budget)[:]] == greedy(lengths, budget)
        shuffled = Plan(lengths, budget, shuffle=True, seed=3, lookahead=0)
        order = shuffled.order.tolist()
        assert [o.tolist() for o in shuffled] == [[order[j] for j in b] for b in greedy([lengths[i] for i in order], budget)]
        assert len(shuffled) == len(list(shuffled)) and shuffled.n_tokens.sum() == sum(lengths)


rules = st.fixed_dictionaries(dict(shuffle=st.sampled_from([False, True, 'block'])), optional=dict(
    lookahead=st.integers(0, 40), n_classes=st.integers(0, 5), block=st.integers(1, 20), seed=st.integers(0, 5), epoch=st.integers(0, 5)))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=120), st.integers(1, 60), rules)
def test_every_rule_gives_each_record_once_within_the_budget(lengths, budget, rule):
    lengths = np.array(lengths, np.int64)
    plan = Plan(lengths, budget, **rule)
    batches = plan[:]
    assert sorted(i for b in batches for i in b) == list(range(len(lengths))) and all(len(b) for b in batches)
    assert all(lengths[b].sum() <= budget or len(b) == 1 for b in batches)
    assert plan.n_tokens.tolist() == [lengths[b].sum() for b in batches] and plan.longest.tolist() == [lengths[b].max() for b in batches]
    assert plan.key == Plan(lengths, budget, **rule).key and 0 <= plan.pad_fraction <= 1


def test_two_budgets_hold_both():
    rng = np.random.default_rng(0)
    lens, events = rng.geometric(.01, 3000), rng.geometric(.05, 3000)
    for kw in {}, dict(n_classes=6), dict(n_classes=6, class_by='events'):
        plan = Plan(lens, 2000, shuffle=True, n_events=events, max_batch_events=300, **kw)
        assert all((lens[b].sum() <= 2000 and events[b].sum() <= 300) or len(b) == 1 for b in plan)
        fullest = [max(lens[b].sum()/2000, events[b].sum()/300) for b in plan]
        assert np.mean(fullest) > .85


def like_movielens(n=9430): return 5+3*np.clip(np.random.default_rng(0).lognormal(4.2, 1, n).astype(int), 20, 737)
def heavy_tailed(n=30_000): return np.minimum(5+np.random.default_rng(1).pareto(1.1, n)*50, 12_000).astype(int)


@pytest.mark.parametrize('lengths', [like_movielens, heavy_tailed])
def test_batches_are_full_and_the_order_uniform(lengths):
    "By the token budget, with nothing else said"
    lens = lengths()
    n = len(lens)
    plans = [Plan(lens, shuffle=True, epoch=e) for e in range(3)]
    assert min(p.fill for p in plans) >= .995
    assert all(Plan(lens, shuffle=how, seed=7).fill >= .995 for how in (True, 'block'))
    plain = Plan(lens, shuffle=True, lookahead=0)
    assert plain.fill < .98
    moved = np.argsort(plain.order)[plans[0].order] - np.arange(n)     # place before - place now
    assert moved.max() < 600 and abs(moved).mean() < 100
    for p in plans: assert np.mean(abs(np.diff(np.argsort(p.order)))) == pytest.approx(n/3, rel=.03)
    tenths = np.digitize(lens, np.quantile(lens, np.arange(.1, 1, .1)))
    places = np.stack([np.argsort(p.order) for p in plans]).mean(0)/n
    assert all(abs(places[tenths == t].mean()-.5) < .03 for t in np.unique(tenths))


def test_a_window_that_moves_changes_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    for i in range(40):
        lens = rng.integers(0, 60, rng.integers(0, 300))
        whole = lookahead_starts(lens, 100, 30)
        monkeypatch.setattr('fastseqprep.plan._piece', int(rng.integers(1, 200)))
        for a, b in zip(whole, lookahead_starts(lens, 100, 30)): assert a.tolist() == b.tolist()
        monkeypatch.undo()


def test_classes_put_like_with_like_and_shuffle_batches():
    lens = like_movielens()
    mixed, sorted_ = Plan(lens, shuffle=True, lookahead=0), Plan(lens, shuffle=True, n_classes=20)
    assert sorted_.pad_fraction < mixed.pad_fraction/2
    classes = [set(length_classes(lens, 20)[b]) for b in sorted_]
    assert sum(len(c) > 1 for c in classes) <= 20                      # where two classes meet
    means = [lens[b].mean() for b in sorted_]
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < .3          # batches of a class are not neighbours
    events = np.random.default_rng(0).permutation(len(lens))
    by_events = Plan(lens, shuffle=True, n_events=events, n_classes=10, class_by='events')
    assert np.mean([np.ptp(events[b]) for b in by_events]) < 2*len(lens)/10


def test_count_rule_leaves_at_most_the_last_batch_short():
    lens = heavy_tailed(1003)
    for kw in {}, dict(n_classes=7), dict(shuffle='hash'), dict(shuffle='block', block=50):
        assert [len(b) for b in Plan(lens, batch_size=10, **{'shuffle': True, **kw})] == [10]*100 + [3]


def test_oversize_records():
    lens = [3, 9, 2, 8, 100]
    assert [b.tolist() for b in Plan(lens, 8)] == [[0], [1], [2], [3], [4]]
    with pytest.raises(OversizeError, match=r'Record 1 has 9 tokens, more than max_tokens=8 \(2 of 5') as e: Plan(lens, 8, oversize='refuse')
    assert e.value.record == 1
    with pytest.raises(OversizeError, match='Record 2 has 7 events'): Plan(lens, 100, n_events=[1, 2, 7, 0, 0], max_batch_events=5, oversize='refuse')
    assert len(Plan(lens, 100, oversize='refuse')) == 2


# ---------------------------------------------------------------- shares

@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 7), st.booleans(), st.integers(0, 70), st.integers(0, 4))
def test_shares_hold_each_record_once(lengths, world, per_rank, start, n_workers):
    plan = Plan(lengths, 50, shuffle=True)
    start = min(start, len(plan))
    steps = plan.steps(world, start, per_rank=per_rank)
    by_worker = [list(steps[w::max(n_workers, 1)]) for w in range(max(n_workers, 1))]
    assert [k for t in zip_longest(*by_worker) for k in t if k is not None] == list(steps)
    shares = [plan.share(k, r, world, per_rank).tolist() for k in steps for r in range(world)]
    assert sorted(i for s in shares for i in s) == sorted(i for b in plan[start:] for i in b)
    dropped = plan.steps(world, start, per_rank=per_rank, last='drop')
    assert list(dropped) == list(steps)[:len(dropped)] and len(steps)-len(dropped) <= 2
    if per_rank: assert all(len(plan.share(k, r, world, True)) for k in dropped for r in range(world))


def test_a_run_of_steps_goes_on_with_other_ranks():
    plan = Plan(np.arange(1, 300), 700, shuffle=True)
    seen, at = [], 0
    for world, steps in ((3, 4), (2, 5), (5, 1), (1, 1000)):
        for k in plan.steps(world, at, per_rank=True)[:steps]:
            seen += [i for r in range(world) for i in plan.share(k, r, world, True)]
            at = min(k+world, len(plan))
    assert seen == plan.order.tolist()


# ---------------------------------------------------------------- size, files, mistakes

def test_planning_by_hash_needs_no_memory_per_record():
    lens = np.ones(3_000_000, np.uint8)
    tracemalloc.start()
    plan = Plan(lens, 1000, shuffle='hash')
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(plan) == 3000 and len(plan[1234]) == 1000
    assert peak < 100e6                                                # a piece at a time; the same for 100 million
    assert len(set(np.concatenate(plan[:50]))) == 50_000


def test_a_plan_is_loaded_as_it_was(tmp_path):
    lens = like_movielens(500)
    for kw in {}, dict(batch_size=np.int64(7)), dict(lookahead=20), dict(n_classes=3), dict(shuffle='hash'), dict(shuffle='block', block=9):
        plan = Plan(lens, 3000, seed=4, epoch=2, **{'shuffle': True, **kw})
        plan.save(tmp_path/'plan.json')
        assert (tmp_path/'plan.json').stat().st_size < 600
        again = Plan.load(tmp_path/'plan.json', lens)
        assert again.key == plan.key and repr(again) == repr(plan) and [o.tolist() for o in again] == [o.tolist() for o in plan]
        with pytest.raises(ValueError, match='give another plan'): Plan.load(tmp_path/'plan.json', lens[1:])
        with pytest.raises(ValueError, match='give another plan'): Plan.load(tmp_path/'plan.json', lens[::-1])


def test_mistakes_are_named_together():
    with pytest.raises(ValueError, match="positive max_tokens, but got max_tokens=0; seed is an integer .* seed=-1; shuffle is one of"): Plan([1], 0, seed=-1, shuffle='x')
    for bad, words in [(dict(lookahead=3, batch_size=2), 'lookahead fills a token budget'), (dict(max_batch_events=3, batch_size=2), 'goes with a token budget'),
                       (dict(max_batch_events=3), 'needs n_events'), (dict(n_classes=3, class_by='events', n_events=[1]), 'each of the 2 records'),
                       (dict(shuffle='hash', n_classes=2), 'no order in memory'), (dict(oversize='drop'), "'drop'"), (dict(block=0), 'block=0'), (dict(n_classes=-1), 'not negative')]:
        with pytest.raises(ValueError, match=words): Plan([1, 2], **bad)
    with pytest.raises(IndexError, match='Batch 9 of a plan of 1'): Plan([1, 2])[9]


def test_planning_loads_no_torch_and_no_polars():
    code = "import sys, fastseqprep.plan as p\nassert len(p.Plan([1, 2])) == 1\nprint([m for m in ('torch', 'polars', 'pyarrow', 'pandas') if m in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip() == '[]'


def test_sizes_are_whole_numbers():
    for kw, words in [(dict(max_tokens=None), 'max_tokens=None'), (dict(max_tokens=9.5), 'max_tokens=9.5'), (dict(batch_size='3'), "batch_size='3'"), (dict(batch_size=2.5), 'batch_size=2.5'),
                      (dict(batch_size=True), 'batch_size=True'), (dict(block=None), 'block=None'), (dict(lookahead='2'), "'2'"), (dict(n_classes=1.5), '1.5'), (dict(shuffle=[1]), 'shuffle'),
                      (dict(max_batch_events='7', n_events=[1]*5), "max_batch_events='7'"), (dict(max_tokens=None, seed=True, block=.5), 'max_tokens=None; seed.*True; a block.*0.5')]:
        with pytest.raises(ValueError, match=words): Plan(np.arange(5), **kw)
    assert len(Plan(np.arange(5), np.int32(4))) == 3 == len(Plan(np.arange(5), None, batch_size=np.int64(2)))


@pytest.mark.parametrize('dtype', 'int8 uint8 int16 uint16 int32 uint32 int64 uint64'.split())
def test_lengths_of_any_integer_type(dtype):
    "Also where the budget is more than the type holds"
    lens, events = like_movielens(700) % 120 + 1, like_movielens(700) % 17
    narrow, n_events = lens.astype(dtype), events.astype(dtype)
    for kw in {}, dict(shuffle=False), dict(shuffle='block', block=50), dict(shuffle='hash'), dict(lookahead=9), dict(n_classes=5), dict(batch_size=20), dict(oversize='cut'), dict(oversize='refuse'), dict(n_classes=3, lookahead=20):
        for budget in 200, 300, 65_536, 10**7:
            plan, want = Plan(narrow, budget, **{'shuffle': True, **kw}), Plan(lens, budget, **{'shuffle': True, **kw})
            assert plan.key == want.key and plan.fill == want.fill and plan.longest.tolist() == want.longest.tolist(), (kw, budget)
    for kw in {}, dict(oversize='cut'), dict(oversize='refuse'), dict(n_classes=4, class_by='events'):
        for most in 20, 300, 10**6:
            plan, want = (Plan(a, 65_536, shuffle=True, n_events=b, max_batch_events=most, **kw) for a, b in ((narrow, n_events), (lens, events)))
            assert plan.key == want.key and len(plan) > 0
    assert [o.tolist() for o in Plan(np.full(3, 100, dtype), 30, oversize='cut')] == [[0], [1], [2]]
    assert Plan(np.full(1000, 100, dtype), 65_536, shuffle=True).n_tokens.sum() == 100_000


def test_lengths_are_a_row_of_whole_numbers():
    for lens, words in [([-5, 3, 4], 'record 0 has -5'), ([1.9, 3.9], 'lengths are integers, but got float64'), ([np.nan, 3], 'float64'), (np.ones((3, 2), int), r'one row of integers, .* \(3, 2\)'),
                        (7, r'shape \(\)'), (['3', '4'], '<U1'), ([True, False], 'bool'), ([None], 'object')]:
        for kw in {}, dict(shuffle=True), dict(batch_size=2), dict(oversize='refuse'), dict(n_classes=2):
            with pytest.raises(ValueError, match=words): Plan(lens, **kw)
        with pytest.raises(ValueError, match=words.replace('lengths', 'n_events')): Plan([3]*np.shape(lens)[0] if np.ndim(lens) else [3], n_events=lens, max_batch_events=9)
    with pytest.raises(ValueError, match='lengths .*; n_events .*; a batch needs'): Plan([-1], 0, n_events=[.5])
    assert len(Plan([])) == len(Plan(np.zeros(0, np.uint8), shuffle=True)) == 0 and len(Plan([0, 0])) == 1


def test_places_that_are_not_there_are_refused():
    for places, n in ([5, 6, 7], 5), ([-1], 5), ([4], 3), ([3], 3), ([0], 0), ([.5], 3), ([2**63], 2**62):
        with pytest.raises(ValueError, match=f'Places of {n} records'): hash_permutation(places, n)
    assert hash_permutation([], 5).tolist() == [] and sorted(hash_permutation(np.arange(5, dtype=np.uint8), 5)) == [0, 1, 2, 3, 4]


def test_a_rank_that_is_not_there_has_no_share():
    plan = Plan([3]*40, 9)
    for per_rank in False, True:
        for rank, world in (5, 2), (2, 2), (-1, 2), (1, 1), (0, 0):
            with pytest.raises(ValueError, match=f'rank={rank} and world_size={world}'): plan.share(0, rank, world, per_rank)


def test_a_file_that_is_no_plan_is_named(tmp_path):
    import json
    f, plan = tmp_path/'p.json', Plan([3, 4, 5], 5, shuffle=True)
    plan.save(f)
    good = json.loads(f.read_text())
    for text in '', '{', '{}', '[]', 'null', '{"format": "other"}': 
        f.write_text(text)
        with pytest.raises(ValueError, match='p.json is not a plan'): Plan.load(f, [3, 4, 5])
    f.write_bytes(b'\xff\x00')
    with pytest.raises(ValueError, match='p.json is not a plan'): Plan.load(f, [3, 4, 5])
    for k in 'arguments', 'key', 'records', 'tokens':
        for bad in {a: b for a, b in good.items() if a != k}, {**good, k: None}, {**good, k: [1]}:
            f.write_text(json.dumps(bad))
            with pytest.raises(ValueError, match='p.json is not a whole plan'): Plan.load(f, [3, 4, 5])
    for args in {}, {**good['arguments'], 'other': 1}, {k: v for k, v in good['arguments'].items() if k != 'block'}:
        f.write_text(json.dumps({**good, 'arguments': args}))
        with pytest.raises(ValueError, match='p.json is not a whole plan'): Plan.load(f, [3, 4, 5])
    with pytest.raises(FileNotFoundError): Plan.load(tmp_path/'none.json', [3])


def test_order_by_hash_costs_some_fill():
    "The number that the page gives"
    lens = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(int)
    assert .96 < np.mean([Plan(lens, shuffle='hash', epoch=e).fill for e in range(3)]) < .98 < .995 < Plan(lens, shuffle=True).fill
