"""The tokenizer on the recorded cases (`cases/events`) and on random tables.

With default settings the vocabularies, bounds, byte pairs and ids are those of fastpragma 0.0.1, number by number; with its settings, those of 0.0.20.
Where ours differs on purpose the difference is listed here with its reason; `test_events_cases.py` has the values themselves.
"""
import json, warnings
from pathlib import Path

import numpy as np, polars as pl, pytest
from hypothesis import given, settings, strategies as st

from fastseqprep.source import DataSource, Field
from fastseqprep.tokenizer import FieldCounts, Tokenizer
from fastseqprep.vocab import SPECIALS, UNK_ID

CASES = Path(__file__).parent/'cases'/'events'
NAMES = sorted(p.name for p in CASES.iterdir() if (p/'spec.json').exists())
COLUMNS = ['key', 'key_id', 'value', 'val_id', 'val_pos', 'vtype', 'time', 'event_idx']
quick = settings(max_examples=80, deadline=None, derandomize=True)
pytestmark = pytest.mark.filterwarnings('ignore:conts')


def read(case, name): return json.loads((CASES/case/name).read_text(encoding='utf-8'))


def source(case, s, entity_col, is_profile=False, null_time='drop'):
    roles = {k: s[k] for k in ('cats', 'conts', 'signed_conts', 'texts', 'lifelong', 'time_col') if s.get(k)}
    return DataSource.from_file(CASES/case/s['file'], name=s['name'], entity_col=entity_col, is_profile=is_profile, **roles, **({} if is_profile else dict(null_time=null_time)))


def sources(case, null_time='drop'):
    spec = read(case, 'spec.json')
    e = spec['entity_col']
    return {**({-1: source(case, spec['profile'], e, True)} if spec['profile'] else {}), **{i: source(case, s, e, null_time=null_time) for i, s in enumerate(spec['events'])}}


def fitted(case, null_time='drop', **kw): return Tokenizer(**{**read(case, 'spec.json')['tokenizer'], **kw}).fit(list(sources(case, null_time).values()))


VOCAB_DIFFERS = {
    '21_collisions': "data spelled like reserved tokens have ids of their own",
    '25_formats': "each column has its own text: no detour over a common float",
    '27_mixed_int_float': "an int category beside a float number stays '3'"}


@pytest.mark.parametrize('case', NAMES)
def test_vocabularies_of_the_documented_version(case):
    tok, want = fitted(case, 'profile'), read(case, 'expected-0.0.1/tokenizer.json')  # the recorded fit counted rows without a time
    assert list(tok.key_vocab.items()) == list(want['key_vocab'].items())
    assert (list(tok.val_vocab.items()) == list(want['val_vocab'].items())) == (case not in VOCAB_DIFFERS)
    assert tok.num_bounds == want['num_bounds']  # not a bit of difference
    assert tok.lowcard_text_keys == want['lowcard_text_keys']
    assert (tok.num_buckets, tok.cardinality_threshold) == (want['num_buckets'], want['cardinality_threshold'])
    assert (tok.bpe is not None) == ('bpe_path' in want)
    if tok.bpe: assert json.loads(tok.bpe.json)['model'] == read(case, 'expected-0.0.1/'+want['bpe_path'])['model']


@pytest.mark.parametrize('case', [c for c in NAMES if (CASES/c/'expected-0.0.1'/'rows.json').exists()])
def test_rows_of_the_documented_version(case):
    differs = {'02_nulls', '14_epochs',  # events without a time are left out here
               '03_numeric',             # an int keeps its own text beside floats
               '08_bpe_merges',          # a literal [MASK] is text
               *VOCAB_DIFFERS}
    tok, e = fitted(case), read(case, 'spec.json')['entity_col']
    cols = read(case, 'expected-0.0.1/rows.json')['rows']
    rows = [dict(zip(cols, r)) for r in zip(*cols.values())]
    order = lambda r: (r[0], r[8], r[1], r[5], r[7], r[3])  # the recorded order: ties by time and value
    same = all(sorted(tok.encode_source(s).select(e, *COLUMNS).rows(), key=order) == [tuple(r[c] for c in [e, *COLUMNS]) for r in rows if r['source_idx'] == i]
               for i, s in sources(case).items())
    assert same == (case not in differs)


NEWEST = {  # case: least count, categories and texts in the vocabulary of 0.0.20
    '01_basic': (2, ['1', '2', '242', '3', '300', '4', '51', '85711', 'M'], ['other', 'technician', 'writer']),
    '02_nulls': (2, ['', 'a', 'x'], ['red', 'u', 'v']),
    '08_bpe_merges': (2, ['k'], []),
    '11_two_sources': (2, ['5411', 'a', 'home', 'pay'], []),
    '15_string_ids': (2, ['f', 'm', 'x', 'y'], []),
    '22_unseen': (2, ['a', 'x', 'y'], ['u', 'v']),
    '25_formats': (1, ['', '-7', '0.30000000000000004', '1', '1.0', '1960-01-01', '1e+20', '2.5', '2020-01-01', '2020-01-01 00:00:00.000000',
                       '2020-01-01 01:02:03.000456', '2020-01-01 12:00:00.000000', '2020-02-02', 'false', 'true'], [])}


@pytest.mark.parametrize('case', NEWEST)
def test_vocabularies_of_the_newest_version(case):
    "Its rules are options here: frequent values only, and a symbol for every byte"
    min_freq, cats, texts = NEWEST[case]
    tok = fitted(case, min_freq=min_freq, max_values_per_key=100_000, bpe_alphabet='bytes')
    assert list(tok.val_vocab) == [*SPECIALS, *cats, *(f'<bucket_{i}>' for i in range(tok.num_buckets + 1)), *texts]
    if case == '08_bpe_merges':
        assert len(tok.bpe) == 278 and json.loads(tok.bpe.json)['model']['merges'] == read(case, 'expected-0.0.1/tokenizer_bpe.json')['model']['merges']


def test_new_data_with_a_fitted_tokenizer():
    case = '22_unseen'
    tok, spec = fitted(case), read(case, 'spec.json')
    for s, want in zip(spec['encode'], read(case, 'expected-0.0.1/encode.json')):
        df = tok.encode_source(source(case, s, 'id'))
        assert {k: str(t) for k, t in df.schema.items()} == want['columns']
        assert df.to_dict(as_series=False) == want['rows']


# ---------------------------------------------------------------- random tables
WORDS = ['a', 'b', 'é', '', '1', '1.0', *SPECIALS, '[NULL]', '\\[MASK]', '\\\\[UNK]', '<bucket_0>', '<bucket_1>', '\\<bucket_1>', 'a=b', '=', 'positive', ' ', '\n', '日本']
cells = st.none() | st.sampled_from(WORDS) | st.text(max_size=8)
TABLE = st.lists(st.tuples(cells, cells, cells, st.none() | st.floats() | st.sampled_from([0., 1., 2.])), min_size=1, max_size=25)


def table(rows):
    df = pl.DataFrame(rows, schema={'c': pl.String, 'd': pl.String, 't': pl.String, 'n': pl.Float64}, orient='row').with_row_index('id')
    return df, DataSource(df, cats=['c', 'd'], texts='t', conts='n', entity_col='id', is_profile=True)


OPTIONS = st.fixed_dictionaries({}, optional=dict(
    num_buckets=st.integers(1, 5), cardinality_threshold=st.sampled_from([0, 2, 100]), min_freq=st.integers(1, 2), max_values_per_key=st.integers(1, 3),
    values=st.sampled_from(['flat', 'per_key']), null_token=st.booleans(), bpe_alphabet=st.sampled_from(['seen', 'bytes'])))


@quick
@given(TABLE, OPTIONS)
def test_what_is_kept_is_decoded(rows, options):
    df, src = table(rows)
    tok = Tokenizer(**options).fit(src)
    again = Tokenizer.from_dict(json.loads(json.dumps(tok.to_dict())))
    assert again.to_dict() == tok.to_dict() and again.hash == tok.hash
    null = 3 if tok.null_token else None
    for field in src.fields:
        column = df[field.name]
        enc = tok.encode_dictionary(field.name, field.kind, column)
        twin = again.encode_dictionary(field.name, field.kind, column)
        assert np.array_equal(enc.ids, twin.ids) and np.array_equal(enc.offsets, twin.offsets) and enc.strings == twin.strings
        assert (np.diff(enc.offsets) >= 1).all() and enc.ids.max() < tok.n_vals
        key_id = tok.key_vocab[field.name]
        for x, i, j in zip(column, enc.offsets, enc.offsets[1:]):
            ids = enc.ids[i:j]
            assert not set(ids) & {0, 1}  # never padding, never a mask
            if x is None and null: assert ids.tolist() == [null]
            elif set(ids) & {UNK_ID, tok.bpe_offset}: pass  # rare, or a byte never seen
            elif field.kind != 'num': assert tok.decode(key_id, ids) == (x or '')
            else:
                low, high = tok.bucket_range(field.name, tok.bucket_of(field.name, int(ids[0])))
                assert x == low == high == 0 or low < x <= high
    if options.keys() <= {'cardinality_threshold', 'values'}:  # nothing is rare: every category comes back
        for c in 'cd': assert not (tok.encode_dictionary(c, 'cat', df[c]).ids == UNK_ID).any()


@quick
@given(TABLE, OPTIONS, st.randoms(use_true_random=False))
def test_any_parts_of_the_rows_fit_the_same(rows, options, rng):
    df, src = table(rows)
    want = Tokenizer(**options).fit(src).to_dict()
    shuffled = df.sample(fraction=1, shuffle=True, seed=rng.randrange(1000))
    total = Tokenizer(**options).counts()
    for part in (shuffled[:len(df)//2], shuffled[len(df)//2:]): total.merge(FieldCounts.from_bytes(Tokenizer(**options).counts().add_rows(src, part).to_bytes()))
    assert Tokenizer(**options).fit_counts(total).to_dict() == want


@quick
@given(TABLE)
def test_columns_are_their_distinct_values(rows):
    df, src = table(rows)
    tok = Tokenizer(3, 2).fit(src)
    for field in src.fields:
        col, = tok.encode_column(field, df[field.name])
        ids, offsets, strings = tok.encode_dictionary(field.name, field.kind, df[field.name])
        for row, code in enumerate(col.codes.tolist()):
            e = col.encoded
            assert e.ids[e.offsets[code]:e.offsets[code+1]].tolist() == ids[offsets[row]:offsets[row+1]].tolist()
            assert e.strings[code] == strings[row]


# ---------------------------------------------------------------- single rules
def profile(**cols):
    df = pl.DataFrame(cols)
    return df.with_row_index('id') if 'id' not in cols else df


def fit(df, roles, **kw): return Tokenizer(**kw).fit(DataSource(df, entity_col='id', is_profile=True, **roles))


def test_one_bad_number_harms_no_other():
    good = fit(profile(n=[1., 2., 3., 4.]), dict(conts='n'), num_buckets=2)
    for bad in (float('nan'), float('inf'), -float('inf'), None):
        tok = fit(profile(n=[1., 2., bad, 3., 4.]), dict(conts='n'), num_buckets=2)
        assert tok.num_bounds == good.num_bounds
        assert tok.encode_dictionary('n', 'num', pl.Series([bad, 1.], dtype=pl.Float64)).ids.tolist() == [UNK_ID, tok.vocab.bucket_ids(None)[1]]


def test_a_text_is_short_up_to_the_threshold():
    df = profile(t=['a', 'b', 'c', None])
    assert fit(df, dict(texts='t'), cardinality_threshold=4).lowcard_text_keys == ['t']
    assert fit(df, dict(texts='t'), cardinality_threshold=3).lowcard_text_keys == []
    assert fit(df, dict(texts='t'), cardinality_threshold=3, null_token=True).lowcard_text_keys == ['t']


def test_a_text_that_was_empty_when_fitted_is_unknown_later():
    tok = fit(profile(t=pl.Series([None, None], dtype=pl.String)), dict(texts='t'))
    e = tok.encode_dictionary('t', 'text', pl.Series(['new', '']))
    assert e.ids.tolist() == [UNK_ID, UNK_ID]
    tok = fit(profile(t=pl.Series([None, None], dtype=pl.String)), dict(texts='t'), cardinality_threshold=0)
    assert tok.encode_dictionary('t', 'text', pl.Series(['new', ''])).ids.tolist() == [tok.bpe_offset]*4


def test_keys_spelled_like_reserved_tokens():
    df = profile(**{'[PAD]': ['a'], 'b': ['c'], '[USR]': ['d']})
    tok = fit(df, dict(cats=['[PAD]', 'b', '[USR]']))
    assert list(tok.key_vocab)[5:] == ['\\[PAD]', '\\[USR]', 'b']
    again = Tokenizer.from_dict(json.loads(json.dumps(tok.to_dict())))
    assert [again.key_name(i) for i in (5, 6, 7)] == ['[PAD]', '[USR]', 'b']
    assert tok.encode_source(DataSource(df, cats=['[PAD]', '[USR]'], entity_col='id', is_profile=True))['key_id'].to_list() == [5, 6]


def test_sources_may_ask_for_their_own_settings_but_have_to_agree():
    a = DataSource(profile(n=[1., 2., 3.], t=['x', 'y', 'z']), conts='n', texts='t', entity_col='id', is_profile=True, num_buckets=3, cardinality_threshold=2)
    b = DataSource(profile(n=[1.]), conts='n', entity_col='id', is_profile=True, num_buckets=4)
    tok = Tokenizer(2).fit(a)
    assert len(tok.num_bounds['n']) == 2 and tok.lowcard_text_keys == [] and list(tok.val_vocab)[-1] == '<bucket_3>'
    with pytest.raises(ValueError, match="field 'n' has num_buckets=3 in one source and 4 in another"): Tokenizer().fit([a, b])


def test_values_of_each_key_are_told_apart():
    df = profile(movie=['1', '2'], stars=['1', '[MASK]'], age=[1., 2.], height=[1., 3.])
    roles = dict(cats=['movie', 'stars'], conts=['age', 'height'])
    tok = fit(df, roles, values='per_key', num_buckets=2)
    assert list(tok.val_vocab)[3:] == ['movie=1', 'movie=2', 'stars=1', 'stars=\\[MASK]', *[f'{k}=<bucket_{i}>' for k in ('age', 'height') for i in range(3)]]
    together = fit(df, roles, values='per_key', num_buckets=2, shared_domains={'size': ['age', 'height'], 'any': ['movie', 'stars']})
    assert list(together.val_vocab)[3:] == ['any=1', 'any=2', 'any=\\[MASK]', 'size=<bucket_0>', 'size=<bucket_1>', 'size=<bucket_2>']


def test_missing_rare_and_empty_are_three_things():
    tok = fit(profile(c=['a', 'a', '', '', 'b', None]), dict(cats='c'), min_freq=2, null_token=True)
    ids = tok.encode_dictionary('c', 'cat', pl.Series(['b', '', None])).ids.tolist()
    assert len(set(ids)) == 3 and ids[0] == UNK_ID and ids[2] == tok.val_vocab['[NULL]'] == 3
    assert tok.encode_null('c', 'cat').strings.to_pylist() == ['[NULL]']


def test_the_most_frequent_values_are_kept():
    df = profile(c=['a']*3 + ['b']*2 + ['c']*2 + ['d'])
    assert [list(fit(df, dict(cats='c'), max_values_per_key=k).val_vocab)[3:-101] for k in (1, 2, 4)] == [['a'], ['a', 'b'], ['a', 'b', 'c', 'd']]
    assert list(fit(df, dict(cats='c'), min_freq=2).val_vocab)[3:-101] == ['a', 'b', 'c']


def test_settings_are_checked_all_at_once():
    with pytest.raises(ValueError) as e: Tokenizer(0, -1, min_freq=0, max_values_per_key=0, values='x', bpe_vocab_size=258, bpe_alphabet='y', shared_domains={'d': ['k'], 'e': ['k']})
    for word in 'num_buckets', 'cardinality_threshold', 'min_freq', 'max_values_per_key', 'values', 'bpe_vocab_size', '259', 'bpe_alphabet', 'shared_domains': assert word in str(e.value)


def test_a_second_fit_has_to_be_asked_for():
    src = DataSource(profile(c=['a']), cats='c', entity_col='id', is_profile=True)
    tok = Tokenizer().fit(src)
    first = tok.hash
    with pytest.raises(ValueError, match='refit=True'): tok.fit(src)
    with pytest.raises(ValueError, match='refit=True'): tok.fit_counts(tok.counts().declare(src))
    other = DataSource(profile(c=['b']), cats='c', entity_col='id', is_profile=True)
    assert tok.fit(other, refit=True).hash != first and list(tok.val_vocab)[3] == 'b'


def test_an_unfitted_tokenizer_says_so():
    for use in (lambda t: t.n_vals, lambda t: t.hash, lambda t: t.encode_dictionary('a', 'cat', ['x']), lambda t: t.save('/nowhere')):
        with pytest.raises(ValueError, match='not fitted yet'): use(Tokenizer())


def test_a_field_without_numbers_is_pointed_out():
    df = profile(on=[True, False, None], word=['x', 'y', None], empty=pl.Series([None]*3, dtype=pl.Float64), zero=[0, 0, 0])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        tok = fit(df, dict(conts=['on', 'word', 'empty', 'zero']))
    assert len(seen) == 1 and "'on', 'word':" in str(seen[0].message)
    assert tok.num_bounds == {} and (tok.encode_dictionary('zero', 'num', [0, 1]).ids == UNK_ID).all()


# ---------------------------------------------------------------- files
def test_a_file_is_checked(tmp_path):
    tok = fit(profile(c=['a', 'b'], n=[1., 2.], t=['x y', 'z']), dict(cats='c', conts='n', texts='t'), cardinality_threshold=1)
    tok.save(tmp_path)
    good = (tmp_path/'tokenizer.json').read_text()
    assert Tokenizer.load(tmp_path).hash == Tokenizer.load(tmp_path/'tokenizer.json').hash == tok.hash
    for change in (lambda d: d['num_bounds']['n'].append(9.), lambda d: d['val_vocab'].update(c=3), lambda d: d.pop('hash'), lambda d: d.update(bpe=d['bpe'].replace('x', 'q')),
                   lambda d: d['options'].update(min_freq=2), lambda d: d.pop('options')):
        d = json.loads(good)
        change(d)
        (tmp_path/'tokenizer.json').write_text(json.dumps(d))
        with pytest.raises(ValueError, match='tokenizer.json was changed'): Tokenizer.load(tmp_path)
    for text in ('{', '[]', '{}', good[:-100]):
        (tmp_path/'tokenizer.json').write_text(text)
        with pytest.raises(ValueError, match='tokenizer.json'): Tokenizer.load(tmp_path)
    (tmp_path/'tokenizer.json').write_text(good.replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match='version 2'): Tokenizer.load(tmp_path)
    with pytest.raises(FileNotFoundError): Tokenizer.load(tmp_path/'none')


def test_saved_twice_is_the_same_file(tmp_path):
    df, roles = profile(c=['a', 'b'], t=['x y', 'z']), dict(cats='c', texts='t')
    for name in 'ab': fit(df, roles, cardinality_threshold=1).save(tmp_path/f'{name}.json')
    assert (tmp_path/'a.json').read_bytes() == (tmp_path/'b.json').read_bytes()
    Tokenizer.load(tmp_path/'a.json').save(tmp_path/'c.json')
    assert (tmp_path/'c.json').read_bytes() == (tmp_path/'a.json').read_bytes()


@pytest.mark.parametrize('case', [n for n in NAMES if n != '21_collisions'])  # there the old file itself is ambiguous
def test_files_of_the_documented_version_are_read(case):
    want = read(case, 'expected-0.0.1/tokenizer.json')
    tok = Tokenizer.load(CASES/case/'expected-0.0.1')
    assert (tok.key_vocab, tok.val_vocab, tok.num_bounds, tok.lowcard_text_keys) == tuple(want[k] for k in ('key_vocab', 'val_vocab', 'num_bounds', 'lowcard_text_keys'))
    if case in ('25_formats', '27_mixed_int_float'): return  # these texts are not ours
    ours = fitted(case)
    for s in sources(case).values(): assert tok.encode_source(s).equals(ours.encode_source(s))


def test_files_of_the_newest_version_are_read(tmp_path):
    "One file with the byte pairs as text inside it"
    case = '08_bpe_merges'
    old = read(case, 'expected-0.0.1/tokenizer.json')
    bpe = (CASES/case/'expected-0.0.1'/old.pop('bpe_path')).read_text()
    (tmp_path/'tokenizer.json').write_text(json.dumps({'version': 1, **old, 'bpe_vocab_size': 300, 'bpe_offset': len(old['val_vocab']), 'bpe': bpe}))
    tok, ours = Tokenizer.load(tmp_path), fitted(case)
    s = sources(case)[0]
    assert tok.encode_source(s).equals(ours.encode_source(s)) and tok.n_vals == ours.n_vals


def test_an_old_file_cannot_reach_out_of_its_folder(tmp_path):
    d = read('08_bpe_merges', 'expected-0.0.1/tokenizer.json')
    (tmp_path/'in').mkdir()
    (tmp_path/'secret.json').write_text('{}')
    (tmp_path/'in'/'tokenizer.json').write_text(json.dumps({**d, 'bpe_path': '../secret.json'}))
    with pytest.raises(ValueError, match='secret.json'): Tokenizer.load(tmp_path/'in')


def test_a_reserved_token_in_an_old_text_model_is_out_of_reach():
    tok = Tokenizer.load(CASES/'08_bpe_merges'/'expected-0.0.1')
    e = tok.encode_dictionary('d', 'text', ['[MASK] x', '[UNK]'])
    assert tok.decode(tok.key_vocab['d'], e.ids[:e.offsets[1]]) == '[MASK] x' and not {tok.bpe_offset+1, tok.bpe_offset+2} & set(e.ids.tolist())


def test_a_field_that_changed_its_kind_is_refused():
    tok = fit(profile(c=['1', '2']), dict(cats='c'))
    src = DataSource(profile(c=[1, 2]), conts='c', entity_col='id', is_profile=True, name='june')
    with pytest.raises(ValueError, match="source 'june': 'c' is num here and was cat"): tok.encode_source(src)


def test_signed_fields():
    df = profile(x=[-5, 0, 3, None])
    src = DataSource(df, conts='x', signed_conts='x', entity_col='id', is_profile=True)
    tok = Tokenizer(2).fit(src)
    size, sign = tok.encode_column(Field('x', 'num', True), df['x'])
    assert [size.encoded.strings[i].as_py() for i in size.codes.tolist()] == ['5', '0', '3', '']
    assert [sign.encoded.strings[i].as_py() for i in sign.codes.tolist()] == ['negative', 'zero', 'positive', 'unknown']
    assert tok.num_bounds == {'x': [4.]} and [k for k in tok.val_vocab if k.isalpha()] == ['negative', 'positive', 'unknown', 'zero']


def test_a_tokenizer_travels_to_other_processes():
    import pickle
    df, src = table([('a', 'b', 'some text', 1.), ('b', None, 'other', 2.)])
    tok = Tokenizer(3, 1).fit(src)
    tok.encode_source(src)
    twin = pickle.loads(pickle.dumps(tok))
    assert twin.hash == tok.hash and twin.encode_source(src).equals(tok.encode_source(src))
