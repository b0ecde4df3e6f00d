"Vocabularies: escaping, counting and look-up, over random texts."
import hashlib, random

import numpy as np, polars as pl
from hypothesis import given, settings, strategies as st

from fastseqprep.vocab import (NULL, SPECIALS, UNK_ID, KEY_SPECIALS, ValueVocab, code_counts, count_values, dictionary_encode, escape, find_sorted,
                               keep_values, merge_counts, sorted_codes, text_codes, unescape, value_strings)

RESERVED = [*KEY_SPECIALS, NULL, '<bucket_0>', '<bucket_17>']
nasty = st.builds(lambda pre, core, post: pre + core + post, st.sampled_from(['', '\\', '\\\\', ' ', 'a=']), st.sampled_from([*RESERVED, '', '=', '\\=', '[mask]', '<bucket_>']),
                  st.sampled_from(['', '\n', ' ', '\\']))
texts = st.text() | nasty
quick = settings(max_examples=150, deadline=None, derandomize=True)


@quick
@given(st.lists(texts))
def test_escaping_is_undone_and_never_meets_a_reserved_token(values):
    stored = escape(pl.Series(values, dtype=pl.String))
    assert unescape(stored).to_list() == values
    assert len(set(stored)) == len(set(values))
    assert not set(stored) & set(RESERVED)


@quick
@given(st.lists(texts, unique=True), st.lists(texts | st.none(), max_size=40))
def test_look_up_equals_a_dict(values, wanted):
    values = pl.Series(sorted(values), dtype=pl.String)
    place = {v: i for i, v in enumerate(values)}
    expected = [place.get(w, -1) for w in wanted]
    wanted = pl.Series(wanted, dtype=pl.String)
    assert find_sorted(values, wanted).tolist() == expected
    assert find_sorted(values, pl.concat([wanted] * 30)).tolist() == expected * 30


@quick
@given(st.lists(texts | st.none(), max_size=60))
def test_text_codes_name_texts_as_they_come(column):
    codes, distinct = text_codes(pl.Series(column, dtype=pl.String))
    assert distinct.to_list() == list(dict.fromkeys(o for o in column if o is not None)) and codes.dtype == np.int32
    assert [distinct[c] if c >= 0 else None for c in codes.tolist()] == column


@settings(quick, max_examples=80)
@given(st.lists(texts, min_size=1, max_size=30), st.integers(1, 12), st.sampled_from([0, 1, 900, 1001, 3000]), st.integers(0, 2**32))
def test_sorted_codes_are_those_of_python(parts, most, n, seed):
    "Texts of several parts, so that many begin alike; more than a thousand are sorted by their bytes, eight and four at a time"
    rng = random.Random(seed)
    column = [''.join(rng.choices(parts, k=rng.randint(0, most))) for _ in range(n)]
    for s in (pl.Series(column, dtype=pl.String), pl.concat([pl.Series(['?']), pl.Series(column, dtype=pl.String)])[1:]): # one that begins inside its memory
        values, codes = sorted_codes(s)
        assert values.to_list() == sorted(set(column)) and codes.dtype == np.int32
        assert [values[c] for c in codes.tolist()] == column
        assert values.flags['SORTED_ASC']


def test_sorted_codes_of_long_texts_that_begin_alike():
    many = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(40_000)]
    for column in (many, [*many, many[7]], [*many, *many[:3000]], [o[:40] for o in many for _ in range(2)]): # few or many that are the same to the end
        values, codes = sorted_codes(pl.Series(column))
        assert values.to_list() == sorted(set(column)) and values.gather(codes).to_list() == column
    for start in ('', 'x'*8, 'y'*13, 'z'*200):
        for end in ('', 'w'*50):
            column = [f'{start}{i % 1500:x}{end}' for i in range(4000)]
            values, codes = sorted_codes(pl.Series(column))
            assert values.to_list() == sorted(set(column)) and values.gather(codes).to_list() == column


@quick
@given(st.lists(st.tuples(texts | st.none(), st.integers(0, 5))), st.randoms(use_true_random=False))
def test_counts_merge_in_any_order(pairs, rng):
    want = {}
    for v, n in pairs:
        if v is not None and n: want[v] = want.get(v, 0) + n
    parts = [count_values(pl.Series([v], dtype=pl.String), [n]) for v, n in pairs]
    rng.shuffle(parts)
    half = len(parts) // 2
    got = merge_counts([merge_counts(parts[:half]), merge_counts(parts[half:])])
    assert got.rows() == sorted(want.items())


@quick
@given(st.lists(st.sampled_from(['a', 'b', None, 'c', '']), max_size=50))
def test_codes_lead_back_to_the_column(column):
    s = pl.Series(column, dtype=pl.String)
    codes, distinct = dictionary_encode(s)
    labels = value_strings(distinct).to_list()
    assert [labels[c] if c >= 0 else None for c in codes] == column
    counts, nulls = code_counts(codes, len(distinct))
    assert counts.tolist() == [column.count(v) for v in labels] and nulls == column.count(None)


def test_the_most_frequent_values_are_kept_ties_by_alphabet():
    counts = count_values(['d', 'c', 'b', 'a'], [2, 3, 2, 2])
    for k in range(5):
        order = ['c', 'a', 'b', 'd']
        assert keep_values(counts, max_values=k).to_list() == sorted(order[:k])


@quick
@given(st.dictionaries(texts, st.lists(texts, unique=True, max_size=5), max_size=4), st.dictionaries(texts, st.integers(0, 3), max_size=3), st.booleans())
def test_names_lead_back_to_the_vocabulary(values, buckets, null_token):
    for per_key in False, True:
        if per_key: cats, last = {d: pl.Series(sorted(v), dtype=pl.String) for d, v in values.items()}, buckets
        else: cats, last = {None: pl.Series(sorted({t for v in values.values() for t in v}), dtype=pl.String)}, {None: max(buckets.values(), default=0)}
        vocab = ValueVocab.build(cats, last, cats, null_token)
        names = vocab.names.to_list()
        assert len(set(names)) == len(names) and names[:3] == SPECIALS
        again = ValueVocab.from_names(names, per_key)
        assert again.rows.equals(vocab.rows)
        for d, v in cats.items():
            ids = again.ids(d, v)
            assert len(set(ids)) == len(v) and (not len(v) or ids.min() > 2 + null_token)
            assert again.rows['value'].gather(ids).to_list() == v.to_list()
        for d, n in last.items(): assert [again.rows['value'][int(i)] for i in again.bucket_ids(d)] == [f'<bucket_{i}>' for i in range(n+1)]


def test_reserved_tokens_are_never_found_by_data():
    vocab = ValueVocab.build({None: pl.Series(['a'])}, {None: 2}, {}, null_token=True)
    assert (vocab.ids(None, pl.Series(RESERVED)) == UNK_ID).all()


def test_a_large_vocabulary_is_looked_up_right():
    rng = random.Random(0)
    values = sorted({f'{rng.randrange(10**6)} é{i%7}' for i in range(50_000)})
    vocab = ValueVocab.build({None: pl.Series(values)}, {None: 100}, {})
    for n in (3, 60_000):
        pick = [rng.randrange(len(values)) for _ in range(n)]
        assert np.array_equal(vocab.ids(None, pl.Series([values[i] for i in pick])), np.array(pick) + 3)
