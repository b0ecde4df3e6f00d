"Counts of fields: the same whatever the parts, the order, and the way through bytes."
import numpy as np, polars as pl, pytest
from hypothesis import given, settings, strategies as st

from fastseqprep.counts import FieldCounts
from fastseqprep.source import DataSource

quick = settings(max_examples=60, deadline=None, derandomize=True)
opt = lambda s: st.none() | s
ROWS = st.lists(st.tuples(opt(st.sampled_from('abc')), opt(st.sampled_from([0., 1., -1., 2.5, float('nan'), float('inf'), .1, .2, .3])),
                          opt(st.sampled_from(['x', '', 'one fish', 'two  fish', 'red é', '[MASK]'])), opt(st.integers(0, 3))), min_size=1, max_size=30)
SCHEMA = {'c': pl.String, 'n': pl.Float64, 't': pl.String, 'since': pl.Int64}


def source(df): return DataSource(df, cats='c', conts='n', signed_conts='n', texts='t', lifelong='since', entity_col='id', is_profile=True, num_buckets=3)


@quick
@given(ROWS, st.integers(1, 6), st.integers(2, 5), st.randoms(use_true_random=False))
def test_parts_add_up(rows, text_limit, number_limit, rng):
    df = pl.DataFrame(rows, schema=SCHEMA, orient='row').with_row_index('id')
    src = source(df)
    make = lambda: FieldCounts(text_limit, number_limit)
    whole = make().add_rows(src, df).to_bytes()
    cuts = sorted({0, len(df), *(rng.randrange(len(df)) for _ in range(3))})
    parts = [make().add_rows(src, df[i:j]) for i, j in zip(cuts, cuts[1:])]
    rng.shuffle(parts)
    total = make()
    for p in parts: total.merge(FieldCounts.from_bytes(p.to_bytes()) if rng.random() < .5 else p)
    assert total.to_bytes() == whole
    assert FieldCounts.from_bytes(whole).to_bytes() == whole


def test_all_that_is_counted():
    df = pl.DataFrame({'id': [1, 2, 3, 4], 'c': ['a', None, 'a', 'b'], 'n': [-1., 1., None, float('nan')], 't': ['x', 'x', None, 'y'], 'since': [None]*4},
                      schema_overrides={'since': pl.Int64})
    counts = FieldCounts().add_rows(source(df), df)
    assert counts.values('cat', 'c').rows() == [('a', 2), ('b', 1)] and counts.nulls['cat', 'c'] == 1
    assert (counts.numbers['n'].values.tolist(), counts.numbers['n'].counts.tolist()) == ([1.], [2])
    assert counts.values('sign', 'n_sign').rows() == [('negative', 1), ('positive', 1), ('unknown', 2)]
    assert counts.values('text', 't').rows() == [('x', 2), ('y', 1)]
    assert counts.unread['n'] == [3, 1] and counts.lifelong == {'since'} and counts.options['n'] == {'num_buckets': 3}
    assert counts.kinds == {'c': ['cat'], 'lifelong': ['cat'], 'n': ['num'], 'n_sign': ['cat'], 't': ['text']}


def test_limits_have_to_agree():
    for kw in dict(text_limit=5), dict(number_limit=5):
        with pytest.raises(ValueError, match='one limit for all'): FieldCounts().merge(FieldCounts(**kw))


def test_many_small_chunks():
    df = pl.DataFrame({'id': range(5000), 'c': [f'v{i % 700}' for i in range(5000)]})
    src = DataSource(df, cats='c', entity_col='id', is_profile=True)
    counts = FieldCounts()
    for i in range(0, 5000, 7): counts.add_rows(src, df[i:i+7])
    got = counts.values('cat', 'c')
    assert len(got) == 700 and got['count'].sum() == 5000 and got['value'].is_sorted()
    assert np.array_equal(got['count'].sort()[[0, -1]], [7, 8])
