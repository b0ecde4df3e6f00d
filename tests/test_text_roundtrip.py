"""There and back: for every strategy, trained tokens decode to the text that should be trained, all of it once, and no row has tokens of two records."""
import json
from collections import defaultdict
import numpy as np, pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from fastseqprep.text_config import TextConfig
from fastseqprep.text_pipeline import TextPipeline
from fastseqprep.text_tokenizer import TextTokenizer
from fastseqprep.token_store import TokenStore

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

@pytest.fixture(scope='module')
def tok(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tok')
    tk = Tokenizer(models.BPE())
    tk.pre_tokenizer,tk.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False),decoders.ByteLevel()
    tk.train_from_iterator(['The sea is wide, user assistant system Hello there. é😀'] # no line breaks, so that no token reaches over the edge of an answer
        , trainers.BpeTrainer(vocab_size=330, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=['<s>','</s>',*(AddedToken(o, special=True, normalized=False) for o in ('<|im_start|>','<|im_end|>'))]))
    tk.save(str(folder/'tokenizer.json'))
    (folder/'tokenizer_config.json').write_text(json.dumps(dict(bos_token='<s>', eos_token='</s>', chat_template=CHATML)))
    return TextTokenizer(folder)

TEXT = st.text(alphabet='ab \n<|é😀文.«', max_size=24)
MESSAGE = st.fixed_dictionaries(dict(role=st.sampled_from(['user','assistant','system','tool']), content=TEXT), optional=dict(train=st.booleans())).map(
    lambda m: m if m['role']=='assistant' or m['content'].strip() else {**m, 'train':False}) # where a blank question stands cannot be told, so training on it is refused
STRATEGY = dict(simple=dict(packing_strategy='simple'), bfd=dict(packing_strategy='bfd'), bfd_split=dict(packing_strategy='bfd_split'), wrapped=dict(packing_strategy='wrapped'))
quick = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

def stored(tmp_path_factory, tok, records, **keys):
    "The store that records become"
    where = tmp_path_factory.mktemp('r')
    (where/'d.jsonl').write_text('\n'.join(map(json.dumps, records)))
    TextPipeline(TextConfig(**keys), where/'d.jsonl', where/'out', tok.path, progress=False).run()
    return TokenStore(where/'out')

def decoded(tok, ids): return tok.bare.decode([int(o) for o in ids], skip_special_tokens=False)

def whole_rows(store, key, mask):
    "Ids and masks of each record, of its pieces in order"
    res = defaultdict(list)
    ids,masks = (store.rows(k, np.arange(store.n_records)).to_rows() if k else None for k in (key, mask))
    for i,(record,start) in enumerate(store.pieces().tolist()): res[record].append((start, ids[i], masks[i] if masks else np.ones(len(ids[i]), bool)))
    for pieces in res.values(): pieces.sort(key=lambda o: o[0])
    return {k:(np.concatenate([o[1] for o in v]), np.concatenate([o[2] for o in v]), [(o[0], len(o[1])) for o in v]) for k,v in sorted(res.items())}

def spans_of(tok, ids, mask):
    "Texts of trained spans"
    cuts = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0)).reshape(-1,2)
    return [decoded(tok, ids[a:b]) for a,b in cuts]

def trained_texts(messages):
    "What should be trained: each trained message and its end"
    return [m['content']+'<|im_end|>' for m in messages if m.get('train', m['role']=='assistant')]

def rendered(messages): return ''.join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)

@pytest.mark.parametrize('strategy', STRATEGY)
@quick
@given(chats=st.lists(st.lists(MESSAGE, min_size=1, max_size=5), min_size=1, max_size=8), most=st.sampled_from([31,32,33,400]), turns=st.booleans(), scope=st.sampled_from(['shard','all']), shard=st.sampled_from([60,10**6]))
def test_chats(tmp_path_factory, tok, strategy, chats, most, turns, scope, shard):
    "Split or whole, packed in whatever way: the trained spans of a chat are its answers, each with its end, in order"
    chats = [*chats, [dict(role='assistant', content='The sea')]] # so that something is trained
    split = strategy in ('bfd_split','wrapped')
    turns = turns or strategy=='wrapped' # which is refused else
    if not turns: most = max(most, 120) # more than any message has, since one that is longer than a bin would be cut
    s = stored(tmp_path_factory, tok, [dict(messages=o) for o in chats], input=dict(sections=[dict(field='messages', action='$role', template=True)]), mask=dict(assistant='train'), untrained='keep', split_turns=turns, pack_scope=scope,
               preprocessing=dict(STRATEGY[strategy], max_packed_len=most if split else 2048), output=dict(max_tokens_per_shard=shard), **(dict(overlong='split') if split else {}))
    rows = whole_rows(s, 'sequence', 'loss_mask')
    assert list(rows)==list(range(len(chats)))
    for i,(ids,mask,places) in rows.items():
        assert decoded(tok, ids)==rendered(chats[i]) and places[0][0]==0 and all(a+n==b for (a,n),(b,_) in zip(places, places[1:]))
        assert spans_of(tok, ids, mask)==trained_texts(chats[i])
        if strategy=='bfd_split' and not turns: assert all(decoded(tok, ids[a:a+1])=='<|im_start|>' for a,_ in places) # never within a message

@pytest.mark.parametrize('strategy', STRATEGY)
@quick
@given(chats=st.lists(st.lists(MESSAGE, min_size=1, max_size=5), min_size=1, max_size=8), most=st.sampled_from([15,16,17,40]), side=st.sampled_from(['keep_start','keep_end']))
def test_cut_chats(tmp_path_factory, tok, strategy, chats, most, side):
    "Where records are cut, what is left of an answer stays trained, and nothing else becomes so"
    chats = [*chats, [dict(role='assistant', content='The sea')]]
    s = stored(tmp_path_factory, tok, [dict(messages=o) for o in chats], input=dict(sections=[dict(field='messages', action='$role', template=True)]), mask=dict(assistant='train'), untrained='keep', split_turns=True,
               preprocessing=dict(STRATEGY[strategy], max_seq_len=most, max_packed_len=most, truncation_mode=side))
    for i,(ids,mask,_) in whole_rows(s, 'sequence', 'loss_mask').items():
        text = rendered(chats[i])
        e = tok.bare.encode(text, add_special_tokens=False)
        want,at = np.zeros(len(e.ids), bool),0
        for m in chats[i]:
            start = at+len(f"<|im_start|>{m['role']}\n")
            end = start+len(m['content'])+len('<|im_end|>')
            if m.get('train', m['role']=='assistant'): want |= [a<end and b>start for a,b in e.offsets]
            at = end+1
        cut = slice(None, most) if side=='keep_start' else slice(-most, None)
        assert ids.tolist()==e.ids[cut] and mask.tolist()==want[cut].tolist()

@pytest.mark.parametrize('strategy', ['simple','bfd','bfd_split','wrapped'])
@pytest.mark.parametrize('side', ['keep_start','keep_end'])
def test_messages_that_are_cut_away(tmp_path_factory, tok, strategy, side):
    "A chat of which max_seq_len leaves only some messages is packed as any other"
    chat = [dict(role='user', content='Hello'), dict(role='assistant', content='The sea is wide. '*9), dict(role='user', content='is'), dict(role='assistant', content='a')]
    s = stored(tmp_path_factory, tok, [dict(messages=chat)], **{**TextConfig.for_shape('chat').resolved(), 'preprocessing':dict(STRATEGY[strategy], max_seq_len=30, max_packed_len=30, truncation_mode=side), 'split_turns':strategy=='wrapped'})
    assert len(s)==30 and s.rows('loss_mask', np.arange(s.n_records)).values.any()

@pytest.mark.parametrize('strategy', STRATEGY)
@quick
@given(rows=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=8), most=st.sampled_from([7,8,9,200]), end=st.booleans())
def test_instructions(tmp_path_factory, tok, strategy, rows, most, end):
    "Answers and their end token are trained, prompts are not, and a row without an answer is left out"
    rows = [*rows, ('Hello','The sea')]
    split = strategy in ('bfd_split','wrapped')
    s = stored(tmp_path_factory, tok, [dict(prompt=a, response=b) for a,b in rows], input=dict(sections=[dict(field='prompt', action='mask'), dict(field='response', action='train')]), append_eos=end,
               preprocessing=dict(STRATEGY[strategy], max_packed_len=most if split else 2048))
    kept = [(a,b) for a,b in rows if b.strip()]
    found = whole_rows(s, 'sequence', 'loss_mask')
    assert len(found)==len(kept)
    for (ids,mask,_),(a,b) in zip(found.values(), kept):
        assert spans_of(tok, ids, mask)==[b+('</s>' if end else '')] and decoded(tok, ids[~mask])==(a if a.strip() else '')

@pytest.mark.parametrize('strategy', STRATEGY)
@quick
@given(texts=st.lists(TEXT, min_size=1, max_size=10), most=st.sampled_from([7,8,9,200]), scope=st.sampled_from(['shard','all']))
def test_documents(tmp_path_factory, tok, strategy, texts, most, scope):
    "All of a document is trained, ends with its end token, and lies in rows of its own"
    texts = [*texts, 'The sea']
    split = strategy in ('bfd_split','wrapped')
    s = stored(tmp_path_factory, tok, [dict(text=o) for o in texts], input=dict(sections=[dict(field='text', action='train')]), append_eos=True, pack_scope=scope,
               preprocessing=dict(STRATEGY[strategy], min_chars=1, max_packed_len=most if split else 2048))
    assert s.keys[0]=='sequence' and 'loss_mask' not in s.keys # a mask of which all is 1 says nothing
    found = [decoded(tok, ids) for ids,_,_ in whole_rows(s, 'sequence', None).values()]
    assert found==[o+'</s>' for o in texts if o.strip()]

@quick
@given(rows=st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=1, max_size=6))
def test_preferences(tmp_path_factory, tok, rows):
    rows = [*rows, ('Hello','The sea','wide')]
    def chat(a, b): return [dict(role='user', content=a), dict(role='assistant', content=b)]
    s = stored(tmp_path_factory, tok, [dict(chosen=chat(a, b), rejected=chat(a, c)) for a,b,c in rows], **TextConfig.for_shape('dpo').resolved())
    for i,(_,*answers) in enumerate(rows):
        r = s.record(i)
        assert [spans_of(tok, r[k], r[f'{k}_mask']) for k in ('chosen','rejected')]==[[o+'<|im_end|>'] for o in answers]

@quick
@given(rows=st.lists(st.tuples(TEXT, st.lists(TEXT, min_size=1, max_size=4)), min_size=1, max_size=6))
def test_groups(tmp_path_factory, tok, rows):
    "Every response is trained whole, blank ones stay, prompts end where the answer begins, and rewards are whose they were"
    records = [dict(prompt=[dict(role='user', content=a)], responses=bs, rewards=[len(bs)+i/8 for i in range(len(bs))]) for a,bs in rows]
    s = stored(tmp_path_factory, tok, records, **TextConfig.for_shape('grpo').resolved())
    for i,(a,bs) in enumerate(rows):
        r = s.record(i)
        assert decoded(tok, r['prompts'])==rendered([dict(role='user', content=a)])+'<|im_start|>assistant\n'
        assert [decoded(tok, o) for o in r['responses']]==[b if b.strip() else '' for b in bs] and all(m.all() for m in r['masks']) and r['rewards'].tolist()==records[i]['rewards']
