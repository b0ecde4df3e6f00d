"""The faster encoder: the ids of `tokenizers` on all texts, and a reason wherever it is not used."""
import functools, json, pickle, random, sys, tempfile
from pathlib import Path
import numpy as np, pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
import fastseqprep.fast_encoder as fe
from fastseqprep.fast_encoder import EncoderDiffers, FastEncoder, PlainEncoder, awkward_texts, choose_encoder, some_texts
from fastseqprep.ragged import Ragged
from fastseqprep.text_tokenizer import TextTokenizer

pytest.importorskip('fastokens')
L,N,S = r'\p{L}',r'\p{N}',r'\s'
ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = rf"{ENDS}|[^\r\n{L}{N}]?{L}+|%s| ?[^{S}{L}{N}]+[\r\n]*|{S}*[\r\n]+|{S}+(?!\S)|{S}+"
CASED = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + ENDS + r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + ENDS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPECIALS = ['<|endoftext|>','<s>','</s>','<|im_start|>','<|im_end|>']

def cut(*patterns): return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(p), 'isolated') for p in patterns), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
def ends(t): return processors.TemplateProcessing(single='<s> $A </s>', special_tokens=[(o, t.token_to_id(o)) for o in ('<s>','</s>')])
ADDED = [AddedToken('<think>', special=False, normalized=False), AddedToken('import os', special=False, normalized=True), AddedToken('<mask>', lstrip=True, special=True)]

STYLES = dict( # how texts are cut, normalizer, what adds special tokens, added tokens
    gpt2 = (pre_tokenizers.ByteLevel(add_prefix_space=False), None, None, ()),
    prefix = (pre_tokenizers.ByteLevel(add_prefix_space=True), None, ends, ()),
    added = (pre_tokenizers.ByteLevel(add_prefix_space=False), None, None, ADDED),
    llama3 = (cut(WORDS % r'\p{N}{1,3}'), None, ends, ()),
    qwen = (cut(WORDS % r'\p{N}'), normalizers.NFC(), None, ()),
    cased = (cut(CASED), None, None, ()),
    deepseek = (cut(r'\p{N}{1,3}', '[一-龥\u3040-ゟ゠-ヿ]+', r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""), None, None, ()),
    digits = (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]), None, None, ()))

@functools.lru_cache
def corpus(): return [Path(sys.modules[o].__file__).read_text(encoding='utf-8') for o in ('json','tempfile','random','functools','pathlib')] + ['漢字かな русский العربية 한국어 ünïcödé — “x” 😀👩‍👩‍👧 '*20]

@functools.lru_cache
def tokenizer(style):
    pre,norm,post,added = STYLES[style]
    t = Tokenizer(models.BPE(ignore_merges=style=='llama3'))
    t.pre_tokenizer,t.decoder = pre,decoders.ByteLevel()
    if norm: t.normalizer = norm
    t.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=3000, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.add_tokens(list(added))
    if post: t.post_processor = post(t)
    folder = tempfile.mkdtemp()
    t.save(f'{folder}/tokenizer.json')
    return TextTokenizer(folder)

@functools.lru_cache
def encoder(style): return choose_encoder(tokenizer(style), corpus(), True)

@pytest.mark.parametrize('style', STYLES)
def test_used_and_equal(style):
    tok,enc = tokenizer(style),encoder(style)
    assert enc.name=='fastokens' and 'on texts of the data and awkward texts' in enc.why
    texts = corpus()+awkward_texts(tok)+[''.join(corpus())*3]
    for special in (False,True): assert enc.encode(texts, special)==tok.plain_encode(texts, special)

parts = st.one_of(st.sampled_from([' ','  ','\n','\r\n','\t','\xa0','\u3000','\u200d','<|im_end|>','<|im_start|>assistant\n','<s>','<mask>','<think>','import os',"'s","'LL",'’re','the ','Sea','XMLHttp',
    '1','123','12345','٣','²','ǅ','e\u0301','\u0301','q\u0323\u0307','\u1100\u1161','한','文','ا','😀','👩‍👩‍👧','🇩🇪','\x00','...','_','/','$']), st.text(st.characters(exclude_categories=('Cs',)), max_size=12))

@pytest.mark.parametrize('style', STYLES)
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.lists(parts, max_size=30).map(''.join), max_size=8), special=st.booleans())
def test_any_text(style, texts, special):
    tok,want = tokenizer(style),tokenizer(style).plain_encode(texts, special)
    assert encoder(style).encode(texts, special)==want
    assert encoder(style).raw(texts, special)==want
    tok.use(encoder(style))
    try: assert tok.encode(texts, special)==want
    finally: tok.use(None)

@pytest.mark.parametrize('style', ['gpt2','qwen'])
def test_spans(style):
    "Tokens of spans are the same with either encoder"
    tok,rng = tokenizer(style),random.Random(0)
    texts = [''.join(rng.choices(['a ','sea','\n','e\u0301','😀','<|im_end|>','1','文'], k=rng.randint(1,9))) for _ in range(50)]
    rows = [i for i in range(50) for _ in range(2)]
    spans = [sorted((rng.randint(0, len(texts[i])), rng.randint(0, len(texts[i])))) for i in rows]
    want = tok.encode_spans(texts, rows, spans)
    try: got = tok.use(encoder(style)).encode_spans(texts, rows, spans)
    finally: tok.use(None)
    assert got[0]==want[0] and np.array_equal(got[1], want[1])

def test_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, 'fastokens', None)
    enc = choose_encoder(tokenizer('gpt2'), corpus())
    assert enc.name=='tokenizers' and 'not installed' in enc.why and 'fastseqprep[fast]' in enc.why
    with pytest.raises(ValueError, match='fast is True, but fastokens is not installed'): choose_encoder(tokenizer('gpt2'), corpus(), True)
    assert choose_encoder(tokenizer('gpt2'), corpus(), False).why=='fast is False'

def odd(what):
    "A `raw` that is wrong for texts with a word in them"
    right = FastEncoder.raw
    def raw(self, texts, special=False):
        res = right(self, texts, special)
        hit = [i for i,o in enumerate(texts) if what in o]
        if not hit: return res
        values = res.values.copy()
        for i in hit: values[res.offsets[i]:res.offsets[i+1]] = 0
        return Ragged(values, res.offsets)
    return raw

def test_differs_on_the_data(monkeypatch):
    monkeypatch.setattr(FastEncoder, 'raw', odd('zebra'))
    tok = tokenizer('gpt2')
    assert choose_encoder(tok, ['a horse']).name=='fastokens'
    enc = choose_encoder(tok, ['a horse', 'a zebra'])
    assert enc.name=='tokenizers' and "other ids than tokenizers for the text 'a zebra'" in enc.why
    assert enc.encode(['a zebra'])==tok.plain_encode(['a zebra'])
    with pytest.raises(ValueError, match='fast is True, but .*zebra'): choose_encoder(tok, ['a zebra'], True)

def test_differs_on_awkward_texts(monkeypatch):
    monkeypatch.setattr(fe, '_known', {})
    monkeypatch.setattr(FastEncoder, 'raw', odd('\u200b'))
    enc = choose_encoder(tokenizer('gpt2'), ['a horse'])
    assert enc.name=='tokenizers' and 'other ids' in enc.why

def test_differs_while_at_work(monkeypatch):
    "A difference that no sample showed ends the work; the same texts are looked at, however they are cut into batches"
    monkeypatch.setattr(FastEncoder, 'raw', odd('zebra'))
    tok,texts = tokenizer('gpt2'),[f'a zebra with {i} stripes' for i in range(3000)]
    enc = choose_encoder(tok, ['a horse'], True)
    looked = fe._looked_at(texts)
    assert 0<len(looked)<20
    for size in (7, 100, 3000):
        hit = []
        for lo in range(0, len(texts), size):
            try: enc.encode(texts[lo:lo+size])
            except EncoderDiffers as e:
                hit.append(lo//size)
                assert 'set fast to False' in str(e)
        assert hit==sorted({i//size for i in looked})

def test_unsupported(tmp_path):
    t = Tokenizer(models.WordLevel({'sea':0, '?':1}, unk_token='?'))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.save(str(tmp_path/'tokenizer.json'))
    tok = TextTokenizer(tmp_path)
    enc = choose_encoder(tok, ['the sea'])
    assert enc.name=='tokenizers' and 'cannot open this tokenizer' in enc.why and enc.encode(['the sea'])[0].tolist()==[1,0]

def test_failing(monkeypatch):
    "Even a panic, which is no Exception, costs only the speed"
    class Panic(BaseException): pass
    def raw(self, texts, special=False): raise Panic
    enc = encoder('gpt2')
    monkeypatch.setattr(FastEncoder, 'raw', raw)
    assert enc.encode(corpus())==tokenizer('gpt2').plain_encode(corpus())
    monkeypatch.setattr(fe, '_known', {})
    assert choose_encoder(tokenizer('gpt2'), corpus()).name=='tokenizers'
    def stop(self, texts, special=False): raise KeyboardInterrupt
    monkeypatch.setattr(FastEncoder, 'raw', stop)
    with pytest.raises(KeyboardInterrupt): enc.encode(['x'])

def test_half_a_character():
    "A sample may hold what cannot be encoded; it is no reason against an encoder"
    assert choose_encoder(tokenizer('gpt2'), ['a\ud800', 'sea']).name=='fastokens'
    assert some_texts([dict(a='x\ud800', b='y')])==['y']

@pytest.mark.parametrize('kind', [FastEncoder, PlainEncoder])
def test_pickle(kind):
    enc = kind(tokenizer('llama3'), 'a reason')
    again = pickle.loads(pickle.dumps(enc))
    assert (again.name, again.why)==(kind.name, 'a reason') and again.encode(corpus(), True)==enc.encode(corpus(), True)
    tok = TextTokenizer(tokenizer('llama3').path).use(enc)
    there = pickle.loads(pickle.dumps(tok))
    assert (there.encoder.name, there.encoder.why, there.hash)==(kind.name, 'a reason', tok.hash)

def test_settings_are_left_out(tmp_path):
    "Cutting and padding that a tokenizer.json asks for are off in both"
    t = Tokenizer.from_file(str(Path(tokenizer('gpt2').path)/'tokenizer.json'))
    t.enable_truncation(3); t.enable_padding(length=8)
    t.save(str(tmp_path/'tokenizer.json'))
    tok = TextTokenizer(tmp_path)
    enc = choose_encoder(tok, corpus(), True)
    assert enc.encode(corpus())==tokenizer('gpt2').plain_encode(corpus())

# The job: what is written never depends on the encoder

def job(where, name, data, tok, **kwargs):
    from fastseqprep.text_config import TextConfig
    from fastseqprep.text_pipeline import TextPipeline
    cfg = TextConfig.for_shape('pretrain', preprocessing=dict(min_chars=0, packing_strategy='bfd', max_packed_len=256), validation=.1, dedupe=True)
    return TextPipeline(cfg, data, where/name, tok.path, progress=False, **kwargs).run()

def written(res): return {o.relative_to(res.path).as_posix():o.read_bytes() for o in sorted(Path(res.path).rglob('*')) if o.is_file() and o.name!='manifest.json'}
def facts(res): return {k:v for k,v in res.facts.items() if k!='tokenizer'}

@pytest.fixture
def data(tmp_path):
    rng,lines = random.Random(1),[o for t in corpus() for o in t.split('\n') if o.strip()]
    texts = ['\n'.join(rng.choices(lines, k=rng.randint(1,12))) for _ in range(400)]+[f'a zebra with {i} stripes' for i in range(1500)]
    path = tmp_path/'data.jsonl'
    path.write_text('\n'.join(json.dumps(dict(text=t)) for t in texts))
    return path

def test_job(tmp_path, data):
    tok = tokenizer('qwen')
    plain,fast,auto,there = (job(tmp_path, str(i), data, tok, **o) for i,o in enumerate([dict(fast=False), dict(fast=True), {}, dict(fast=True, n_workers=1)]))
    assert written(plain)==written(fast)==written(auto)==written(there) and len(written(plain))>4
    assert facts(plain)==facts(fast)==facts(auto)==facts(there)
    assert plain.facts['tokenizer']['encoder']=='tokenizers' and plain.facts['tokenizer']['why']=='fast is False'
    assert fast.facts['tokenizer']==auto.facts['tokenizer']==there.facts['tokenizer'] and fast.facts['tokenizer']['encoder']=='fastokens'
    assert fast.manifest.fitted_hash==plain.manifest.fitted_hash and fast.manifest.config_hash==plain.manifest.config_hash
    job(tmp_path, '1', data, tok, fast=False) # it is done, whichever encoder is asked for

def test_job_begins_again(tmp_path, data, monkeypatch):
    "A difference that shows only in the middle of the work costs time, and no id"
    tok = tokenizer('qwen')
    want = job(tmp_path, 'plain', data, tok, fast=False)
    monkeypatch.setattr('fastseqprep.text_pipeline.sample_of', lambda *args: ['a horse'])
    monkeypatch.setattr(FastEncoder, 'raw', odd('zebra'))
    res = job(tmp_path, 'auto', data, tok)
    assert res.facts['tokenizer']['encoder']=='tokenizers' and 'zebra' in res.facts['tokenizer']['why']
    assert written(res)==written(want) and facts(res)==facts(want)
    with pytest.raises(EncoderDiffers, match='set fast to False'): job(tmp_path, 'true', data, tok, fast=True)
    with pytest.raises(ValueError, match="fast is 'no', expected"): job(tmp_path, 'no', data, tok, fast='no')

def test_sample_is_seeded(data):
    from fastseqprep.text_input import input_splits, list_inputs
    from fastseqprep.text_pipeline import sample_of
    splits = input_splits(list_inputs(data), 4000)
    assert sample_of(splits, 1)==sample_of(splits, 1)!=sample_of(splits, 2)
    assert sample_of(input_splits(list_inputs(data)))
