"Mean and standard deviation: exact to the last digits, whatever the size of numbers and the cut of chunks."
import math, statistics
from fractions import Fraction

import numpy as np, pytest
from hypothesis import given, settings, strategies as st

from fastseqprep.moments import BLOCK, Moments, inverse, standardise

quick = settings(max_examples=300, deadline=None, derandomize=True)
finite = st.floats(allow_nan=False, allow_infinity=False)
sizes = st.sampled_from([1., 1e-300, 1e-320, 1e150, 1e300, 1e308, 2.**-1000, 1e-160])
mixed = st.lists(st.tuples(st.floats(-1.7, 1.7), sizes).map(lambda o: o[0]*o[1]) | finite, min_size=1, max_size=30)


def exact(xs):
    "Mean and variance as fractions"
    fs = [Fraction(float(x)) for x in xs]
    mean = sum(fs)/len(fs)
    return mean, sum((f-mean)**2 for f in fs)/(len(fs)-1) if len(fs) > 1 else Fraction(0)


def root(f):
    "The square root of a fraction as a fraction, to 30 digits"
    if not f: return Fraction(0)
    shift = 10**60
    k = max(0, (f.denominator.bit_length()-f.numerator.bit_length()))
    k += k % 2
    return Fraction(math.isqrt(int(f*2**k*shift)), 10**30)/Fraction(2**(k//2))


def close(got, want, scale, digits=1e-13): return abs(Fraction(got)-want) <= Fraction(digits)*scale + Fraction(5e-324)*2


@quick
@given(mixed)
def test_against_fractions(xs):
    top, (mean, var) = max(abs(Fraction(x)) for x in xs), exact(xs)
    try: m = Moments.of(np.array(xs))
    except ValueError as e:
        assert 'its spread is beyond it' in str(e) and root(var) > Fraction(1.797e308)
        return
    assert m.count == len(xs) and close(m.mean, mean, top) and close(m.std, root(var), top)


@quick
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=40), st.sampled_from([0, 1e9, -1e12]))
def test_against_statistics(xs, shift):
    xs = [x+shift for x in xs]
    m, want = Moments.of(xs), statistics.stdev(map(Fraction, xs))
    assert math.isclose(m.mean, statistics.mean(map(Fraction, xs)), rel_tol=1e-14, abs_tol=1e-9)
    assert math.isclose(m.std, want, rel_tol=1e-12, abs_tol=1e-300)


@quick
@given(finite, st.integers(1, 200))
def test_no_spread_is_exactly_none(x, n):
    m = Moments.of(np.full(n, x))
    assert m == (n, x, 0.) and m.merge(m) == (2*n, x, 0.)
    assert (standardise(np.array([x, 1., -1e300]), *m[1:]) == 0).all() and (inverse([0., 5.], *m[1:]) == x).all()


@pytest.mark.parametrize('x', [0., -0., .1, 1e308, -1.7976931348623157e308, 5e-324, 1e-310, 3.])
def test_no_spread_over_many_blocks(x):
    m = Moments.of(np.full(3*BLOCK+17, x))
    assert (m.mean, m.std) == (x, 0.)


@quick
@given(st.lists(mixed.filter(lambda xs: max(map(abs, xs)) < 1e307), min_size=1, max_size=5))
def test_merge_is_as_the_whole(parts):
    whole = [x for xs in parts for x in xs]
    m = Moments()
    for xs in parts: m = m.merge(Moments.of(xs))
    top, (mean, var) = max(abs(Fraction(x)) for x in whole), exact(whole)
    assert m.count == len(whole) and close(m.mean, mean, top) and close(m.std, root(var), top, 1e-12)


def test_blocks_are_of_rows_that_count():
    rng = np.random.default_rng(3)
    x, keep = rng.lognormal(3, 2, 5*BLOCK+123), rng.random(5*BLOCK+123) < .3
    assert Moments.of(x, keep) == Moments.of(x[keep])
    assert Moments.of(x, np.zeros(len(x), bool)) == (0, 0., 0.)
    m = Moments.of(x)
    assert math.isclose(m.mean, math.fsum(x)/len(x), rel_tol=1e-14)
    assert math.isclose(m.std, math.sqrt(math.fsum((x-m.mean)**2)/(len(x)-1)), rel_tol=1e-13)


def test_memory_mapped_and_other_types(tmp_path):
    x = np.random.default_rng(0).integers(-1000, 1000, 200_000)
    np.save(tmp_path/'x.npy', x)
    want = Moments.of(x)
    assert Moments.of(np.load(tmp_path/'x.npy', mmap_mode='r')) == want
    for dtype in (np.int16, np.float32, np.float16, np.float64): assert Moments.of(x.astype(dtype)) == Moments.of(x.astype(dtype).astype(np.float64))
    assert Moments.of(np.array([2**64-1, 0], np.uint64)).mean == 2.**63
    assert Moments.of(np.array([-2**63, -2**63])) == (2, -2.**63, 0.)
    assert Moments.of(np.array([True, False])).mean == .5


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('at', [0, BLOCK-1, BLOCK, 2*BLOCK+5])
def test_what_is_not_finite_is_refused(bad, at):
    x = np.ones(2*BLOCK+6)
    x[at] = bad
    with pytest.raises(ValueError, match="column 'x' holds"): Moments.of(x, name='x')
    keep = np.ones(len(x), bool)
    keep[at] = False
    assert Moments.of(x, keep) == (len(x)-1, 1., 0.)


@quick
@given(st.lists(finite, min_size=1, max_size=20), finite, st.floats(0, 1.7e308), st.sampled_from([np.float64, np.float32, np.float16]))
def test_standardised_or_refused(xs, mean, std, dtype):
    with np.errstate(over='ignore'): x = np.array([v for v in np.array(xs).astype(dtype) if np.isfinite(v)], dtype)
    try: z = standardise(x, mean, std)
    except ValueError as e:
        assert 'which standardised is beyond' in str(e)
        return
    assert z.dtype == dtype and np.isfinite(z).all()
    if std == 0: assert (z == 0).all()
    elif dtype == np.float64:
        for v, got in zip(x, z):
            want = (Fraction(float(v))-Fraction(mean))/(Fraction(std)+Fraction(1e-9))
            assert abs(Fraction(float(got))-want) <= Fraction(1e-14)*abs(want) + Fraction(1e-320)


@quick
@given(st.lists(st.floats(-1e300, 1e300), min_size=2, max_size=20))
def test_back_again(xs):
    m = Moments.of(xs)
    back = inverse(standardise(np.array(xs), m.mean, m.std), m.mean, m.std)
    assert np.allclose(back/max(1., max(map(abs, xs))), np.array(xs)/max(1., max(map(abs, xs))), rtol=0, atol=1e-13)


def test_in_the_precision_of_the_column():
    x = np.random.default_rng(0).normal(10, 4, 1000)
    for dtype in (np.float32, np.float16):
        v = x.astype(dtype)
        m = Moments.of(v)
        assert (standardise(v, m.mean, m.std) == (v-dtype(m.mean))/dtype(m.std+1e-9)).all()
    assert standardise(np.array([1, 2, 3], np.int8), 2., 1., np.float32).dtype == np.float32


def test_a_divisor_below_half_precision():
    "1e-9 is 0 in 16 bits: computed in 64, refused if beyond 16"
    assert standardise(np.array([0., 0.], np.float16), 0., 1e-9).tolist() == [0, 0]
    with pytest.raises(ValueError, match="'x' holds 1.5, which standardised is beyond float16"): standardise(np.array([1., 1.5], np.float16), 1., 1e-9, name='x')


