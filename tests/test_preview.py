"""What a preview shows is what the text job encodes and what it wrote: every token once, with its mask, owner and place; nothing of the data reaches a terminal or a page as code."""
import html, io, json, re
from html.parser import HTMLParser
import numpy as np, pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from fastseqprep.files import StoreError
from fastseqprep.preview import Preview, PreviewRow, preview, preview_shard, token_texts, visible_text, wants_colour
from fastseqprep.sections import Builder, RecordError, builders, make_builder, register_builder
from fastseqprep.text_config import TextConfig
from fastseqprep.text_pipeline import TextPipeline
from fastseqprep.text_tokenizer import TextTokenizer
from fastseqprep.token_store import ShardArray, TokenStore, write_token_shard

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
WORDS = 'What is the sea? The sea is wide, Hello there user assistant system.\n'

def make_tokenizer(folder, bytewise=True):
    folder.mkdir(exist_ok=True)
    tk = Tokenizer(models.BPE() if bytewise else models.BPE(unk_token='<unk>', byte_fallback=True))
    if bytewise: tk.pre_tokenizer,tk.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False),decoders.ByteLevel()
    else: tk.pre_tokenizer,tk.decoder = pre_tokenizers.Metaspace(prepend_scheme='never'),decoders.Metaspace(prepend_scheme='never')
    tk.train_from_iterator([WORDS]*3, trainers.BpeTrainer(vocab_size=380, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if bytewise else [],
        special_tokens=['<unk>','<s>','</s>',*(AddedToken(o, special=True, normalized=False) for o in ('<|im_start|>','<|im_end|>'))]))
    tk.save(str(folder/'tokenizer.json'))
    (folder/'tokenizer_config.json').write_text(json.dumps(dict(bos_token='<s>', eos_token='</s>', chat_template=CHATML)))
    return TextTokenizer(folder)

@pytest.fixture(scope='module')
def tok(tmp_path_factory): return make_tokenizer(tmp_path_factory.mktemp('tok'))

def user(t): return dict(role='user', content=t)
def answer(t, **kw): return dict(role='assistant', content=t, **kw)
CHAT = TextConfig.for_shape('chat')

def test_tokens_are_readable(tok, tmp_path):
    for t in tok,make_tokenizer(tmp_path/'spaces', False):
        text = 'Hello there.\n' if t is tok else 'Hello there.'
        assert ''.join(token_texts(t, t.encode([text])[0]))==text
        assert token_texts(t, [t.vocab['<|im_end|>']])==['<|im_end|>']
    euro = token_texts(tok, tok.encode(['€'])[0]) # its three bytes are no letters of their own
    assert ''.join(euro)==r'\xe2\x82\xac' and token_texts(tok, [10**6])==['[id 1000000]']

def test_owners_and_masks(tok):
    p = preview(CHAT, dict(messages=[dict(role='system', content='Be kind.'), user('Hello'), answer('The sea.'), user('?'), answer('wide', train=False), answer('is')]), tok)
    (row,) = p.rows
    assert [o for _,o in row.parts]==['system','user','assistant','user','assistant','assistant']
    built = make_builder(CHAT, tok).one(dict(messages=[dict(role='system', content='Be kind.'), user('Hello'), answer('The sea.'), user('?'), answer('wide', train=False), answer('is')]))
    assert row.ids.tolist()==built['sequence'] and (row.weights>0).tolist()==built['loss_mask'] and len(row.owners)==len(row)
    trained = ''.join(t for t,w in zip(row.texts, row.weights) if w)
    assert trained=='The sea.<|im_end|>is<|im_end|>'
    bounds = [*(s for s,_ in row.parts), len(row)]
    assert all(row.texts[s]=='<|im_start|>' and ''.join(row.texts[s:e]).startswith(f'<|im_start|>{o}\n') for s,e,(_,o) in zip(bounds, bounds[1:], row.parts))

def test_weights(tok):
    cfg = TextConfig.for_shape('chat', output=dict(dtype=dict(loss_mask='float32')))
    p = preview(cfg, dict(messages=[user('Hello'), answer('wide', weight=.25), answer('sea')]), tok)
    assert set(p.rows[0].weights)=={0,.25,1} and '«0.25: wide<|im_end|>»' in p.text() and '«sea<|im_end|>»' in p.text()
    assert 'weight 0.25' in p._repr_html_()

def test_sections(tok):
    ins = TextConfig.for_shape('instruction')
    assert [o for _,o in preview(ins, dict(prompt='Hello', response='there'), tok).rows[0].parts]==['prompt','response']
    p = preview(ins, dict(prompt=None, response='there'), tok)
    assert p.rows[0].parts==[(0,'response')] and p.rows[0].n_trained==len(p.rows[0])
    both = TextConfig(input=dict(sections=[dict(field='messages', action='$role', template=True), dict(field='note', action='train')]), mask=dict(assistant='train'))
    assert [o for _,o in preview(both, dict(messages=[user('a'), answer('b')], note='sea'), tok).rows[0].parts]==['user','assistant','note']
    alone = TextConfig.for_shape('chat', compat='astrai')
    assert [o for _,o in preview(alone, dict(messages=[user('a'), answer('b')]), tok).rows[0].parts]==['user','assistant']

def test_groups_and_numbers(tok):
    p = preview(TextConfig.for_shape('grpo'), dict(prompt=[user('a')], responses=['sea',' ','The'], rewards=[1,0.5,-2]), tok)
    assert [o.name for o in p.rows]==['prompts','responses[0]','responses[1]','responses[2]'] and len(p.rows[2])==0
    assert 'rewards: 1, 0.5, -2' in p.text() and 'rewards: 1, 0.5, -2' in p._repr_html_()
    dpo = preview(TextConfig.for_shape('dpo'), dict(chosen=[user('a'), answer('b')], rejected=[user('a'), answer('c')]), tok)
    assert [o.name for o in dpo.rows]==['chosen','rejected'] and all(o.n_trained for o in dpo.rows)

def test_what_is_cut_and_left_out_is_told(tok):
    long = dict(messages=[user('Hello'), answer('The sea is wide. '*20)])
    for side in 'keep_start','keep_end':
        p = preview(TextConfig.for_shape('chat', preprocessing=dict(max_seq_len=30, truncation_mode=side)), long, tok)
        n = len(make_builder(CHAT, tok).one(long)['sequence'])
        assert p.notes==[f'sequence: {n-30} of {n} tokens are cut off by max_seq_len=30'] and len(p.rows[0])==30 and p.rows[0].owners[-1]=='assistant'
    p = preview(CHAT, dict(messages=[user('Hello')]), tok)
    assert 'leaves this record out: no trained token' in p.text() and len(p.rows[0])>0
    p = preview(TextConfig.for_shape('pretrain'), dict(text='Hello'), tok)
    assert 'leaves this record out: too short' in p.text() and p.rows==[]
    with pytest.raises(RecordError, match='expected a list of messages'): preview(CHAT, dict(messages='x'), tok)
    with pytest.raises(RecordError, match='expected an object'): preview(CHAT, ['x'], tok)

def test_configuration_as_keys_or_file(tok, tmp_path):
    CHAT.to_file(tmp_path/'c.json')
    record = dict(messages=[user('a'), answer('b')])
    assert preview(tmp_path/'c.json', record, tok.path).text()==preview(CHAT.resolved(), record, tok).text()==preview(CHAT, record, tok).text()

def test_own_builder(tok):
    "A builder that tells nothing of owners is shown without"
    @register_builder('shouting')
    class Shouting(Builder):
        def build(self, records): return make_builder(self.cfg, self.tok, 'single').build([{k:v.upper() for k,v in r.items()} for r in records])
    try:
        cfg = TextConfig.for_shape('pretrain', builder='shouting', preprocessing=dict(min_chars=0))
        row = preview(cfg, dict(text='sea'), tok).rows[0]
        assert ''.join(row.texts)=='SEA' and row.parts==[] and row.owners==['']*len(row)
    finally: del builders['shouting']

def rows_of(n, most):
    rng = np.random.default_rng(n)
    return PreviewRow('x', np.arange(n), (rng.random(n)<.5)*1., [rng.choice(['a','b\n','\n',' c']) for _ in range(n)], [(int(o),'p') for o in range(0, n, 7)], np.arange(n))

@pytest.mark.parametrize('n,most', [(0,5),(1,5),(5,5),(6,5),(100,10),(1000,300)])
def test_long_records_are_shortened(n, most):
    row = rows_of(n, most)
    lines = row.lines(most)
    shown = [i for o in lines if isinstance(o, list) for i in o]
    hidden = [i for o in lines if isinstance(o, range) for i in o]
    assert sorted(shown+hidden)==list(range(n)) and len(shown)==min(n, most)
    p = Preview('t', [row], max_tokens=most)
    if n>most:
        trained = int((row.weights[hidden]>0).sum())
        assert f'{len(hidden):,} tokens, {trained:,} of them trained, are not shown' in p.text() and f'{len(hidden):,} tokens, {trained:,} of them' in p._repr_html_()

def test_a_long_record_is_short_on_the_page(tok):
    p = preview(TextConfig.for_shape('pretrain', preprocessing=dict(max_seq_len=10**6)), dict(text='The sea is wide. '*20_000), tok)
    assert len(p.rows[0])>100_000 and len(p.text())<4_000 and len(p._repr_html_())<100_000

class Page(HTMLParser):
    "Elements and text of a page"
    def __init__(self): super().__init__(); self.tags,self.attributes,self.said = set(),set(),[]
    def handle_starttag(self, tag, attrs): self.tags.add(tag); self.attributes |= {k for k,_ in attrs}
    def handle_data(self, data): self.said.append(data)

@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(alphabet='ab <>&"\'\n\t\x00\x07\x1b[]m\u202e\u200d\x85€😀«»', max_size=20), min_size=2, max_size=4), st.text(alphabet='<x>"\x1b', min_size=1, max_size=5))
def test_nothing_is_code(tok, texts, role):
    "Neither a page nor a terminal gets anything of the data but text"
    p = preview(TextConfig.for_shape('chat', untrained='keep'), dict(messages=[dict(role=role, content=t) for t in texts]), tok)
    p.title += role
    page = Page()
    page.feed(p._repr_html_())
    assert page.tags<={'p','b','i','div','span'} and page.attributes<={'style','title'}
    said = ''.join(page.said)
    for t in p.rows[0].texts: assert visible_text(t) in said
    plain,coloured = p.text(),p.text(True)
    assert all(c.isprintable() or c=='\n' for c in plain)
    assert all(c.isprintable() or c=='\n' for c in re.sub(r'\x1b\[[\d;]+m', '', coloured))
    assert coloured.count('\x1b[0m')*2==coloured.count('\x1b')==2*len(p.rows[0]) # each token is coloured alone

def test_owners_of_preferences(tok):
    "A prompt and two answers have the roles of the conversations that they stand for"
    p = preview(TextConfig.for_shape('dpo', builder='preference'), dict(prompt='Hello', chosen='The sea', rejected='wide'), tok)
    assert [[o for _,o in row.parts] for row in p.rows]==[['user','assistant']]*2

@pytest.mark.parametrize('shape', ['chat','dpo'])
def test_what_is_put_first_is_nobodys(tok, tmp_path, shape):
    "The beginning that the tokenizer puts before everything belongs to no message, also where records are cut"
    from tokenizers.processors import TemplateProcessing
    make_tokenizer(tmp_path)
    t = Tokenizer.from_file(str(tmp_path/'tokenizer.json'))
    t.post_processor = TemplateProcessing(single='<s> $A </s>', special_tokens=[(o, t.token_to_id(o)) for o in ('<s>','</s>')])
    t.save(str(tmp_path/'tokenizer.json'))
    (tmp_path/'tokenizer_config.json').write_text(json.dumps(dict(special_tokens=dict(bos_token='<s>', eos_token='</s>'), chat_template=CHATML)))
    talk = [dict(role='system', content='is'), user('Hello'), answer('The sea is wide')]
    def rows(**pre): return preview(TextConfig.for_shape(shape, bos='first', untrained='keep', preprocessing=pre, **(dict(builder='preference') if shape=='dpo' else {})), dict(messages=talk) if shape=='chat' else dict(chosen=talk, rejected=talk), tmp_path)
    for row in rows().rows:
        assert row.texts[0]=='<s>' and row.owners[0]=='' and [row.texts[s] for s,_ in row.parts]==['<|im_start|>']*3 and [o for _,o in row.parts]==['system','user','assistant']
    assert rows().notes==[]
    p = rows(max_seq_len=12)
    n = len(rows().rows[0])
    for row in p.rows: assert len(row)==12 and row.owners[:2]==['','system'] and all(s<=12 for s,_ in row.parts)
    assert p.notes==[f'{row.name}: {n-12} of {n} tokens are cut off by max_seq_len=12' for row in p.rows]

def test_text_says_it_all(tok):
    "Without colours, what stands between « and » is what is trained"
    p = preview(CHAT, dict(messages=[user('Hello'), answer('The\n\nsea '), user('?'), answer('wide')]), tok)
    found = ''.join(re.findall('«(.*?)»', p.text(), re.S))
    assert found==visible_text('The\n\nsea <|im_end|>wide<|im_end|>')

def test_colours_only_for_people(monkeypatch):
    class Screen(io.StringIO):
        def isatty(self): return True
    monkeypatch.delenv('NO_COLOR', raising=False); monkeypatch.setenv('TERM', 'xterm')
    assert wants_colour(Screen()) and not wants_colour(io.StringIO())
    monkeypatch.setenv('TERM', 'dumb'); assert not wants_colour(Screen())
    monkeypatch.setenv('TERM', 'xterm'); monkeypatch.setenv('NO_COLOR', '1'); assert not wants_colour(Screen())

# ---- from shards

TEXTS = ['sea','The sea is wide.','Hello there','What is the sea? The sea is wide. Hello there.','is','wide '*12]
def written(folder, tok, records, **keys):
    (folder/'d.jsonl').write_text('\n'.join(map(json.dumps, records)))
    cfg = TextConfig(**{**TextConfig.for_shape('chat').resolved(), **keys})
    TextPipeline(cfg, folder/'d.jsonl', folder/'out', tok.path, progress=False).run()
    return cfg

@pytest.mark.parametrize('strategy', ['simple','bfd','bfd_split','wrapped'])
def test_shard_as_record(tok, tmp_path, strategy):
    "A written record shows the tokens, masks and places of the raw one"
    records = [dict(messages=[user('Hello'), answer(t)]) for t in TEXTS]
    cfg = written(tmp_path, tok, records, preprocessing=dict(packing_strategy=strategy, max_packed_len=64), split_turns=strategy=='wrapped')
    s = TokenStore(tmp_path/'out')
    for i,(record,start) in enumerate(s.pieces().tolist()):
        (row,),raw = preview_shard(tmp_path/'out', i, tok).rows,preview(cfg, records[record], tok).rows[0]
        part = slice(start, start+len(row))
        assert (row.texts, row.weights.tolist(), row.positions.tolist())==(raw.texts[part], raw.weights[part].tolist(), raw.positions[part].tolist())
        assert row.parts==[(0, f'record {record}'+(f' from token {start}' if start else ''))]
    if strategy=='simple':
        with pytest.raises(StoreError, match='no bins'): preview_shard(tmp_path/'out', 0, tok, 'bin')
        return
    b,seen = s.bin_rows(),0
    for k in range(s.n_bins):
        (row,) = preview_shard(tmp_path/'out', k, tok, 'bin').rows
        lengths = s.lengths()[b[k]:b[k+1]]
        assert [o for o,_ in row.parts]==(np.cumsum(lengths)-lengths).tolist() and len(row)==lengths.sum()<=64
        seen += len(row)
    assert seen==len(s)
    for i,what in (s.n_records,'record'),(-1,'record'),(s.n_bins,'bin'):
        with pytest.raises(IndexError, match=f'there is no {what} {i}'): preview_shard(tmp_path/'out', i, tok, what)
    with pytest.raises(ValueError, match="expected 'record' or 'bin'"): preview_shard(tmp_path/'out', 0, tok, 'row')

def test_another_tokenizer_is_refused(tok, tmp_path):
    written(tmp_path, tok, [dict(messages=[user('Hello'), answer('sea')])])
    with pytest.raises(StoreError, match='another tokenizer'): preview_shard(tmp_path/'out', 0, make_tokenizer(tmp_path/'spaces', False))

def test_parts_and_domains(tok, tmp_path):
    records = [dict(messages=[user('Hello'), answer(f'{t} {i}')], site=f's{i%2}') for i,t in enumerate(TEXTS*4)]
    written(tmp_path, tok, records, validation=.3, output=dict(domain_key='site'))
    p = preview_shard(tmp_path/'out', 0, tok, part='validation', domains='s1')
    assert p.title.startswith('record 0 of') and p.title.endswith('domain s1')
    with pytest.raises(ValueError, match='no domain'): preview_shard(tmp_path/'out', 0, tok, domains='s2')

def test_folders_of_others(tok, tmp_path):
    "Without a manifest, names and types say what an output is"
    ids = tok.encode(['Hello there','The sea'])
    o,n = ids.offsets,len(ids.values)
    put = lambda name: tmp_path/'x/shard_0'/name
    write_token_shard(put, dict(sequence=ShardArray(ids.values, 'int32', o), loss_mask=ShardArray(np.arange(n)%2, 'int32', o), position_ids=ShardArray(np.arange(n)+5, 'int32', o), rewards=ShardArray(np.array([3,4]), 'int32', [0,1,2])))
    p = preview_shard(tmp_path, 1, tok)
    assert [r.name for r in p.rows]==['sequence'] and p.values['rewards'].tolist()==[4] and p.rows[0].positions.tolist()==list(range(o[1]+5, n+5))
    assert p.rows[0].weights.tolist()==[(i%2)*1. for i in range(o[1], n)] and ''.join(p.rows[0].texts)=='The sea'
    (put('meta.json')).write_text(json.dumps(dict(sequence=dict(shape=[n], dtype='int32'))))
    with pytest.raises(StoreError, match='without offsets'): preview_shard(tmp_path, 0, tok)

def test_groups_in_shards(tok, tmp_path):
    (tmp_path/'d.jsonl').write_text('\n'.join(json.dumps(dict(prompt=[user('a')], responses=['sea','','The wide'][:k], rewards=[.5]*k)) for k in (2,3)))
    cfg = TextConfig.for_shape('grpo')
    TextPipeline(cfg, tmp_path/'d.jsonl', tmp_path/'out', tok.path, progress=False).run()
    for i,k in enumerate((2,3)):
        p = preview_shard(tmp_path/'out', i, tok)
        assert [r.name for r in p.rows]==['prompts',*(f'responses[{j}]' for j in range(k))] and p.values['rewards'].tolist()==[.5]*k
        assert [''.join(r.texts) for r in p.rows[1:]]==['sea','','The wide'][:k] and all(r.n_trained==len(r) for r in p.rows[1:])
