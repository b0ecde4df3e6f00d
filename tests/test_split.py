"Splits against plain Python: bounds of any sequence and any ratios, hashes of any ids, cut-offs of any kind of column."
import datetime as dt, hashlib, warnings, zoneinfo

import numpy as np, polars as pl, pytest
import table_oracle as oracle
from hypothesis import given, settings, strategies as st

from fastseqprep import split as module
from fastseqprep.ragged import lengths_to_offsets, take_ranges
from fastseqprep.split import (Split, between_bounds, between_fractions, between_splits, cutoff_bounds, cutoff_values, parse_cutoffs,
                               window_shares, within_bounds)

parts = st.lists(st.integers(1, 40), min_size=1, max_size=7)
ratios = parts.map(lambda w: [o/sum(w) for o in w])


# ---------------------------------------------------------------- within each sequence

@given(parts)
def test_within_bounds_of_all_short_sequences(weights):
    total, r = sum(weights), [o/sum(weights) for o in weights]
    got = within_bounds(range(41), r)
    assert got.tolist() == [oracle.within_bounds(n, r) for n in range(41)]
    exact = [[sum(weights[:k])*n//total for k in range(len(weights)+1)] for n in range(41)]     # in whole numbers, without floats
    assert got.tolist() == exact


@given(parts, st.integers(1, 2**31))
def test_within_bounds_are_exact_for_long_sequences(weights, n):
    total = sum(weights)
    assert within_bounds([n*total], [o/total for o in weights])[0].tolist() == [sum(weights[:k])*n for k in range(len(weights)+1)]


@pytest.mark.parametrize('r', [[0.7, 0.2, 0.1], [0.1]*10, [1/3]*3, [1/7]*7, [0.6, 0.3, 0.1], [1.0], [0.05]*20, [0.29, 0.57, 0.14]])
def test_within_bounds_lose_no_row(r):
    n = np.arange(0, 30_000)
    b = within_bounds(n, r)
    assert (b[:, 0] == 0).all() and (b[:, -1] == n).all() and (np.diff(b) >= 0).all()
    assert (abs(b[:, 1:]-np.outer(n, np.cumsum(r))) < 1).all()
    digits = np.array([round(o*100) for o in r]) if sum(round(o*100) for o in r) == 100 else None
    if digits is not None and np.allclose(digits/100, r): assert (b[:, 1:] == np.outer(n, np.cumsum(digits))//100).all()


def test_shares_are_checked():
    for bad, why in [([0.5, 0.4], 'add up to 0.9'), ([1.5, -0.5], 'above 0'), ([], 'list of shares'), ([1, 0], 'above 0'), ([np.nan, 1], 'above 0')]:
        with pytest.raises(ValueError, match=why): within_bounds([3], bad)
    assert within_bounds([10], [0.7, 0.2, 0.1000001])[0].tolist() == [0, 7, 9, 10]               # within numpy's tolerance


# ---------------------------------------------------------------- between sequences

ids = st.one_of(st.lists(st.integers(-2**63, 2**63-1), min_size=1, max_size=30, unique=True),
                st.lists(st.text(st.characters(codec='utf-8'), max_size=6), min_size=1, max_size=30, unique=True))


@settings(deadline=None)
@given(ids, ratios, st.integers(0, 2**32-1))
def test_between_splits(x, r, seed):
    fractions = [int.from_bytes(hashlib.sha256(f'{seed}:{o}'.encode()).digest()[:8], 'big')/2**64 for o in x]
    assert between_fractions(x, seed).tolist() == fractions
    if len(x) < len(r):
        with pytest.raises(ValueError, match=f'{len(x)} sequences cannot be parted into {len(r)}'): between_splits(x, r, seed)
        return
    got = between_splits(x, r, seed)
    assert got.tolist() == oracle.between_splits(x, r, seed)
    assert set(got) == set(range(len(r)))
    order = np.random.default_rng(seed).permutation(len(x))
    assert (between_splits([x[i] for i in order], r, seed) == got[order]).all()


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 7), st.integers(0, 5), st.integers(0, 999), st.booleans())
def test_between_splits_are_repaired(k, more, seed, as_text):
    x = [f'id{i}' for i in range(k+more)] if as_text else list(range(k+more))
    for r in ([1-.001*(k-1)]+[.001]*(k-1), [.001]*(k-1)+[1-.001*(k-1)], [1/k]*k, [.01]+[.49]*2+[.01] if k == 4 else [1/k]*k):
        assert between_splits(x, r, seed).tolist() == oracle.between_splits(x, r, seed)


def test_between_splits_break_equal_hashes_by_id(monkeypatch):
    x = ['b', 'd', 'a', 'c']
    monkeypatch.setattr(module, '_digests', lambda ids, seed: pl.Series(['00'*32]*len(ids)))
    assert between_splits(x, [.8, .1, .1], 0).tolist() == [0, 1, 0, 2]
    assert between_splits(pl.Series([2**63+5, 2**63, 2**64-1], dtype=pl.UInt64), [.5, .5], 0).tolist() == [0, 0, 1]


@pytest.mark.parametrize('dtype', [pl.Int8, pl.UInt16, pl.Int32, pl.UInt64, pl.Int128])
def test_the_width_of_ids_does_not_matter(dtype):
    x = [0, 1, 5, 77, 100]
    assert (between_fractions(pl.Series(x, dtype=dtype), 3) == between_fractions(x, 3)).all()
    assert (between_fractions(pl.Series([str(o) for o in x]), 3) == between_fractions(x, 3)).all()


def test_many_ids_go_by_pieces(monkeypatch):
    x = np.arange(600_000)
    got = between_fractions(x, 1)
    assert (got[::100_003] == [int.from_bytes(hashlib.sha256(f'1:{o}'.encode()).digest()[:8], 'big')/2**64 for o in x[::100_003]]).all()
    assert abs(got.mean()-.5) < .002


@given(st.lists(st.integers(0, 9), max_size=9), st.data())
def test_between_bounds(lengths, data):
    splits = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    assert between_bounds(lengths, splits, 4).tolist() == [oracle.between_bounds(n, s, 4) for n, s in zip(lengths, splits)]


# ---------------------------------------------------------------- cut-offs

@given(st.lists(st.lists(st.integers(-20, 20), max_size=40), max_size=8), st.lists(st.integers(-25, 25), min_size=1, max_size=5, unique=True))
def test_cutoff_bounds(rows, boundaries):
    rows, boundaries = [sorted(o) for o in rows], sorted(boundaries)
    values = np.array(sum(rows, []), np.int64)
    got = cutoff_bounds(lengths_to_offsets([len(o) for o in rows]), values, boundaries)
    assert got.tolist() == [oracle.cutoff_bounds(o, boundaries) for o in rows]
    split = Split(got) if len(rows) else None
    if split: assert split.row_splits().tolist() == [sum(b <= v for b in boundaries) for v in values]


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=6))
def test_a_fall_is_found_and_named(rows):
    falls = [(s, i) for s, o in enumerate(rows) for i in range(1, len(o)) if o[i] < o[i-1]]
    offsets, values = lengths_to_offsets([len(o) for o in rows]), np.array(sum(rows, []), np.int64)
    names, positions = [f'n{i}' for i in range(len(rows))], np.concatenate([np.arange(len(o))+100 for o in rows] or [[]]).astype(int)
    if not falls: cutoff_bounds(offsets, values, [3])
    else:
        s, i = falls[0]
        with pytest.raises(ValueError, match=f"'t' falls from {rows[s][i-1]} to {rows[s][i]} in sequence n{s} at item position {100+i}"):
            cutoff_bounds(offsets, values, [3], names, positions, 't')


@pytest.mark.parametrize('kind', [list, np.array, pl.Series])
def test_ids_of_any_kind_are_named(kind):
    for ids, name in ((['a', 'b'], 'b'), ([7, 2**40], 2**40)):
        with pytest.raises(ValueError, match=f'in sequence {name} at item position 9,'): cutoff_bounds([0, 1, 3], np.array([1, 1, 0]), [5], kind(ids), np.array([0, 8, 9]), 't')


def test_a_fall_is_found_across_blocks():
    n = (1<<20)+10
    for at in (1, (1<<20)-1, 1<<20, (1<<20)+1, n-1):
        v = np.arange(n); v[at] = v[at-1]-1
        with pytest.raises(ValueError, match=f'at row {at}'): cutoff_bounds([0, n], v, [5])
        cutoff_bounds([0, at, n], np.r_[v[:at], np.arange(n-at)], [5])                        # a new sequence may begin lower


moments = st.datetimes(dt.datetime(1900, 1, 1), dt.datetime(2200, 1, 1))
written = st.one_of(
    moments, moments.map(lambda o: o.date()), moments.map(lambda o: o.isoformat()), moments.map(lambda o: o.isoformat()+'Z'), moments.map(lambda o: o.isoformat(' ')+'+05:30'),
    st.datetimes(dt.datetime(1950, 1, 1), dt.datetime(2200, 1, 1), timezones=st.sampled_from([dt.timezone.utc, zoneinfo.ZoneInfo('Europe/Warsaw'), dt.timezone(dt.timedelta(hours=-3))])),
    moments.map(lambda o: o.date().isoformat()))


@settings(deadline=None, max_examples=300)
@given(st.lists(written, min_size=1, max_size=4))
def test_moments(values):
    numbers = [oracle.moment(v) for v in values]
    if all(a < b for a, b in zip(numbers, numbers[1:])):
        got, kind = parse_cutoffs(values)
        assert (got.tolist(), kind) == (numbers, 'timestamp')
    else:
        with pytest.raises(ValueError, match='does not come after'): parse_cutoffs(values)


@given(st.lists(st.integers(-2**63, 2**63-1), min_size=1, max_size=5, unique=True).map(sorted))
def test_whole_numbers(values):
    got, kind = parse_cutoffs(values)
    assert (got.tolist(), kind) == (values, 'integer')


@pytest.mark.parametrize('bad, why', [([1, 1], '1 does not come after 1'), ([1, '2024-01-01'], 'mixed'), ([None], 'NoneType'), ([True], 'bool'), ([1.0], 'float'),
    (['2024-13-01'], 'not a time'), (['5'], 'not a time'), ([2**63], '64 bits'), ([], 'list'), (5, 'list'), (None, 'list'), ('2024-01-01', 'list'),
    (['2024-01-01T00:00:00+02:00', '2023-12-31T22:00:00Z'], 'does not come after')])
def test_bad_boundaries(bad, why):
    with pytest.raises(ValueError, match=why): parse_cutoffs(bad)


@settings(deadline=None)
@given(st.lists(moments, min_size=1, max_size=20), st.sampled_from(['ms', 'us', 'ns']), st.sampled_from([None, 'UTC', 'Asia/Kolkata', 'America/New_York']))
def test_temporal_columns(values, unit, zone):
    values = sorted(v.replace(microsecond=v.microsecond//1000*1000 if unit == 'ms' else v.microsecond) for v in values)
    s = pl.Series('t', values, dtype=pl.Datetime(unit))
    if zone: s = s.dt.replace_time_zone('UTC').dt.convert_time_zone(zone)
    assert cutoff_values(s, 'timestamp').tolist() == [oracle.moment(v) for v in values]
    days = pl.Series('d', [v.date() for v in values])
    assert cutoff_values(days, 'timestamp').tolist() == [oracle.moment(v.date()) for v in values]
    for text in ([v.isoformat() for v in values], [v.isoformat()+'Z' for v in values], [v.isoformat(' ')+'+02:00' for v in values]):
        assert cutoff_values(pl.Series('x', text), 'timestamp').tolist() == [oracle.moment(v) for v in text]


@given(st.lists(st.integers(-2**63, 2**63-1), min_size=1, max_size=9), st.integers(-2**53, 2**53))
def test_nanoseconds_are_never_carried_over_a_boundary(values, boundary):
    got = cutoff_values(pl.Series('t', values, dtype=pl.Int64).cast(pl.Datetime('ns')), 'timestamp')
    assert (got >= boundary).tolist() == [v >= boundary*1000 for v in values]
    for unit, per in (('ms', 1000), ('us', 1)):
        got = cutoff_values(pl.Series('t', values, dtype=pl.Int64).cast(pl.Datetime(unit)), 'timestamp')
        assert (got >= boundary).tolist() == [v*per >= boundary for v in values]


@pytest.mark.parametrize('dtype', [pl.Int8, pl.Int16, pl.Int32, pl.Int64, pl.Int128, pl.UInt8, pl.UInt16, pl.UInt32, pl.UInt64, pl.UInt128])
def test_integer_columns(dtype):
    bits, signed = int(str(dtype).lstrip('UInt')), dtype.is_signed_integer()
    values = [-2**(bits-1) if signed else 0, 5, 2**(bits-signed)-1]
    got = cutoff_values(pl.Series(values, dtype=dtype), 'integer')
    for b in (-2**63, 0, 5, 6, 100, 2**63-1): assert (got >= b).tolist() == [max(v, -2**63) >= b for v in values]


@pytest.mark.parametrize('s, kind, why', [(pl.Series('amount', [1.]), 'integer', "'amount' is Float64"), (pl.Series('b', [True]), 'integer', 'Boolean'),
    (pl.Series('s', ['1']), 'integer', 'String'), (pl.Series('n', [1]), 'timestamp', 'Int64'), (pl.Series('d', [dt.date(2024, 1, 1)]), 'integer', 'Date'),
    (pl.Series('o', [dt.time(3)]), 'timestamp', 'Time'), (pl.Series('s', ['2024-01-01', '']), 'timestamp', "'s' holds ''"),
    (pl.Series('s', ['2024-01-01', None]), 'timestamp', '1 nulls of 2'), (pl.Series('s', ['2024-02-30']), 'timestamp', "'2024-02-30'")])
def test_columns_of_another_kind(s, kind, why):
    with pytest.raises(ValueError, match=why): cutoff_values(s, kind)


# ---------------------------------------------------------------- the whole split

@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), ratios, st.sampled_from(['within', 'between', 'cutoff']))
@settings(deadline=None)
def test_every_row_is_in_one_split(lengths, r, how):
    if how == 'within': s = Split.within(lengths, r)
    elif how == 'between':
        if len(lengths) < len(r): return
        s = Split.between(lengths, range(len(lengths)), r, 5)
    else: s = Split.cutoff(lengths_to_offsets(lengths), pl.Series('v', np.concatenate([np.arange(n) for n in lengths]).astype(int)), [3, 7])
    n = sum(lengths)
    assert s.n_rows.sum() == n and s.table()['rows'].sum() == n and f'{n:,} rows of {len(lengths):,} sequences' in repr(s)
    splits, rows = s.row_splits(), np.arange(n)
    assert len(splits) == n
    for i in range(s.n_splits):
        assert (s.mask(i) == (splits == i)).all() and s.mask(i).sum() == s.n_rows[i] == s.lengths(i).sum()
        assert (take_ranges(rows, *s.rows(i)) == rows[s.mask(i)]).all()
    for a, b in zip(s.offsets, s.offsets[1:]): assert (np.diff(splits[a:b]) >= 0).all()           # in order within a sequence


@given(st.lists(st.floats(.01, 100), min_size=1, max_size=5), st.data())
def test_guard(sizes, data):
    spacings = data.draw(st.lists(st.integers(1, 100), min_size=len(sizes), max_size=len(sizes)))
    w = [a/b for a, b in zip(sizes, spacings)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        shares = window_shares(sizes, spacings)
    assert np.allclose(shares, np.array(w)/sum(w))
    if abs(w[0]/sum(w)-.5) > 1e-6: assert bool(seen) == (w[0]/sum(w) < .5)
    if seen: assert f'{shares[0]:.1%}' in str(seen[0].message)


def test_half_of_the_windows_is_enough():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        Split.within([100], [.5, .3, .2]).guard([7, 7, 7])
        Split.within([1]*9, [.9, .1]).guard([1, 1])
    with pytest.warns(UserWarning, match='5.9%'): Split.within([100], [.8, .1, .1]).guard([64, 1, 1])


@pytest.mark.parametrize('values, why', [(pl.Series([1.5]), 'is Float64, expected dates'), (pl.Series(['1970-01-01', None]), 'has 1 nulls of 2 values: each row needs a value'), (pl.Series(['soon']), "holds 'soon'")])
def test_a_column_of_times_is_not_called_a_split_column(values, why):
    with pytest.raises(ValueError) as e: cutoff_values(values, 'timestamp', 't', 'timestamps: column')
    assert f"timestamps: column 't' {why}" in str(e.value) and 'split' not in str(e.value)
