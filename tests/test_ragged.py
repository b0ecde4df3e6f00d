"""Ragged arrays against plain lists of lists: every operation, on rows of any length, none included."""
import pickle

import numpy as np, pytest
from hypothesis import given, settings, strategies as st

from fastseqprep import ragged
from fastseqprep.ragged import Ragged, lengths_to_offsets, range_index, take_ranges

rows = st.lists(st.lists(st.integers(-1000, 1000), max_size=6), max_size=8)


def make(x): return Ragged.from_rows(x, np.int64)
def back(r): return [o.tolist() for o in r.to_rows()]


@pytest.fixture(params=['by elements', 'by blocks'], autouse=True)
def way(request, monkeypatch):
    "Both ways of taking ranges, whatever their lengths"
    monkeypatch.setattr(ragged, '_long_range', 10**9 if request.param == 'by elements' else 0)


@given(rows)
def test_rows_come_back(x):
    r = make(x)
    assert len(r) == len(x) and r.lengths.tolist() == [len(o) for o in x] and back(r) == x
    assert [r[i].tolist() for i in range(len(x))] == x
    assert r == make(x) and r == Ragged.from_lengths(r.values, r.lengths) and r == pickle.loads(pickle.dumps(r))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=12))
def test_range_index(ranges):
    starts, lengths = [a for a, _ in ranges], [n for _, n in ranges]
    want = [i for a, n in ranges for i in range(a, a+n)]
    assert range_index(starts, lengths).tolist() == want
    values = np.arange(200).reshape(100, 2)
    got = take_ranges(values, starts, lengths)
    assert got.tolist() == [values[i].tolist() for i in want] and got.shape[1:] == (2,)


@given(rows, st.data())
@settings(deadline=None)
def test_take_and_index(x, data):
    r = make(x)
    idx = data.draw(st.lists(st.integers(-len(x), len(x)-1), max_size=10)) if x else []
    assert back(r.take(np.array(idx, int))) == [x[i] for i in idx]
    assert back(r[np.array(idx, int)]) == [x[i] for i in idx]
    s = data.draw(st.slices(len(x)))
    assert back(r[s]) == x[s]
    mask = data.draw(st.lists(st.booleans(), min_size=len(x), max_size=len(x)))
    assert back(r[np.array(mask, bool)]) == [o for o, m in zip(x, mask) if m]


@given(rows, st.integers(0, 7))
def test_head_and_tail(x, n):
    assert back(make(x).head(n)) == [o[:n] for o in x]
    assert back(make(x).tail(n)) == [o[max(len(o)-n, 0):] for o in x]


@given(rows)
def test_row_ids_and_positions(x):
    r = make(x)
    assert list(zip(r.row_ids.tolist(), r.positions.tolist(), r.values.tolist())) == [(i, j, v) for i, o in enumerate(x) for j, v in enumerate(o)]


@given(rows, st.integers(0, 3), st.integers(-5, 5))
def test_pad(x, extra, fill):
    width = max(map(len, x), default=0) + extra
    out, mask = make(x).pad(width, fill)
    assert out.shape == mask.shape == (len(x), width)
    assert out.tolist() == [o + [fill]*(width-len(o)) for o in x]
    assert mask.tolist() == [[True]*len(o) + [False]*(width-len(o)) for o in x]


@given(st.lists(rows, min_size=1, max_size=4))
def test_concat(parts):
    assert back(Ragged.concat([make(p) for p in parts])) == [o for p in parts for o in p]


@given(st.integers(1, 4).flatmap(lambda k: st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=k, max_size=k), max_size=6)))
def test_interleave_and_join(table):
    k = len(table[0]) if table else 2
    parts = [make([row[j] for row in table]) for j in range(k)]
    dealt = Ragged.interleave(parts)
    assert back(dealt) == [o for row in table for o in row]
    assert back(dealt.join(k)) == [sum(row, []) for row in table]


def test_further_axes_and_dtypes():
    r = Ragged.from_lengths(np.arange(18, dtype=np.uint16).reshape(6, 3), [1, 0, 5])
    assert r.take([2, 0]).values.shape == (6, 3) and r.take([2, 0]).dtype == np.uint16
    assert r.pad(dtype=np.int64)[0].shape == (3, 5, 3) and r.pad(dtype=np.int64)[0].dtype == np.int64
    assert Ragged.interleave([r, r]).values.shape == (12, 3) and Ragged.interleave([r, r]).dtype == np.uint16


def test_wide_sums_of_narrow_lengths():
    assert lengths_to_offsets(np.full(3, 255, np.uint8)).tolist() == [0, 255, 510, 765]
    assert len(range_index(np.zeros(2, np.uint8), np.full(2, 200, np.uint8))) == 400
    assert range_index(np.array([2**40]), np.array([2])).tolist() == [2**40, 2**40+1]
    assert len(range_index([3], [200_000])) == 200_000


@pytest.mark.parametrize('offsets', [[], [1, 6], [0, 5], [0, 7], [0, 4, 2, 6], [[0, 6]]])
def test_wrong_offsets_are_refused(offsets):
    with pytest.raises(ValueError): Ragged(np.arange(6), offsets)


def test_rows_that_are_not_there():
    r = make([[1], [2, 3]])
    for i in 2, -3:
        with pytest.raises(IndexError): r[i]
        with pytest.raises(IndexError): r.take([i])
