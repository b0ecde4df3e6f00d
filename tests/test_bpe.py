"Byte pairs from counted words: the model and the ids of the `tokenizers` library on the rows themselves."
import json, random

import numpy as np, polars as pl, pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from fastseqprep.bpe import BPE_SPECIALS, BYTE_CHARS, BytePairs, count_words, split_words

quick = settings(max_examples=150, deadline=None, derandomize=True)
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
texts = st.text(max_size=30) | st.text(alphabet=" \t\n'sdtré1½日-.\0\xa0\u2003ab", max_size=30)


def library(rows, size, alphabet=()):
    hf = Tokenizer(models.BPE(unk_token='[UNK]'))
    hf.pre_tokenizer = LEVEL
    hf.train_from_iterator(rows, trainers.BpeTrainer(vocab_size=size, min_frequency=2, special_tokens=BPE_SPECIALS, initial_alphabet=list(alphabet), show_progress=False))
    return hf


def counted(rows, size, alphabet='seen'):
    df = pl.Series('value', rows, dtype=pl.String).value_counts()
    return BytePairs.train(count_words(df['value'], df['count']), size, alphabet)


def ids_of(bpe, rows):
    ids, offsets = bpe.encode(pl.Series(rows, dtype=pl.String))
    return [ids[i:j].tolist() for i, j in zip(offsets, offsets[1:])]


@quick
@given(st.lists(texts))
def test_words_are_those_of_the_library(rows):
    back = {c: b for b, c in enumerate(BYTE_CHARS)}
    want = [[bytes(back[c] for c in w).decode() for w, _ in LEVEL.pre_tokenize_str(t)] for t in rows]
    assert split_words(pl.Series(rows, dtype=pl.String)).to_list() == want


def test_letters_digits_and_spaces_are_told_apart_as_in_the_library():
    chars = [chr(c) for c in range(1, 0x3000) if c != 32] + [chr(c) for c in range(0x3000, 0x30000, 61) if not 0xD800 <= c < 0xE000]
    rows = [f'a{c}a 1{c}1 -{c}- {c}' for c in chars]
    want = [len(LEVEL.pre_tokenize_str(t)) for t in rows]
    assert split_words(pl.Series(rows)).list.len().to_list() == want


@pytest.mark.parametrize('letters', ['a', 'ab', 'abc', '0123 ', 'ab é', "a's b"])
@pytest.mark.parametrize('size', [10, 40, 300])
def test_the_model_is_that_of_the_library(letters, size):
    rng = random.Random(f'{letters}{size}')
    for n in (3, 40, 200):
        rows = [''.join(rng.choices(letters, k=rng.randint(0, 25))) for _ in range(n)] * rng.randint(1, 3)
        assert json.loads(counted(rows, size).json)['model'] == json.loads(library(rows, size).to_str())['model']


def test_the_model_of_all_bytes_is_that_of_the_library():
    rows = ['coffee shop 12', 'Café Zürich', 'grocery store', '日本', 'coffee  shop'] * 3
    for size in (259, 300): assert json.loads(counted(rows, size, 'bytes').json)['model'] == json.loads(library(rows, size, BYTE_CHARS).to_str())['model']


def test_row_order_and_parts_make_no_difference():
    rng = random.Random(3)
    rows = [' '.join(rng.choices(['card', 'cash', 'caf', 'é', '12', '#'], k=4)) for _ in range(500)]
    want = counted(rows, 400).json
    for _ in range(5): assert counted(rng.sample(rows, len(rows)), 400).json == want


@quick
@given(st.lists(texts, min_size=1), st.lists(texts, max_size=5))
def test_ids_are_those_of_the_library(seen, new):
    bpe = counted([t for t in seen if t] * 2, 320)
    hf = Tokenizer.from_str(json.dumps({**json.loads(bpe.json), 'added_tokens': []}))  # reserved tokens in data are data
    assert ids_of(bpe, seen + new) == [hf.encode(t).ids or [0] for t in seen + new]


@quick
@given(st.lists(texts | st.sampled_from(['[MASK]', '[UNK]', 'x [PAD] y', '\\[MASK]']), min_size=1))
def test_seen_texts_are_decoded(rows):
    bpe = counted(rows * 30, 600)
    for t, ids in zip(rows, ids_of(bpe, rows)):
        assert t == '' and ids == [0] or bpe.decode(ids) == t and min(ids) > 2


def test_a_frequent_mask_is_still_text():
    bpe = counted(['[MASK]'] * 1000 + ['[UNK] and [PAD]'] * 1000, 400)
    for ids in ids_of(bpe, ['[MASK]', '[UNK] and [PAD]']): assert min(ids) > 2
    assert [bpe._model['vocab'][s] for s in BPE_SPECIALS] == [0, 1, 2]


def test_counts_of_any_size():
    "A count of billions is a number like any other"
    words = count_words(['card payment', 'cash'], [5_000_000_000, 3])
    assert len(BytePairs.train(words, 300)) == len(counted(['card payment'] * 5 + ['cash'] * 3, 300))
    assert words['count'].max() == 5_000_000_000


def test_nothing_to_learn_from():
    bpe = BytePairs.train(count_words([], []), 300)
    assert len(bpe) == 3 and ids_of(bpe, ['', 'ab']) == [[0], [0, 0]]
    assert bpe.encode(pl.Series([], dtype=pl.String))[1].tolist() == [0]
    assert np.array_equal(bpe.encode(pl.Series([None, None], dtype=pl.String))[0], [0, 0])
