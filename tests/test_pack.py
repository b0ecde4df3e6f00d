"""Packing: exact plans against a slow best fit, recorded bins, tokens conserved, the same plan always, at any scale."""
import json, subprocess, sys, tracemalloc
from pathlib import Path

import numpy as np, pytest
from hypothesis import given, settings, strategies as st

from fastseqprep.pack import (Packing, best_fit_decreasing, cut_rows, longest_first, pack, packing_strategies, packing_strategy,
                              stable_order)
from fastseqprep.ragged import Ragged

CASES = json.loads((Path(__file__).parent/'cases'/'packing.json').read_text())
STRATEGIES = ['simple', 'bfd', 'bfd_split', 'wrapped']
caps = st.one_of(st.integers(1, 40), st.sampled_from([2**k+d for k in range(1, 8) for d in (-1, 0, 1)]))
lists = st.lists(st.integers(0, 300), max_size=60)


# --- slow, and plainly right ---------------------------------------------------------------------------------------------
def slow_best_fit(lengths, max_len):
    "Item numbers of each bin: longest first, into the tightest bin that fits, of these the one opened first"
    rooms, bins = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = min(lengths[i], max_len)
        best = None
        for b, room in enumerate(rooms):
            if room >= size and (best is None or room < rooms[best]): best = b
        if best is None:
            best = len(rooms)
            rooms.append(max_len); bins.append([])
        rooms[best] -= size
        bins[best].append(i)
    return bins


def slow_pieces(lengths, max_len, overlong, keep, turns=None):
    "Pieces of all rows, with the length that each had before it was cut"
    out = []
    for row, n in enumerate(lengths):
        if n <= max_len: out.append((row, 0, n, n))
        elif overlong == 'truncate': out.append((row, n-max_len if keep == 'end' else 0, max_len, n))
        elif overlong == 'split' and turns is None: out += [(row, i, min(max_len, n-i), min(max_len, n-i)) for i in range(0, n, max_len)]
        elif overlong == 'split':
            at, group = 0, []
            for t in [*turns[row], None]:
                if group and (t is None or sum(group)+t > max_len):
                    size = sum(group)
                    kept = min(size, max_len)
                    out.append((row, at+(size-kept if keep == 'end' else 0), kept, size))
                    at, group = at+size, []
                if t is not None: group.append(t)
    return [o for o in out if o[2]]


def slow_pack(lengths, max_len, strategy, overlong, keep='start', turns=None):
    "Bins of pieces (row, start, length)"
    if strategy == 'wrapped':
        taken = lengths if overlong == 'split' else [0]*len(lengths)
        tokens = [(r, t) for r, n in enumerate(taken) for t in range(n)]
        if overlong != 'split': tokens = [(r, t) for r, s, n, _ in slow_pieces(lengths, max_len, overlong, keep) for t in range(s, s+n)]
        bins = []
        for i in range(0, len(tokens), max_len):
            pieces = []
            for r, t in tokens[i:i+max_len]:
                if pieces and pieces[-1][0] == r: pieces[-1][2] += 1
                else: pieces.append([r, t, 1])
            bins.append(pieces)
        return bins
    pieces = slow_pieces(lengths, max_len, overlong, keep, turns)
    order = [[i] for i in range(len(pieces))] if strategy == 'simple' else slow_best_fit([o[3] for o in pieces], max_len)
    return [[list(pieces[i][:3]) for i in b] for b in order]


def back(p): return [o.tolist() for o in p.pieces.to_rows()]
def bins_of(r): return [o.tolist() for o in r.to_rows()]
def without_empty(bins, lengths): return [b for b in ([i for i in b if lengths[i]] for b in bins) if b]


def draws(seed, n):
    "Lengths of many shapes, with caps around powers of two; rows without tokens and rows that are too long among them"
    rng = np.random.default_rng(seed)
    for _ in range(n):
        cap = int(rng.choice([2**rng.integers(1, 10)+rng.integers(-1, 2), rng.integers(1, 300)]))
        size = int(rng.integers(0, 70))
        kind = rng.integers(5)
        if kind == 0: x = rng.integers(0, cap+1, size)
        elif kind == 1: x = rng.integers(0, 2*cap+2, size)
        elif kind == 2: x = rng.choice(rng.integers(0, cap+2, 3), size)              # few distinct lengths
        elif kind == 3: x = rng.integers(0, max(2, cap//8), size)                    # many to a bin
        else: x = np.clip(cap//2+rng.integers(-2, 3, size), 0, None)                 # around a half
        yield x.astype(np.int64), cap


# --- best fit ------------------------------------------------------------------------------------------------------------
def test_exact_plans():
    for x, cap in draws(0, 6000):
        x = x.tolist()
        assert bins_of(best_fit_decreasing(x, cap)) == without_empty(slow_best_fit(x, cap), x), (x, cap)


@given(lists, caps)
@settings(max_examples=300, deadline=None)
def test_exact_plans_of_any_lengths(x, cap):
    assert bins_of(best_fit_decreasing(x, cap)) == without_empty(slow_best_fit(x, cap), x)


def test_exact_plans_of_many_rows():
    rng = np.random.default_rng(3)
    for cap in (127, 128, 129, 1000):
        for x in (rng.integers(1, cap+1, 1500), rng.integers(1, 30, 1500), np.clip(rng.lognormal(3, 1, 1500), 1, cap+5).astype(int)):
            assert bins_of(best_fit_decreasing(x, cap)) == slow_best_fit(x.tolist(), cap)


@given(st.lists(st.integers(0, 2**63-1) | st.integers(0, 5), max_size=30))
def test_order(x):
    want = sorted(range(len(x)), key=lambda i: x[i])
    assert stable_order(np.array(x, np.int64)).tolist() == want
    assert longest_first(np.array(x, np.int64)).tolist() == sorted(range(len(x)), key=lambda i: -x[i])


def test_packs_well_for_every_cap():
    "A cap that is no power of two is packed as well as one that is"
    x = np.random.default_rng(0).integers(3000, 5000, 3000)
    for cap in (8191, 8192, 8193):
        assert len(best_fit_decreasing(x, cap)) < 1700
    x = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(np.int64)
    for k in range(10, 14):
        for cap in (2**k-1, 2**k, 2**k+1): assert pack(x, cap).fill > .99


# --- whole plans ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('overlong', ['truncate', 'split', 'drop'])
@pytest.mark.parametrize('keep', ['start', 'end'])
def test_plans_of_all_kinds(strategy, overlong, keep):
    if strategy == 'bfd_split' and overlong != 'split': return
    for x, cap in draws(1, 250):
        p = pack(x, cap, strategy, overlong, keep).check(x)
        assert back(p) == slow_pack(x.tolist(), cap, 'bfd' if strategy == 'bfd_split' else strategy, overlong, keep), (x, cap)
        account(p, x, cap, overlong)


def account(p, x, cap, overlong):
    "Counts by counting"
    c, got = p.counts, np.zeros(len(x), int)
    for row, _, n in p.pieces.values.tolist(): got[row] += n
    over, pieces = x > cap, np.bincount(p.pieces.values[:, 0], minlength=len(x))
    dropped = over if overlong == 'drop' else np.zeros(len(x), bool)
    assert c == dict(rows=len(x), tokens=x.sum(), empty_rows=(x == 0).sum(), split_rows=(pieces > 1).sum(), cut_rows=((got < x) & ~dropped).sum(),
                     cut_tokens=(x-got)[~dropped].sum(), dropped_rows=dropped.sum(), dropped_tokens=x[dropped].sum())
    assert c['tokens'] == p.tokens+c['cut_tokens']+c['dropped_tokens'] and all(type(v) is int for v in c.values())
    assert p.lengths.sum() == p.tokens and (p.lengths <= cap).all() and (p.lengths > 0).all()
    if overlong == 'split': assert p.tokens == x.sum()


turns_lists = st.lists(st.lists(st.integers(1, 14), max_size=8), max_size=12)

@given(turns_lists, st.integers(1, 12), st.sampled_from(['start', 'end']), st.sampled_from(['simple', 'bfd_split']))
@settings(deadline=None)
def test_turns_stay_whole(turns, cap, keep, strategy):
    x = [sum(o) for o in turns]
    p = pack(np.array(x, np.int64), cap, strategy, 'split', keep, turns=Ragged.from_rows(turns, np.int64)).check(np.array(x, np.int64))
    assert back(p) == slow_pack(x, cap, 'simple' if strategy == 'simple' else 'bfd', 'split', keep, turns)
    account(p, np.array(x, np.int64), cap, 'turns')
    begins = [set(np.cumsum([0, *o]).tolist()) for o in turns]
    if keep == 'start': assert all(start in begins[row] for row, start, _ in p.pieces.values.tolist())
    if max((t for o in turns for t in o), default=0) <= cap: assert p.counts['cut_tokens'] == 0


def test_two_chats_never_start_in_a_turn():
    turns = [[6, 7], [5, 6]]
    assert back(pack([13, 11], 10, 'bfd_split', turns=Ragged.from_rows(turns))) == [[[0, 6, 7]], [[0, 0, 6]], [[1, 5, 6]], [[1, 0, 5]]]


@given(lists, caps, st.sampled_from(STRATEGIES), st.data())
@settings(deadline=None)
def test_groups_are_packed_on_their_own(x, cap, strategy, data):
    x = np.array(x, np.int64)
    groups = np.array(data.draw(st.lists(st.sampled_from([7, 0, -3, 12]), min_size=len(x), max_size=len(x))), np.int64)
    p = pack(x, cap, strategy, groups=groups).check(x)
    want = []
    for g in sorted(set(groups.tolist())):
        rows = np.flatnonzero(groups == g)
        want += [[[int(rows[r]), s, n] for r, s, n in b] for b in back(pack(x[rows], cap, strategy))]
    assert back(p) == want
    assert groups[p.first_rows].tolist() == sorted(groups[p.first_rows].tolist())
    names = np.array(['b', 'a', 'd', 'c'])[np.searchsorted([-3, 0, 7, 12], groups)]
    assert sorted(map(str, back(pack(x, cap, strategy, groups=names)))) == sorted(map(str, want))


def test_empty_rows_shift_nothing():
    x = [0, 25, 0, 3]
    assert sorted(pack(x, 10, 'bfd_split').pieces.values.tolist()) == [[1, 0, 10], [1, 10, 10], [1, 20, 5], [3, 0, 3]]
    for s in STRATEGIES:
        assert pack(x, 10, s).counts['empty_rows'] == 2
        assert len(pack([0, 0], 10, s)) == len(pack([], 10, s)) == 0 and pack([], 10, s).fill == 0


def test_twice_the_cap_is_kept_or_counted():
    x = np.full(50, 20)
    assert pack(x, 10).counts['cut_tokens'] == 500 and pack(x, 10).tokens == 500
    assert pack(x, 10, 'bfd_split').tokens == pack(x, 10, 'wrapped').tokens == 1000
    assert pack(x, 10, overlong='drop').counts['dropped_tokens'] == 1000


# --- recorded ------------------------------------------------------------------------------------------------------------
UNITS = CASES['units']

@pytest.mark.parametrize('name', [k for k in UNITS['expected'] if '/' in k])
def test_recorded_bins(name):
    strategy, keep = name.split('/')
    rows = {k: Ragged.from_rows(v, np.int64) for k, v in UNITS['keys'].items()}
    p = pack(rows['sequence'].lengths, UNITS['max_len'], strategy, keep=keep.removeprefix('keep_'))
    for key, want in UNITS['expected'][name].items(): assert bins_of(p.apply(rows[key])) == want


@pytest.mark.parametrize('keep', ['start', 'end'])
def test_recorded_plans(keep):
    x = [len(o) for o in UNITS['keys']['sequence']]
    p = pack(x, UNITS['max_len'], 'bfd', keep=keep)
    assert [o[:, 0].tolist() for o in p.pieces.to_rows()] == UNITS['expected']['plan_bfd'][f'keep_{keep}']


@pytest.mark.parametrize('run', CASES['streams']['runs'], ids=lambda r: r['name'])
def test_recorded_streams(run):
    rows = Ragged.from_rows(CASES['streams']['rows'], np.int64)
    p = pack(rows.lengths, run['max_len'], run['strategy'], keep=run['keep'].removeprefix('keep_')).check(rows.lengths)
    assert p.apply(rows).values.tolist() == run['sequence']
    assert p.positions(of='row').values.tolist() == run['position_ids']


# --- using a plan --------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 30), st.sampled_from(STRATEGIES), st.data())
@settings(deadline=None)
def test_tokens_positions_segments(x, cap, strategy, data):
    x = np.array(x, np.int64)
    rows = Ragged.from_lengths(np.stack([np.repeat(np.arange(len(x)), x), np.concatenate([np.arange(n) for n in x])], 1), x)
    p = pack(x, cap, strategy)
    bins = data.draw(st.none() | st.lists(st.integers(0, len(p)-1), max_size=6) if len(p) else st.none())
    chosen = back(p) if bins is None else [back(p)[b] for b in bins]
    want = lambda f: [[v for k, (r, s, n) in enumerate(b) for v in f(k, r, s, n)] for b in chosen]
    assert bins_of(p.apply(rows, bins)) == want(lambda k, r, s, n: [[r, s+i] for i in range(n)])
    assert bins_of(p.gather_index(rows.offsets, bins)) == want(lambda k, r, s, n: [int(rows.offsets[r])+s+i for i in range(n)])
    assert bins_of(p.segment_ids(bins)) == want(lambda k, r, s, n: [k]*n)
    assert bins_of(p.positions(bins)) == want(lambda k, r, s, n: list(range(n)))
    assert bins_of(p.positions(bins, of='row')) == want(lambda k, r, s, n: list(range(s, s+n)))
    assert p.cu_seqlens(bins).tolist() == np.cumsum([0, *[n for b in chosen for *_, n in b]]).tolist()
    if bins is not None and len(bins) == 1: assert p.apply(rows, bins[0]) == p.apply(rows, bins)
    segments, positions = p.segment_ids(bins), p.positions(bins)
    for s, q in zip(segments.to_rows(), positions.to_rows()): assert ((np.diff(s) == 1) == (q[1:] == 0)).all()


def test_plan_of_other_rows_is_refused():
    p = pack([5, 6], 12)
    with pytest.raises(ValueError, match='row 0, which has 4'): p.apply(Ragged.from_lengths(np.zeros(10), [4, 6]))
    with pytest.raises(ValueError, match='there are 1 rows'): p.gather_index([0, 6])
    with pytest.raises(IndexError): p.apply(Ragged.from_lengths(np.zeros(11), [5, 6]), [7])


def test_positions_beyond_32_bits():
    p = pack([2**31], 2**32)
    with pytest.raises(ValueError, match='fewer bins'): p.cu_seqlens()
    assert p.check([2**31]).tokens == 2**31


# --- what is asked for wrongly -------------------------------------------------------------------------------------------
@pytest.mark.parametrize('lengths, error, text', [
    ([[1, 2]], TypeError, 'shape'), ([1.5], TypeError, 'float64'), (['a'], TypeError, 'dtype'), ([True], TypeError, 'bool'),
    ([1, -2], ValueError, 'row 1 has the length -2'), (5, TypeError, 'shape')])
def test_bad_lengths(lengths, error, text):
    for f in (pack, best_fit_decreasing, cut_rows):
        with pytest.raises(error, match=text): f(lengths, 10)


@pytest.mark.parametrize('max_len', [0, -1, 1.5, None, True, '10'])
def test_bad_max_len(max_len):
    for f in (pack, best_fit_decreasing, cut_rows):
        with pytest.raises(ValueError, match='max_len is'): f([1], max_len)


def test_overlong_error_says_which():
    for s in ('simple', 'bfd', 'wrapped'):
        with pytest.raises(ValueError, match='row 1 has 11 tokens, and 1 more rows are too long, but a bin holds 10'): pack([10, 11, 12], 10, s, 'error')
        assert pack([10, 1], 10, s, 'error').tokens == 11


def test_kinds_of_input():
    want = back(pack([3, 5, 9], 9))
    for dtype in (np.uint8, np.int16, np.uint64): assert back(pack(np.array([3, 5, 9], dtype), 9)) == want
    assert back(pack((3, 5, 9), np.int32(9))) == want
    import polars as pl
    assert back(pack(pl.Series([3, 5, 9]), 9)) == want


def test_strategies_can_be_added():
    try:
        @packing_strategy('pairs', overlong='drop')
        def pairs(pieces, sizes, max_len): return Ragged(pieces, [*range(0, len(pieces), 2), len(pieces)])
        p = pack([1, 2, 30, 3], 10, 'pairs').check([1, 2, 30, 3])
        assert back(p) == [[[0, 0, 1], [1, 0, 2]], [[3, 0, 3]]] and p.counts['dropped_rows'] == 1
        with pytest.raises(ValueError, match='exists already'): packing_strategy('pairs')(pairs)
    finally: packing_strategies.pop('pairs', None)


def test_a_wrong_strategy_is_found_out():
    p = pack([4, 4], 10)
    for rows, text in [([[[0, 0, 4], [0, 0, 4]]], 'more than one piece'), ([[[0, 0, 4]]], '8 tokens came in, but 4'), ([[[0, 0, 4], [1, -1, 4]]], 'before its row')]:
        with pytest.raises(ValueError, match=text): Packing(Ragged.from_rows(rows), 10, counts=p.counts).check([4, 4])
    with pytest.raises(ValueError, match='bin 0 has 8'): Packing(Ragged.from_rows([[[0, 0, 4], [1, 0, 4]]]), 7).check([4, 4])


# --- the same always, and at scale ---------------------------------------------------------------------------------------
ASK = """
import hashlib, numpy as np
from fastseqprep.pack import pack
x = np.random.Generator(np.random.PCG64(5)).integers(0, 3000, 20_000)
h = hashlib.sha256()
for s in ('simple', 'bfd', 'bfd_split', 'wrapped'):
    for g in (None, np.arange(20_000)%3):
        p = pack(x, 2047, s, groups=g)
        h.update(p.pieces.values.astype('<i8').tobytes()); h.update(p.pieces.offsets.astype('<i8').tobytes())
print(h.hexdigest())
"""

def test_same_plan_in_any_process():
    run = lambda seed: subprocess.run([sys.executable, '-c', ASK], env=dict(PYTHONHASHSEED=seed, PATH=''), capture_output=True, text=True, check=True).stdout
    assert run('0') == run('1')


def test_steps_do_not_grow_with_rows(monkeypatch):
    "Ten times the rows of the same lengths take no more steps"
    from fastseqprep import pack as module
    steps = []
    fill = module._Bins.fill
    monkeypatch.setattr(module._Bins, 'fill', lambda self, *args: (steps.append(1), fill(self, *args)))
    x, counts = np.random.default_rng(2).integers(1, 513, 20_000), []
    for k in (1, 10):
        steps.clear()
        best_fit_decreasing(np.tile(x, k), 512)
        counts.append(len(steps))
    assert counts[1] < 1.2*counts[0] and max(counts) < 4*512


def test_memory_is_a_few_numbers_a_row():
    peaks = []
    for n in (100_000, 300_000):
        x = np.random.default_rng(0).integers(1, 2000, n)
        tracemalloc.start()
        pack(x, 8192)
        peaks.append(tracemalloc.get_traced_memory()[1]/n)
        tracemalloc.stop()
    assert max(peaks) < 250, peaks                            # bytes a row, whatever the rows hold


def test_worst_case_of_one_huge_list_of_equal_bins():
    "Half-full bins by the hundred thousand, taken from one by one"
    x = np.concatenate([np.full(200_000, 5000), np.arange(1, 3193)])
    p = pack(x, 8192).check(x)
    assert len(p) == 200_000


def test_huge_caps_cost_nothing():
    x = np.random.default_rng(0).integers(1, 10**12, 2000)
    p = pack(x, 10**15).check(x)
    assert len(p) == -(-x.sum()//10**15)


# --- pictures ------------------------------------------------------------------------------------------------------------
def test_draw():
    plt = pytest.importorskip('matplotlib.pyplot')
    p = pack([3, 7, 2, 7, 10, 0, 13], 10)
    ax = p.draw(title='bins')
    assert ax.get_title() == 'bins' and len(ax.patches) == len(p.pieces.values)+len(p)
    assert {(b.get_x(), b.get_y()+.4, b.get_width()) for b in ax.patches[:2]} == {(0, 0, 10), (0, 1, 10)}
    assert len(p.draw([2, 3]).patches) == len(p[2])+len(p[3])+2
    assert len(p.draw(2).patches) == len(p[2])+1
    pack([], 10).draw()
    plt.close('all')


def test_import_needs_no_plotting():
    code = "import sys, fastseqprep.pack; print([m for m in ('matplotlib','torch','pandas','fastai') if m in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() == '[]'
