"Categories: ids as recorded, the hash, and everything against plain Python."
import json, pickle, warnings
from decimal import Decimal
from pathlib import Path

import numpy as np, polars as pl, pytest
from hypothesis import given, settings, strategies as st

from fastseqprep.categories import Categories, FIRST_ID, category_values, find_integers, fnv_hash, read_id_maps
from fastseqprep.columns import FittedColumn
from fastseqprep.rules import CardinalityRule
from fastseqprep.sequences import Column

quick = settings(max_examples=150, deadline=None, derandomize=True)
recorded = json.loads((Path(__file__).parent/'cases'/'categories.json').read_text(encoding='utf-8'))
DTYPES = dict(String=pl.String(), Int64=pl.Int64(), Boolean=pl.Boolean())
texts = st.text(st.characters(exclude_categories=['Cs']), max_size=12) | st.sampled_from(['', 'a', 'B', 'é', '日本', '\0', '[other]', '[unknown]', '[hash', '0', '-1'])
integers = st.integers(-2**63, 2**63-1) | st.integers(-5, 5)
kinds = st.sampled_from([(texts, pl.String), (integers, pl.Int64), (st.integers(0, 2**64-1) | st.integers(0, 9), pl.UInt64), (st.booleans(), pl.Boolean), (st.integers(-128, 127), pl.Int8)])


def slow_hash(v, seed):
    text = f'b:{int(v)}' if isinstance(v, bool) else f'i:{v}' if isinstance(v, int) else f's:{v}'
    h = 14695981039346656037 ^ (seed % 2**64)
    for b in text.encode(): h = ((h ^ b)*1099511628211) % 2**64
    return h


class Slow:
    "The rules for ids, one value at a time"
    def __init__(self, rows, rule=None):
        counts = {}
        for v in rows:
            if v is not None and v not in ('[unknown]', '[other]'): counts[v] = counts.get(v, 0)+1
        kept = sorted(counts)
        if rule:
            if rule.get('top_k'): kept = sorted(sorted(counts, key=lambda v: (-counts[v], v))[:rule['top_k']])
            elif rule.get('min_freq'): kept = [v for v in kept if counts[v] >= rule['min_freq']]
            else: kept = []
        self.ids, self.hashing = {v: i+3 for i, v in enumerate(kept)}, (rule or {}).get('hashing')
        self.n_classes = max(3, 3+len(kept)+(self.hashing['num_buckets'] if self.hashing else 0))

    def __call__(self, v):
        if v is None or v == '[unknown]': return 0
        if v == '[other]': return 1
        if v in self.ids: return self.ids[v]
        return 3+len(self.ids)+slow_hash(v, self.hashing['seed']) % self.hashing['num_buckets'] if self.hashing else 1


@st.composite
def columns(draw):
    values, dtype = draw(kinds)
    pool = draw(st.lists(values, min_size=1, max_size=12))
    rows = draw(st.lists(st.sampled_from(pool) | st.none(), min_size=1, max_size=40))
    hashing = st.none() | st.fixed_dictionaries(dict(num_buckets=st.integers(1, 9), seed=st.integers(-2**70, 2**70)))
    rule = draw(st.none() | st.fixed_dictionaries(dict(top_k=st.integers(1, 9), hashing=hashing)) | st.fixed_dictionaries(dict(min_freq=st.integers(1, 4), hashing=hashing))
                | st.fixed_dictionaries(dict(hashing=st.fixed_dictionaries(dict(num_buckets=st.integers(1, 9), seed=st.integers(-3, 3))))))
    return rows, pool+draw(st.lists(values, max_size=12))+[None], dtype, rule


def fit(rows, dtype, rule, name='x'):
    s = pl.Series(rows, dtype=dtype).rename('v')
    counts = s.to_frame().group_by('v').len()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return Categories.fit(counts['v'], counts['len'].to_numpy(), rule, name)


@quick
@given(columns())
def test_ids_are_those_of_the_rules(column):
    rows, new, dtype, rule = column
    slow = Slow(rows, rule)
    try: cats = fit(rows, dtype, rule)
    except ValueError as e:
        assert all(v is None for v in rows) and 'no value in the rows' in str(e) or not slow.ids and 'only reserved labels' in str(e)
        return
    assert cats.n_classes == slow.n_classes
    got = cats.encode(pl.Series(new, dtype=dtype))
    assert got.dtype == np.int64 and got.tolist() == [slow(v) for v in new]
    # a kept value comes back, and its label names it
    back = cats.decode(got).to_list()
    for v, b in zip(new, back): assert b == (v if v in slow.ids else None)
    assert cats.labels(range(cats.n_classes)).n_unique() == cats.n_classes
    # through JSON, and through a pickle to a worker, it is the same
    again = Categories.from_map(json.loads(json.dumps(cats.to_map())), pl.Series([], dtype=dtype).dtype, cats.rule, 'x')
    for other in (again, pickle.loads(pickle.dumps(cats))):
        assert other.encode(pl.Series(new, dtype=dtype)).tolist() == got.tolist()
        assert other.n_classes == cats.n_classes and list(other.to_map().items()) == list(cats.to_map().items())
    n = cats.tally(got)
    assert sum(n.values()) == len(new) and n['known'] == sum(v in slow.ids for v in new) and n['unknown'] == sum(v is None or v == '[unknown]' for v in new)


@quick
@given(columns())
def test_values_that_were_fitted_are_encoded_without_look_up(column):
    rows, new, dtype, rule = column
    values = list(dict.fromkeys([*rows, *new]))
    counts = [sum(type(r) is type(v) and r == v for r in rows) for v in values]
    def outcome(f):
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            try: cats, ids = f(pl.Series(values, dtype=dtype), counts, rule, 'x')
            except ValueError as e: return str(e)
            return list(cats.to_map().items()), cats.n_classes, ids.dtype, ids.tolist()
    def apart(s, *args): return (cats := Categories.fit(s, *args)), cats.encode(s)
    got = outcome(Categories.fit_encode)
    assert got == outcome(apart)
    if not isinstance(got, str): assert got[-1] == [Slow(rows, rule)(v) for v in values]


@quick
@given(columns(), st.randoms())
def test_neither_order_nor_layout_of_rows_matter(column, random):
    rows, new, dtype, rule = column
    try: a = fit(rows, dtype, rule)
    except ValueError: return
    rows = [*rows]
    random.shuffle(rows)
    assert fit(rows, dtype, rule).to_map() == a.to_map()


@quick
@given(columns())
def test_columns_are_encoded_as_their_values(column):
    rows, new, dtype, rule = column
    try: cats = fit(rows, dtype, rule)
    except ValueError: return
    s = pl.Series(new, dtype=dtype)
    nulls = s.is_null().to_numpy()
    if dtype == pl.String:
        dictionary = s.drop_nulls().unique().sort()
        place = {v: i for i, v in enumerate(dictionary)}
        values = np.array([place.get(v, -1) for v in new], np.int32)
    else: dictionary, values = None, s.fill_null(False if dtype == pl.Boolean else 0).to_numpy()
    f = FittedColumn('c', 'categorical', str(dtype), 'Int64', cats)
    assert f.encode(Column('c', dtype, values, dictionary, nulls)).tolist() == cats.encode(s).tolist()


@quick
@given(st.lists(st.text(st.characters(exclude_categories=['Cs']), max_size=60), max_size=80), st.integers(-2**80, 2**80))
def test_hash_of_text(values, seed):
    assert fnv_hash(pl.Series(values, dtype=pl.String), seed).tolist() == [slow_hash(v, seed) for v in values]


@quick
@given(st.lists(integers, max_size=60), st.lists(st.booleans(), max_size=60), st.integers(-2**65, 2**65))
def test_hash_of_integers_and_booleans(ints, flags, seed):
    assert fnv_hash(pl.Series(ints, dtype=pl.Int64), seed).tolist() == [slow_hash(v, seed) for v in ints]
    assert fnv_hash(pl.Series(flags, dtype=pl.Boolean), seed).tolist() == [slow_hash(v, seed) for v in flags]


def test_hash_of_many_lengths():
    values = ['é'*i for i in range(200)] + ['x'*100_000, 'y'*90_000] + ['']*100
    assert fnv_hash(values).tolist() == [slow_hash(v, 0) for v in values]
    assert fnv_hash(pl.Series(values)[150:210]).tolist() == [slow_hash(v, 0) for v in values[150:210]]


@quick
@given(st.lists(st.integers(-2**63, 2**64-1) | st.integers(-9, 9), unique=True, max_size=20), st.lists(st.integers(-2**63, 2**64-1) | st.integers(-9, 9), max_size=30), st.booleans(), st.booleans())
def test_integers_are_found(keys, values, a, b):
    low = lambda xs, unsigned: np.array([x for x in xs if (0 if unsigned else -2**63) <= x < (2**64 if unsigned else 2**63)], np.uint64 if unsigned else np.int64)
    keys, values = np.sort(low(keys, a)), low(values, b)
    known = keys.tolist()
    assert find_integers(keys, values).tolist() == [known.index(v) if v in known else -1 for v in values.tolist()]


def test_integers_far_apart_are_found():
    rng = np.random.default_rng(0)
    keys = np.unique(rng.integers(-2**62, 2**62, 1000))
    values = np.concatenate([rng.choice(keys, 500), rng.integers(-2**62, 2**62, 500)])
    place = {k: i for i, k in enumerate(keys.tolist())}
    assert find_integers(keys, values).tolist() == [place.get(v, -1) for v in values.tolist()]


@pytest.mark.parametrize('case', recorded)
def test_recorded_ids(case):
    "Ids that sequifier 3.1.1.0 gave"
    for name, o in recorded[case]['columns'].items():
        case_map, dtype = recorded[case]['map'][name], DTYPES[o['dtype']]
        rule = recorded[case]['rule'].get(name)
        if case_map is None: case_map = {'[unknown]': 0, '[other]': 1, **{f'[hash_bucket:{i}]': 3+i for i in range(rule['hashing']['num_buckets'])}}
        cats = Categories.from_map(case_map, dtype, rule, name)
        values, ids = zip(*o['values'])
        assert cats.encode(pl.Series(values, dtype=dtype)).tolist() == list(ids)
        assert cats.n_classes == recorded[case]['n_classes'][name]
        if not rule or not rule.get('top_k'): continue
        kept = [v for v, i in o['values'] if 3 <= i < 3+rule['top_k']]
        counts = [5 if v in kept else 1 for v in values]
        assert Categories.fit(pl.Series(values, dtype=dtype), counts, rule, name).to_map() == case_map


def test_hash_only_maps_as_recorded():
    o = recorded['27-hash-only/d']
    for name in ('item', 'code', 'flag'):
        values = pl.Series([v for v, _ in o['columns'][name]['values']], dtype=DTYPES[o['columns'][name]['dtype']])
        got = Categories.fit(values, rule=o['rule'][name], name=name).to_map()
        assert list(got.items()) == list(o['map'][name].items())


# ---- kinds of values

def test_other_types():
    assert Categories.fit(pl.Series(['b', 'a'], dtype=pl.Enum(['b', 'a', 'c']))).encode(pl.Series(['c', 'a', None], dtype=pl.Enum(['c', 'a']))).tolist() == [1, 3, 0]
    assert Categories.fit(pl.Series(['b', 'a'], dtype=pl.Categorical)).to_map() == {'a': 3, 'b': 4, '[unknown]': 0, '[other]': 1}
    assert Categories.fit(pl.Series([2**63, -5 % 2**63], dtype=pl.Int128)).encode(pl.Series([2**63], dtype=pl.UInt64)).tolist() == [4]
    assert Categories.fit(pl.Series([Decimal(3), Decimal(-1)], dtype=pl.Decimal(20, 0))).encode([-1, 3]).tolist() == [3, 4]
    assert Categories.fit(pl.Series([Decimal('1.5')])).to_map() == {'1.5': 3, '[unknown]': 0, '[other]': 1}
    for dtype in (pl.Float32, pl.Date, pl.Datetime, pl.List(pl.Int8), pl.Binary):
        with pytest.raises(TypeError, match="'x' is .* cannot hold categories"): category_values(pl.Series([], dtype=dtype), 'x')


@pytest.mark.parametrize('bits', [2**64, -2**63-1])
def test_integers_beyond_64_bits_are_refused(bits):
    with pytest.raises(ValueError, match=f'{bits}, which does not fit'): category_values(pl.Series([1, bits], dtype=pl.Int128), 'x')


def test_unsigned_ids_and_signed_data():
    "The map of a column that was once unsigned is used on one that is not"
    cats = Categories.from_map({'5': 3, str(2**64-1): 4}, pl.Int64(), name='x')
    assert cats.encode([-1, 5]).tolist() == [1, 3]
    assert cats.encode(pl.Series([2**64-1], dtype=pl.UInt64)).tolist() == [4]


def test_booleans_are_reused():
    cats = Categories.from_map({'0': 3, '1': 4}, pl.Boolean(), name='flag')
    assert cats.encode([True, None, False]).tolist() == [4, 0, 3] and cats.decode([3, 4, 1]).to_list() == [False, True, None]


def test_columns_of_nulls():
    cats = Categories.fit(['a'])
    assert cats.encode(pl.Series([None, None])).tolist() == [0, 0]
    assert cats.encode(pl.Series([], dtype=pl.String)).tolist() == []
    assert Categories.fit([1]).encode(pl.Series([None], dtype=pl.Int8)).tolist() == [0]


def test_labels_among_the_data():
    with pytest.warns(UserWarning, match=r"'x' holds \[other\] and \[unknown\]: taken for the reserved ids 1, 0"): cats = Categories.fit(['[unknown]', 'a', '[other]'], name='x')
    assert cats.to_map() == {'a': 3, '[unknown]': 0, '[other]': 1}
    for rule in (None, dict(top_k=2)):
        with pytest.raises(ValueError, match=r"'x' holds the value '\[mask\]'"): Categories.fit(['a', '[mask]'], rule=rule, name='x')
    hashed = Categories.fit(['a'], rule=dict(hashing=dict(num_buckets=2)), name='x')
    for bad in ('[hash_bucket:1]', '[hash_bucket:]', '[hash_bucket:\n]', '[mask]'):
        with pytest.raises(ValueError, match="'x' holds the value"): hashed.encode(['a', bad])
    assert Categories.fit(['a'], rule=dict(k=1)).encode(['[hash_bucket:1]']).tolist() == [1]


def test_buckets_of_a_stored_map_are_whole():
    rule = dict(hashing=dict(num_buckets=2))
    with pytest.raises(ValueError, match='has not the 2 hash buckets'): Categories.from_map({'a': 3, '[hash_bucket:0]': 4}, pl.String(), rule)
    with pytest.raises(ValueError, match='do not follow each other'): Categories.from_map({'a': 3, '[hash_bucket:0]': 5, '[hash_bucket:1]': 4}, pl.String(), rule)


# ---- fixed maps

def maps(tmp_path, **files):
    for k, v in files.items(): (tmp_path/f'{k}.json').write_text(v if isinstance(v, str) else json.dumps(v), encoding='utf-8')
    return tmp_path


dtypes = dict(item=pl.String(), code=pl.Int64(), flag=pl.Boolean(), amount=pl.Float64())


def test_fixed_maps(tmp_path):
    folder = maps(tmp_path, item={'pear': 3, 'fig': 9, '[mask]': 2}, code={'-1': 3, '[unknown]': 0, '7': 5}, flag={'true': 3, 'false': 4})
    got = read_id_maps(folder, list(dtypes), dtypes, required='item')
    assert got['item'].encode(['fig', 'x', '[mask]', '[other]']).tolist() == [9, 1, 2, 1] and got['item'].n_classes == 10
    assert got['code'].encode([7, -1, 0, None]).tolist() == [5, 3, 1, 0]
    assert got['flag'].encode([True, False]).tolist() == [3, 4]
    assert got['code'].to_map() == {'-1': 3, '[unknown]': 0, '7': 5}


@pytest.mark.parametrize('files, words', [
    (dict(item={'pear': 3, 'fig': 3}), ['item.json', 'same id, 3']), (dict(item={'[mask]': 2}), ['item.json', 'only reserved labels']), (dict(item={}), ['item.json', 'empty']),
    (dict(item={'pear': 3, '[mask]': 7}), ["'[mask]'", 'reserved for 2']), (dict(item={'pear': 2, 'fig': 3}), ['reserved for [mask]']), (dict(item={'pear': 1}), ['reserved for [other]']),
    (dict(item={'pear': -1}), ['expected 3 or more']), (dict(item={'pear': 4}), ['smallest id of a value is 4']), (dict(item={'pear': True}), ['expected a whole number']), (dict(item={'pear': '3'}), ['expected a whole number']),
    (dict(code={'pear': 3}), ['code.json', "'pear' is not an integer"]), (dict(code={str(2**64): 3}), ['does not fit into 64 bits']), (dict(code={str(2**63): 3, '-1': 4}), ['do not fit into one type']), (dict(flag={'2': 3}), ["'2' is not a boolean"]),
    (dict(amount={'1': 3}), ["'amount' holds quantities"]), (dict(colour={'1': 3}), ['colour.json', "no column 'colour'"]), (dict(item='{"a": 3'), ['not readable as JSON']), (dict(item='[1]'), ['is a list']), (dict(item='{"a": 3, "a": 4}'), ['stands there twice']),
    (dict(item={'a': 4}, amount={'1': 3}), ['smallest id', 'quantities'])])
def test_fixed_maps_that_are_refused(tmp_path, files, words):
    with pytest.raises(ValueError) as e: read_id_maps(maps(tmp_path, **files), list(dtypes), dtypes)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_maps_that_must_be_there(tmp_path):
    with pytest.raises(FileNotFoundError, match='id_maps does not exist'): read_id_maps(tmp_path/'id_maps', ['item'], dtypes, ['item'])
    with pytest.raises(ValueError, match="item.json: is missing, .* did you mean 'itm'"): read_id_maps(maps(tmp_path, itm={'a': 3}), ['item', 'itm'], {**dtypes, 'itm': pl.String()}, ['item'])
    assert read_id_maps(tmp_path/'id_maps', ['item'], dtypes) == {}


def test_type_that_cannot_hold_the_ids():
    cats = Categories.fit(range(2**15-2), name='item')
    for dtype in ('Int32', 'UInt16', 'Int64', 'UInt64'): cats.check_fits(dtype)
    with pytest.raises(ValueError, match="'item' has ids up to 32,768, but Int16 holds at most 32,767"): cats.check_fits('Int16')
    Categories.fit(range(2**15-3)).check_fits('Int16')


def test_a_million_texts():
    million = pl.Series(np.random.default_rng(0).permutation(1_000_000)).cast(pl.String)
    cats = Categories.fit(million, name='x')
    assert cats.n_classes == 1_000_000+FIRST_ID and (np.sort(cats.encode(million)) == np.arange(1_000_000)+FIRST_ID).all()
    assert cats.decode(cats.encode(million[:1000])).to_list() == million[:1000].to_list()
    limited = Categories.fit(million, rule=CardinalityRule(top_k=1000, hashing=dict(num_buckets=64)))
    ids = limited.encode(million)
    assert limited.tally(ids)['known'] == 1000 and ids.max() == limited.n_classes-1 and limited.values.to_list() == sorted(million.to_list())[:1000]


@quick
@given(columns())
def test_lines_of_a_map_are_its_json(column):
    rows, _, dtype, rule = column
    try: cats = fit(rows, dtype, rule)
    except ValueError: return
    for o in (cats, Categories.from_map(cats.to_map(), pl.Series([], dtype=dtype).dtype, cats.rule, 'x')): assert o.map_lines() == json.dumps(o.to_map(), separators=('\n', ': '))[1:-1]
