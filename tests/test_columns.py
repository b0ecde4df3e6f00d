"""Columns: roles, what is learnt and from which rows, null rules, parts of times, texts, and the way through metadata."""
import datetime as dt, json

import numpy as np, polars as pl, pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from fastseqprep.categories import LABELS, MASK, OTHER, UNKNOWN
from fastseqprep.columns import *
from fastseqprep.columns import _block
from fastseqprep.rules import CardinalityRule
from fastseqprep.sequences import Column

quick = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def column(values, dtype=None, name='c'):
    "A `Column` as the reader makes it"
    s = pl.Series(name, values, dtype=dtype)
    none = s.is_null().to_numpy() if s.null_count() else None
    if s.dtype == pl.String:
        d = s.drop_nulls().unique().sort()
        at = {v: i for i, v in enumerate(d)}
        return Column(name, s.dtype, np.array([at.get(v, -1) for v in s], np.int32), d, none)
    x = s.to_physical() if s.dtype.is_temporal() else s
    return Column(name, s.dtype, x.fill_null(False if s.dtype == pl.Boolean else 0).to_numpy(), None, none)


def fit(col, rows=None, **kw): return FittedColumns.fit({col.name: col}, column_roles({col.name: col}, **kw.pop('roles', {})), rows, **kw)
def again(fitted, col, **kw):
    "The same columns, by way of a JSON file"
    return FittedColumns.from_metadata(json.loads(json.dumps(dict(fitted.to_metadata(), special_token_ids=LABELS))), {col.name: col.dtype}, **kw)


VALUES = {pl.String: ['a', 'b', 'é', '', '10', '𝒳'], pl.Int64: [-2**63, -1, 0, 7, 2**63-1], pl.UInt64: [0, 5, 2**64-1], pl.Int8: [-3, 0, 4], pl.Boolean: [True, False]}


@quick
@given(st.data())
def test_ids_are_ranks_among_fitted_values(data):
    dtype = data.draw(st.sampled_from(list(VALUES)))
    values = data.draw(st.lists(st.one_of(st.none(), st.sampled_from(VALUES[dtype])), min_size=1, max_size=30))
    rows = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    known = sorted({v for v, r in zip(values, rows) if r and v is not None})
    col = column(values, dtype)
    if not known:
        with pytest.raises(ValueError): fit(col, rows)
        return
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    fitted = fit(col, rows, nulls=dict(c='unknown'))
    want = [MASK if m else UNKNOWN if v is None else known.index(v)+3 if v in known else OTHER for v, m in zip(values, mask)]
    for f in (fitted, again(fitted, col, nulls=dict(c='unknown'))):
        got = f.encode({'c': col}, mask)['c']
        assert got.tolist() == want and got.dtype == np.min_scalar_type(f['c'].n_classes-1)
        assert f['c'].n_classes == len(known)+3


@quick
@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=2, max_size=40), st.sampled_from(['mean', 'zero']), st.sampled_from([pl.Float32, pl.Float64]), st.booleans())
def test_numbers(values, rule, dtype, exact):
    col = column(values, dtype)
    rows = np.arange(len(values)) < max(1, len(values)//2)
    x = np.array([0 if v is None else v for v in col.series().to_list()])
    kept = x[rows & np.array([v is not None for v in values])]
    if not len(kept):
        with pytest.raises(ValueError, match='no value'): fit(col, rows)
        return
    fitted = fit(col, rows, nulls=dict(c=rule))
    f = fitted['c']
    assert np.isclose(f.mean, kept.mean(), rtol=1e-9, atol=1e-9) and np.isclose(f.std, kept.std(ddof=1) if len(kept) > 1 else 0, rtol=1e-6, atol=1e-6)
    got = again(fitted, col, nulls=dict(c=rule)).encode({'c': col}, exact=exact)['c']
    filled = np.array([(f.mean if rule == 'mean' else 0) if v is None else v for v in col.series().to_list()])
    assert got.dtype == (np.float32 if dtype == pl.Float32 else np.float64)
    tol = 1e-9 if dtype == pl.Float64 else 1e-3 if not exact else 1e-5
    np.testing.assert_allclose(got, (filled-f.mean)/(f.std+1e-9) if f.std else 0*filled, rtol=tol, atol=tol*max(1, abs(f.mean)/(f.std or 1)))


def test_blocks_change_nothing(monkeypatch):
    import fastseqprep.columns as m
    rnd = np.random.default_rng(0)
    cols = dict(c=column(rnd.choice(list('abcdef'), 1000).tolist(), name='c'), i=column(rnd.integers(0, 9, 1000), name='i'), x=column(rnd.normal(size=1000), name='x'))
    roles = column_roles(cols)
    whole = FittedColumns.fit(cols, roles)
    a = whole.encode(cols)
    monkeypatch.setattr(m, '_block', 7)
    parts = FittedColumns.fit(cols, roles)
    assert parts.to_metadata() == whole.to_metadata()
    for k, v in parts.encode(cols).items(): assert np.array_equal(v, a[k])


@pytest.mark.parametrize('declared, col, what', [
    (dict(categorical=['c']), column([1.5]), 'cannot be categorical'), (dict(real=['c']), column(['a']), 'cannot be real'), (dict(real=['c']), column([True]), 'cannot be real'),
    (dict(real=['d']), column([1.5]), "names 'd'"), (dict(limited=['c']), column([1.5]), 'for categorical columns'), (dict(texts=['c']), column([1]), 'holds no text'),
    (dict(real=['c']), column([dt.date(2024, 1, 1)]), 'cannot be real')])
def test_roles_refused(declared, col, what):
    with pytest.raises(ValueError, match=what): column_roles({'c': col}, **declared)


def test_what_does_not_fit():
    many = column([f'w{i:03d}' for i in range(200)])
    with pytest.raises(ValueError, match='Int8'): fit(many, dtypes=dict(c='Int8')).encode({'c': many})
    assert fit(many, dtypes=dict(c='UInt8')).encode({'c': many})['c'].max() == 202
    big = column([1e6, -1e6])
    with pytest.raises(ValueError, match="'c'.*Float16"): fit(big, dtypes=dict(c='Float16'), normalize=False).encode({'c': big})
    text = column([' '.join(2*[chr(0x4e00+i) for i in range(200)])])
    with pytest.raises(ValueError, match='do not fit in Int8'): fit(text, roles=dict(texts=['c']), texts=dict(c=(400, 5)), dtypes=dict(c='Int8'))['c'].encode_text(text)


# ---------------------------------------------------------------- parts of times
def test_hours_of_a_zone_with_summer_time():
    "01:30, 02:30 and again 02:30 by the clock in Warsaw, when it is set back"
    utc = [dt.datetime(2024, 10, 26, 23, 30), dt.datetime(2024, 10, 27, 0, 30), dt.datetime(2024, 10, 27, 1, 30)]
    for dtype in (pl.Datetime('us'), pl.Datetime('ms'), pl.Datetime('ns')):
        col = column(utc, dtype)
        assert time_part(col, 'hour', np.array([0, 3]), 'Europe/Warsaw').tolist() == [1, 2, 2]
        assert time_part(col, 'delta', np.array([0, 3]), 'Europe/Warsaw').tolist() == [0, 3600, 3600]
        assert time_part(col, 'day', np.array([0, 3])).tolist() == [26, 27, 27]
    local = pl.Series('c', utc).dt.replace_time_zone('UTC').dt.convert_time_zone('Asia/Tokyo')
    col = Column('c', local.dtype, local.to_physical().to_numpy())
    assert time_part(col, 'hour', np.array([0, 3]), 'Europe/Warsaw').tolist() == [1, 2, 2] and time_part(col, 'hour', np.array([0, 3])).tolist() == [23, 0, 1]


def test_parts_before_1970_and_of_dates():
    col = column([dt.date(1969, 12, 30), dt.date(1970, 1, 5)])
    assert time_part(col, 'weekday', np.array([0, 2])).tolist() == [2, 1] and time_part(col, 'elapsed', np.array([0, 2])).tolist() == [0, 6*86400]
    assert time_part(column([dt.datetime(1969, 12, 31, 23, 59)]), 'minute', np.array([0, 1])).tolist() == [59]
    with pytest.raises(ValueError, match='no hour'): time_part(col, 'hour', np.array([0, 2]))
    with pytest.raises(ValueError, match='expected dates'): time_part(column([1]), 'hour', np.array([0, 1]))


def test_sequences_without_rows_have_no_first_one():
    col = column([dt.datetime(2024, 1, 1, h) for h in (1, 2, 5, 6)])
    assert time_part(col, 'delta', np.array([0, 0, 2, 2, 4, 4])).tolist() == [0, 3600, 0, 3600]
    assert time_part(col, 'elapsed', np.array([0, 0, 3, 3, 4, 4])).tolist() == [0, 3600, 4*3600, 0]


# ---------------------------------------------------------------- texts
def dense(f, col, mask=None):
    values, slots = f.encode_text(col, mask)
    d = slots.filled(slice(0, len(col)))
    return d.dense(values), d.mask()


def test_texts_round_trip_and_are_cut():
    col = column(['big red fish', 'fish', None, 'a fish é', 'fish'])
    fitted = fit(col, roles=dict(texts=['c']), texts=dict(c=(400, 40)), nulls=dict(c='unknown'))
    for f in (fitted['c'], again(fitted, col, nulls=dict(c='unknown'))['c']):
        ids, there = dense(f, col)
        for i, text in enumerate(col.series().to_list()):
            if text is None: assert ids[i][there[i]].tolist() == [UNKNOWN]
            else: assert f.text.decode(ids[i][there[i]].astype(int)-3) == text
        assert (ids[~there] == 0).all() and ids.max() < f.n_classes
        short = FittedColumn('c', 'text', 'String', 'Int64', text=f.text, max_tokens=2)
        assert np.array_equal(dense(short, col)[0], ids[:, :2])
    hidden, there = dense(fitted['c'], col, np.array([True, False, True, False, False]))
    assert hidden[0].tolist() == [MASK]+[0]*39 and there[2].sum() == 1 and hidden[2, 0] == MASK and np.array_equal(hidden[1], ids[1])


def test_texts_are_fitted_on_the_given_rows():
    a, b = column(['aa bb', 'aa', 'zz zz zz']), column(['aa bb', 'aa', 'qq'])
    rows = np.array([True, True, False])
    models = [fit(c, rows, roles=dict(texts=['c']), texts=dict(c=(300, 4)))['c'].text for c in (a, b)]
    assert models[0] == models[1]
    with pytest.raises(ValueError, match='no text'): fit(column([None, 'x']), np.array([True, False]), roles=dict(texts=['c']), texts=dict(c=(300, 4)), nulls=dict(c='unknown'))


def test_tokenizer_files(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    tok = Tokenizer(models.WordLevel({'[UNK]': 0, 'a': 1, 'fish': 2, 'far': 9}, unk_token='[UNK]'))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.enable_padding(length=7)
    tok.enable_truncation(1)
    tok.save(str(tmp_path/'t.json'))
    m = TextModel.from_file(tmp_path/'t.json')
    assert len(m) == 10 and [r.tolist() for r in m.encode(pl.Series(['a fish', '', 'far cow'])).to_rows()] == [[1, 2], [], [9, 0]]
    col = column(['a fish', '', 'far'])
    ids, there = dense(FittedColumn('c', 'text', 'String', 'Int64', text=m, max_tokens=3), col)
    assert ids.tolist() == [[4, 5, 0], [0, 0, 0], [12, 0, 0]] and there.sum(1).tolist() == [2, 0, 1]
    (tmp_path/'bad.json').write_text('{}')
    with pytest.raises(ValueError, match='not a tokenizer file'): TextModel.from_file(tmp_path/'bad.json')


# ---------------------------------------------------------------- metadata
def test_metadata_of_other_data_is_refused():
    col = column(['a', 'b'])
    fitted = fit(col)
    with pytest.raises(ValueError, match='in the data it is Float64'): again(fitted, column([1.5]))
    with pytest.raises(ValueError, match='does not know'): FittedColumns.from_metadata(dict(fitted.to_metadata(), special_token_ids=LABELS), dict(d=pl.String()))
    with pytest.raises(ValueError, match='special_token_ids'): FittedColumns.from_metadata(dict(fitted.to_metadata(), special_token_ids={'[unknown]': 1}), dict(c=pl.String()))
    with pytest.raises(ValueError, match='as categorical, but text_columns says 4'): again(fitted, col, texts=dict(c=4))


def test_limits_survive_metadata():
    col = column(list('aabbbcd'))
    rule = CardinalityRule(top_k=1, hashing=dict(num_buckets=2))
    fitted = fit(col, rules=dict(c=rule))
    meta = json.loads(json.dumps(dict(fitted.to_metadata(), special_token_ids=LABELS, cardinality_config=dict(c=rule.normalised()))))
    new = column(list('abz'))
    assert np.array_equal(FittedColumns.from_metadata(meta, dict(c=pl.String())).encode(dict(c=new))['c'], fitted.encode(dict(c=new))['c'])
    assert fitted.encode(dict(c=new))['c'][1] == 3 and (fitted.encode(dict(c=new))['c'][[0, 2]] > 3).all()
