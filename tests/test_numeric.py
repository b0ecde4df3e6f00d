"Numbers: exact percentiles of counted values, buckets, and counts that merge in any order."
import math

import numpy as np, polars as pl, pytest
from hypothesis import given, settings, strategies as st

from fastseqprep.numeric import NumericCounts, bucket_range, bucketize, cut_bits, magnitude, percentile_bounds, sign_words, to_float

quick = settings(max_examples=200, deadline=None, derandomize=True)
finite = st.floats(allow_nan=False, allow_infinity=False, width=64)
cells = st.none() | st.floats() | st.sampled_from([0., -0., 1., -1.])
levels = lambda nb: [100*i/nb for i in range(1, nb)]


@quick
@given(st.lists(finite.filter(lambda x: abs(x) < 1e300), min_size=1, max_size=40, unique=True), st.data())
def test_percentiles_are_those_of_numpy_bit_for_bit(values, data):
    values = np.unique(np.array(values))
    counts = np.array(data.draw(st.lists(st.integers(1, 30), min_size=len(values), max_size=len(values))))
    nb = data.draw(st.integers(1, 120))
    assert percentile_bounds(values, counts, nb).tobytes() == np.percentile(np.repeat(values, counts), levels(nb)).astype(float).tobytes()


def test_percentiles_of_large_counts():
    rng = np.random.default_rng(1)
    for n in (1, 2, 17, 5000):
        values, counts = np.unique(rng.lognormal(size=n)), rng.integers(1, 200, n)
        for nb in (2, 3, 10, 100, 333):
            assert percentile_bounds(values, counts, nb).tobytes() == np.percentile(np.repeat(values, counts), levels(nb)).tobytes()


@quick
@given(st.lists(cells), st.lists(finite, max_size=6).map(sorted))
def test_buckets_by_hand(xs, bounds):
    got = bucketize(to_float(pl.Series(xs, dtype=pl.Float64)), bounds)
    for x, b in zip(xs, got):
        if x is None or not math.isfinite(x): assert b == -1
        elif x == 0: assert b == 0
        else:
            assert b == 1 + sum(o < x for o in bounds)
            low, high = bucket_range(bounds, int(b))
            assert low < x <= high or x > high == low  # repeated bounds


@quick
@given(st.lists(cells))
def test_sign_and_size_are_the_number(xs):
    s = pl.Series(xs, dtype=pl.Float64)
    factor = {'negative': -1, 'zero': 0, 'positive': 1}
    for x, w, m in zip(xs, sign_words(s), magnitude(s)):
        if x is None or not math.isfinite(x): assert (w, m) == ('unknown', None)
        else: assert factor[w]*m == x


@pytest.mark.parametrize('dtype', [pl.Int8, pl.Int64, pl.UInt64, pl.Float32, pl.Float64, pl.Decimal(10, 2), pl.String])
def test_one_conversion_for_all_types(dtype):
    s = pl.Series([1, 0, 2, None]).cast(dtype)
    assert to_float(s).to_list() == [1., 0., 2., None]
    assert sign_words(s).to_list() == ['positive', 'zero', 'positive', 'unknown']
    assert to_float(magnitude(s)).to_list() == [1., 0., 2., None]


numbers = st.lists(finite | st.sampled_from([1., 2., 2.5, 1e-320, 5e-324]), max_size=60)


@quick
@given(numbers, st.integers(1, 20), st.randoms(use_true_random=False))
def test_counts_do_not_depend_on_parts_or_order(xs, limit, rng):
    def count(parts):
        total = NumericCounts(limit)
        for p in parts: total.merge(NumericCounts(limit).add(pl.Series(p, dtype=pl.Float64), np.ones(len(p))))
        return total.values.tolist(), total.counts.tolist(), total.bits
    whole = count([xs])
    shuffled = rng.sample(xs, len(xs))
    cuts = sorted(rng.randrange(len(xs)+1) for _ in range(4))
    parts = [shuffled[i:j] for i, j in zip([0, *cuts], [*cuts, len(xs)])]
    assert count(parts) == whole
    assert count([[x] for x in shuffled]) == whole
    one = NumericCounts(limit)
    for p in parts: one.add(pl.Series(p, dtype=pl.Float64), np.ones(len(p)))
    assert (one.values.tolist(), one.counts.tolist(), one.bits) == whole
    assert sum(whole[1]) == sum(x != 0 for x in xs)


def test_bounds_of_cut_numbers_are_near():
    x = np.random.default_rng(0).normal(size=200_000)
    n = NumericCounts(limit=5000).add(x, np.ones(len(x), int))
    near, exact = n.bounds(100), np.percentile(x, levels(100))
    assert len(n.values) <= 5000 and (np.abs(near - exact) <= np.abs(exact)*2.**-n.bits + 1e-12).all()
    assert NumericCounts().add(x, np.ones(len(x), int)).bounds(100).tobytes() == exact.tobytes()


def test_zeros_and_what_is_no_number_are_not_counted():
    n = NumericCounts().add(pl.Series([0., -0., math.nan, math.inf, None, 3.]), [1, 1, 1, 1, 1, 2])
    assert (n.values.tolist(), n.counts.tolist()) == ([3.], [2])
    assert NumericCounts().bounds(10) is None
    assert cut_bits(np.array([1.5, -1.5]), 0).tolist() == [1., -1.]
