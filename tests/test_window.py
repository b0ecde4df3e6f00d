"Windows against plain Python: all short sequences, widths, strides, offsets, steps; and what a cover promises."
import itertools

import numpy as np, polars as pl, pytest
import table_oracle as oracle
from hypothesis import given, settings, strategies as st

from fastseqprep import window as module
from fastseqprep.ragged import lengths_to_offsets
from fastseqprep.split import within_bounds
from fastseqprep.window import Windows, aligned_starts, count_windows, curriculum_values, distributed_starts, plan_windows, slot_histogram, spread

widths, strides = [1, 2, 3, 4, 5, 7, 8, 13, 20, 40, 41, 60], [1, 2, 3, 4, 5, 7, 9, 16, 39, 40, 100]


# ---------------------------------------------------------------- starts

def same_as_linspace(room, counts):
    got = spread(room, counts)
    for t, k, row in zip(room, counts, got.to_rows()):
        assert np.array_equal(row, np.unique(np.linspace(0, t, k, dtype=int))), (t, k)


def test_spread_is_linspace_for_all_short_rooms():
    room, counts = np.array([(t, k) for t in range(80) for k in range(1, t+6)]).T
    same_as_linspace(room, counts)


def test_spread_is_linspace_for_all_strides():
    "Every room to 3000 with every count that a stride can lead to"
    for t in range(0, 3001, 7):
        counts = np.unique(-(-t//np.arange(1, t+2))+1)
        same_as_linspace(np.full(len(counts), t), counts)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 400)), min_size=1, max_size=20))
def test_spread_is_linspace_for_large_rooms(pairs): same_as_linspace(*np.array(pairs).T)


@given(st.lists(st.integers(0, 40), max_size=10), st.sampled_from(widths), st.sampled_from(strides))
def test_many_parts_at_once_are_each_part_alone(lengths, width, stride):
    got = distributed_starts(lengths, width, stride)
    assert [o.tolist() for o in got.to_rows()] == [oracle.distributed_starts(n, width, stride) for n in lengths]
    assert got.lengths.tolist() == count_windows(lengths, width, stride).tolist()


def test_a_distributed_cover_keeps_its_promises():
    "Whatever the oracle says: first row, last row, no gap, no step above the stride, no more windows than needed"
    for width, stride in itertools.product(widths, strides):
        n = np.arange(1, 41)
        for length, starts in zip(n, distributed_starts(n, width, stride).to_rows()):
            padded = max(length, width)
            assert starts[0] == 0 and starts[-1]+width == padded
            assert (np.diff(starts) > 0).all() and (np.diff(starts) <= stride).all()
            assert len(starts) == -(-(padded-width)//stride)+1
            if stride <= width: assert len({r for s in starts for r in range(s, s+width)}) == padded


def test_an_aligned_cover_predicts_each_row_once():
    for width, length, steps in itertools.product([1, 3, 4, 8, 20], [1, 2, 3, 5], [1, 2, 3]):
        if length*steps > width: continue
        lo, hi = np.array([(a, b) for b in range(0, 41, 4) for a in range(0, b+1)]).T
        got = aligned_starts(lo, hi, width, length, steps)
        assert got.lengths.tolist() == count_windows(hi-lo, width, aligned=(length, steps)).tolist()
        for a, b, starts in zip(lo, hi, got.to_rows()):
            assert starts.tolist() == oracle.aligned_starts(a, b, width, length, steps)
            predicted = [r for s in starts for r in range(s+width-length*steps, s+width)]
            assert len(set(predicted)) == len(predicted) and set(range(a, b)) <= set(predicted) and max(predicted, default=b-1) == b-1
            assert len(predicted) < b-a+length*steps


@pytest.mark.parametrize('bad', [0, -1, 2.5, True, None, '3'])
def test_sizes_are_checked(bad):
    for f, name in [(lambda: distributed_starts([3], bad, 1), 'window_length'), (lambda: distributed_starts([3], 1, bad), 'window_stride'),
                    (lambda: aligned_starts([0], [3], 4, bad), 'prediction_length'), (lambda: aligned_starts([0], [3], 4, 1, bad), 'prediction_alignment_steps')]:
        with pytest.raises(ValueError, match=name): f()


# ---------------------------------------------------------------- plans, values, masks

def check(lengths, begin, bounds, split, width, stride=None, aligned=None, pad=0):
    "Everything about the windows of a table, against one sequence at a time"
    offsets = lengths_to_offsets(lengths)
    positions = np.concatenate([np.arange(b, b+n) for b, n in zip(begin, lengths)] or [[]]).astype(np.int64)
    a, b = np.arange(1, len(positions)+1), np.random.default_rng(0).normal(size=len(positions)).astype(np.float32)
    w = plan_windows(offsets, positions, bounds, split, width, stride, aligned)
    want = [o for s, (lo, hi) in enumerate(zip(offsets, offsets[1:])) for o in
            oracle.windows(s, positions[lo:hi].tolist(), dict(a=a[lo:hi].tolist(), b=b[lo:hi].tolist()), list(bounds[s]), split, width, stride, aligned, pad)]
    assert len(w) == len(want) == count_windows(np.asarray(bounds)[:, split+1]-np.asarray(bounds)[:, split], width, stride, aligned).sum()
    assert list(zip(*(o.tolist() for o in w.coordinates().values()))) == [o.coordinates for o in want]
    va, vb = w.cut(a, pad), w.cut(b, pad)
    assert va.tolist() == [o.values['a'] for o in want] and vb.tolist() == [o.values['b'] for o in want]
    assert vb.dtype == np.float32 and va.shape == (len(want), width)
    assert w.attention_mask().tolist() == [o.attention for o in want] and w.target_mask().tolist() == [o.target for o in want]
    assert w.valid_from.tolist() == [o.target.index(True) for o in want]
    for o, x in zip(want, w.first.tolist()):                                        # inside its own sequence, never beyond the split
        assert x+width <= offsets[o.sequence]+bounds[o.sequence][split+1] and x+o.left_pad >= offsets[o.sequence]
    return w, want, a, b


@pytest.mark.parametrize('width', widths)
@pytest.mark.parametrize('stride', [1, 2, 3, 7, 16, 100])
def test_all_short_sequences_distributed(width, stride):
    lengths, begin = np.arange(41), np.arange(41)*3-50
    for ratios in ([1.0], [.6, .25, .15]):
        bounds = within_bounds(lengths, ratios)
        for split in range(len(ratios)): check(lengths, begin, bounds, split, width, stride)


@pytest.mark.parametrize('width', [1, 2, 4, 7, 20, 60])
@pytest.mark.parametrize('length, steps', [(1, 1), (2, 1), (3, 1), (1, 3), (2, 3), (7, 1)])
def test_all_short_sequences_aligned(width, length, steps):
    lengths, begin = np.arange(41), 100-np.arange(41)
    bounds = within_bounds(lengths, [.6, .25, .15])
    for split in range(3): check(lengths, begin, bounds, split, width, aligned=(length, steps), pad=-7)


tables = st.lists(st.integers(0, 40), max_size=8)


@settings(deadline=None)
@given(tables, st.data())
def test_random_tables(lengths, data):
    bounds = np.array([sorted([0, n, *data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2))]) for n in lengths], np.int64).reshape(-1, 4)
    begin = data.draw(st.lists(st.integers(-2**62, 2**62), min_size=len(lengths), max_size=len(lengths)))
    width, split, pad = data.draw(st.integers(1, 45)), data.draw(st.integers(0, 2)), data.draw(st.integers(-3, 3))
    aligned = data.draw(st.one_of(st.none(), st.tuples(st.integers(1, 5), st.integers(1, 3))))
    stride = None if aligned else data.draw(st.one_of(st.none(), st.integers(1, 50)))
    w, want, a, b = check(lengths, begin, bounds, split, width, stride, aligned, pad)
    positions = np.concatenate([np.arange(i, i+n) for i, n in zip(begin, lengths)] or [[]]).astype(np.int64)

    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=3)))                   # planned in pieces, the same plan
    pieces = [plan_windows(lengths_to_offsets(lengths), positions, bounds, split, width, stride, aligned, i, j) for i, j in zip([0, *cuts], [*cuts, len(lengths)])]
    for k in Windows.fields: assert np.concatenate([getattr(p, k) for p in pieces]).tolist() == getattr(w, k).tolist()

    some = w[data.draw(st.slices(len(w)))]                                                         # cut from a piece of the table
    lo, hi = some.row_range
    assert some.from_row(lo).cut(a[lo:hi], pad).tolist() == some.cut(a, pad).tolist()


@pytest.fixture(params=['small blocks', 'large blocks'])
def blocks(request, monkeypatch):
    if request.param == 'small blocks': monkeypatch.setattr(module, '_cells', 1)


def table(rng, n_seqs=200, longest=60):
    lengths = rng.integers(0, longest, n_seqs)
    offsets = lengths_to_offsets(lengths)
    return offsets, np.concatenate([np.arange(n) for n in lengths]), within_bounds(lengths, [.6, .4])


@pytest.mark.parametrize('width, kw', [(8, dict(stride=3)), (8, dict(aligned=(2, 1))), (1, {}), (33, dict(stride=1)), (200, {})])
def test_all_ways_to_cut_agree(blocks, width, kw):
    rng = np.random.default_rng(width)
    offsets, positions, bounds = table(rng)
    for split in range(2):
        w = plan_windows(offsets, positions, bounds, split, width, **kw)
        n, cols = len(w), [rng.integers(0, 100, len(positions)), rng.normal(size=len(positions)), rng.integers(0, 9, len(positions)).astype(np.int8)]
        want = [np.where(w.attention_mask(), c[np.maximum(w.first[:, None]+np.arange(width), 0)], 5) for c in cols]
        for c, x in zip(cols, want):
            assert np.array_equal(w.cut(c, 5), x) and w.cut(c, 5).dtype == c.dtype
            assert np.array_equal(w.cut_into(c, np.empty((n, width)), 5), x)
            out = np.zeros((width, n*3))
            w.cut_into(c, out[:, 1::3].T, 5)                                            # transposed and strided
            assert np.array_equal(out[:, 1::3].T, x) and not out[:, 0::3].any()
            assert np.array_equal(w.cut(np.stack([c, c+1], 1), 5)[:, :, 0], x)
            assert np.array_equal(w.cut(c[::-1].copy()[::-1], 5), x)                    # a column of any strides
            order = rng.permutation(n)
            assert np.array_equal(w[order].cut(c, 5), x[order])
        long = w.cut_long(cols, pad=5)
        assert long.shape == (width, n*3) and long.flags.c_contiguous
        for f, x in enumerate(want): assert np.array_equal(long[:, f::3].T, x)
        assert w.cut_long(cols[2:], pad=5).dtype == np.int8
        assert np.array_equal(w.cut(cols[0], 5, np.float32), want[0].astype(np.float32)) and w.cut(cols[0], 5, np.float32).dtype == np.float32
        assert len(w[0]) == 1 and w[-1].coordinates() == {k: v[-1:] for k, v in w.coordinates().items()}


def test_a_column_in_a_file(tmp_path):
    offsets, positions, bounds = table(np.random.default_rng(1))
    column = np.random.default_rng(2).normal(size=len(positions))
    np.save(tmp_path/'c.npy', column)
    w = plan_windows(offsets, np.asarray(positions), bounds, 0, 9, 4)
    out = np.lib.format.open_memmap(tmp_path/'out.npy', 'w+', np.float64, (len(w), 9))
    w.cut_into(np.load(tmp_path/'c.npy', mmap_mode='r'), out)
    assert np.array_equal(np.load(tmp_path/'out.npy'), w.cut(column)) and type(w.cut(np.load(tmp_path/'c.npy', mmap_mode='r'))) is np.ndarray


def test_what_does_not_fit_is_refused():
    w = plan_windows([0, 5], np.arange(5), [[0, 5]], 0, 3, 1)
    with pytest.raises(ValueError, match='the column has 4 rows'): w.cut(np.arange(4))
    with pytest.raises(ValueError, match='rows -2 to 2'): w.from_row(2).cut(np.arange(5))
    with pytest.raises(TypeError, match='lose their fractions'): w.cut_into(np.ones(5), np.ones((3, 3), int))
    with pytest.raises(ValueError, match=r'\(3, 3\), but the array to write to is \(3, 4\)'): w.cut_into(np.ones(5), np.ones((3, 4)))
    with pytest.raises(ValueError, match='2 columns'): w.cut_long([np.ones(5)]*2, np.ones((3, 3)))


def test_positions_at_the_ends_of_64_bits():
    lo, hi = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    w = plan_windows([0, 2], np.array([lo+3, lo+4]), [[0, 2]], 0, 5)
    assert (w.start_item[0], w.left_pad[0], w.valid_from[0], w.target_mask().tolist()) == (lo, 3, 3, [[False]*3+[True]*2])
    with pytest.raises(ValueError, match='sequence bob begins at item position'): plan_windows([0, 2], np.array([lo+3, lo+4]), [[0, 2]], 0, 6, ids=['bob'])
    assert plan_windows([0, 2], np.array([hi-2, hi-1]), [[0, 2]], 0, 2).split_end_item[0] == hi
    with pytest.raises(ValueError, match='sequence bob ends at item position'): plan_windows([0, 2], np.array([hi-1, hi]), [[0, 2]], 0, 2, ids=['bob'])


@settings(deadline=None)
@given(tables, st.integers(1, 12), st.integers(1, 12), st.booleans(), st.data())
def test_curriculum(lengths, width, stride, calm, data):
    offsets, n = lengths_to_offsets(lengths), sum(lengths)
    positions = np.concatenate([np.arange(k) for k in lengths] or [[]]).astype(np.int64)
    bounds = within_bounds(lengths, [.7, .3])
    jumps = data.draw(st.lists(st.integers(0, max(n, 1)), max_size=2 if calm else 8))
    values = np.cumsum(np.bincount(jumps, minlength=n+1))[:n].astype(data.draw(st.sampled_from([np.int8, np.int64, np.uint64])))
    for split, aligned in itertools.product(range(2), [None, (1, 1)]):
        w = plan_windows(offsets, positions, bounds, split, width, stride, aligned)
        rows = [values[a+p:a+width].tolist() for a, p in zip(w.first, w.left_pad)]
        varies = [i for i, r in enumerate(rows) if len(set(r)) > 1]
        if varies:
            i = varies[0]
            with pytest.raises(ValueError, match=f"'level' changes .* inside window {w.subsequence_id[i]} of sequenceId id{w.seq[i]} "):
                curriculum_values(values, w, 'level', [f'id{k}' for k in range(len(lengths))])
        else:
            got = curriculum_values(values, w, 'level')
            assert got.tolist() == [r[0] for r in rows] and got.dtype == np.int64


@pytest.mark.parametrize('values', [np.ones(5), np.ones(5, bool), np.full(5, 2**63, np.uint64)])
def test_curriculum_of_another_kind(values):
    with pytest.raises(ValueError, match="'amount'"): curriculum_values(values, plan_windows([0, 5], np.arange(5), [[0, 5]], 0, 3), 'amount')


@pytest.mark.parametrize('kind', [list, np.array, pl.Series])
def test_ids_of_any_kind_are_named(kind):
    w = plan_windows([0, 1, 3], np.array([0, 8, 9]), [[0, 1], [0, 2]], 0, 3)
    with pytest.raises(ValueError, match='of sequenceId bob '): curriculum_values(np.array([1, 1, 2]), w, 'level', kind(['ann', 'bob']))
    with pytest.raises(ValueError, match='sequence bob ends'): plan_windows([0, 1, 2], np.array([0, 2**63-1]), [[0, 1], [0, 1]], 0, 3, ids=kind(['ann', 'bob']))
    assert w.coordinates(kind([5, 2**62]))['sequence_ids'].tolist() == [5, 2**62]


def test_histograms():
    assert slot_histogram(np.array([10, 2, 10, 0])) == {'0': 1, '2': 1, '10': 2} and list(slot_histogram(np.array([10, 2]))) == ['2', '10']
    offsets, positions, bounds = table(np.random.default_rng(5))
    w = plan_windows(offsets, positions, bounds, 1, 12, aligned=(2, 1))
    h = w.histograms()
    assert sum(h['left_pad_length_histogram'].values()) == sum(h['target_valid_from_histogram'].values()) == len(w)
    assert h['left_pad_length_histogram']['0'] == (w.left_pad == 0).sum()
    assert all(type(k) is str and type(v) is int for o in h.values() for k, v in o.items())


def test_nothing_is_drawn_before_it_is_asked_for():
    import subprocess, sys
    code = "import sys, fastseqprep.window, fastseqprep.split; print([m for m in ('matplotlib','pandas','torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() == '[]'
