"Samples for training: the recorded ones, right values where ours differ, no target over a border, and raw records as good as shards."
import json, pickle
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from text_cases import DATASETS, RUNS, starting, tokenizers, tree_of, write_tree
from fastseqprep.files import StoreError
from fastseqprep.ragged import lengths_to_offsets
from fastseqprep.raw_text import detect_format, encode_in_memory
from fastseqprep.text_config import TextConfig
from fastseqprep.text_data import TextDataset, document_borders, dpo_collate, grpo_collate
from fastseqprep.text_pipeline import TextPipeline
from fastseqprep.text_tokenizer import TextTokenizer
from fastseqprep.token_store import ShardArray, TokenStore, write_token_shard

@pytest.fixture(scope='session')
def toks(tmp_path_factory): return tokenizers(tmp_path_factory.mktemp('toks'))

def inputs(number, where):
    "The files of a case"
    for f,t in starting(DATASETS, number)['inputs'].items(): (where/f).write_text(t, encoding='utf-8')
    return where/'input.jsonl'

def expected(number): return starting(DATASETS, number)['expected']

def same(got, want):
    "A recorded sample, to value and dtype; there may be more fields"
    for k,v in want.items():
        if isinstance(v, list):
            assert len(got[k])==len(v)
            for a,b in zip(got[k], v): same({k:a}, {k:b})
        else:
            assert str(got[k].dtype)==f"torch.{v['dtype']}" and list(got[k].shape)==v['shape'], k
            assert torch.equal(got[k], torch.tensor(v['data'], dtype=got[k].dtype)), k

def all_same(ds, number):
    assert len(ds)==expected(number)['len']
    for got,want in zip(ds, expected(number)['items']): same(got, want)

# Windows over what another tool has written
def test_seq_windows(tmp_path): all_same(TextDataset.load('seq', tree_of('04', tmp_path), window_size=16), '60')
def test_sft_windows(tmp_path): all_same(TextDataset.load('sft', tree_of('01', tmp_path), window_size=16), '63')
def test_stream_shorter_than_a_window(tmp_path): assert len(TextDataset.load('seq', tree_of('04', tmp_path), window_size=4096))==expected('62')['len']==0
def test_sft_needs_a_mask(tmp_path):
    with pytest.raises(KeyError, match='sft needs loss_mask'): TextDataset.load('sft', tree_of('04', tmp_path), window_size=16)

def test_windows_over_domains(tmp_path):
    "The stream as it was recorded, in three domains"
    items = expected('76')['items']
    stream = [x for o in items for x in o['input_ids']['data']]+items[-1]['target_ids']['data'][-1:]
    stream += [0]*(expected('76')['token_count']-len(stream))
    cuts = [0,100,180,len(stream)]
    write_tree(tmp_path, {f'{d}/shard_0000':dict(values=dict(sequence=stream[a:b]), meta=dict(sequence=dict(shape=[b-a], dtype='int32'))) for d,a,b in zip('abc', cuts, cuts[1:])})
    all_same(TextDataset.load('seq', tmp_path, window_size=64), '76')

def test_windows_over_shards(tmp_path):
    "Shards come by number, where the recorded order was that of a folder: 10…30, then 31…44"
    ds = TextDataset.load('seq', write_tree(tmp_path, starting(DATASETS, '79')['shards']), window_size=8)
    assert len(ds)==expected('79')['len']
    assert [o['input_ids'].tolist() for o in ds]==[list(range(i, i+8)) for i in (10,18,26,34)]
    assert [o['loss_mask'].tolist() for o in ds]==[[True]*8, [True]*8, [True]*4+[False]+[True]*3, [True]*8] # 31 begins a document

# Pairs and groups from shards: they load, where there were no records
def test_pairs_from_shards(tmp_path, toks):
    (tmp_path/'in.jsonl').write_text('\n'.join(json.dumps(dict(chosen=[dict(role='user', content='What is 2+2?'), dict(role='assistant', content=a)], rejected=[dict(role='user', content='What is 2+2?'), dict(role='assistant', content=b)])) for a,b in (('4','Five'),('4','No.'))))
    TextPipeline(TextConfig.for_shape('dpo'), tmp_path/'in.jsonl', tmp_path/'out', toks/'plain', progress=False).run()
    ds = TextDataset.load('dpo', tmp_path/'out')
    prompt = [3,321,267,203,413,300,275,225,22,15,22,35,4,203,3,314,463,466,88,203]
    want = [(prompt+[24,4,203], prompt+[42,317,73,4,203]), (prompt+[24,4,203], prompt+[50,83,18,4,203])]
    assert len(ds)==2
    for o,(a,b) in zip(ds, want):
        assert (o['chosen'].tolist(), o['rejected'].tolist())==(a, b)
        assert o['chosen_mask'].tolist()==[False]*20+[True]*(len(a)-21)+[False] and o['rejected_mask'].tolist()==[False]*20+[True]*(len(b)-21)+[False]
        assert o['chosen'].dtype==torch.int64 and o['chosen_mask'].dtype==torch.bool
    b = dpo_collate(list(ds))
    assert {k:list(v.shape) for k,v in b.items()}==dict(chosen=[2,25], rejected=[2,25], chosen_mask=[2,25], rejected_mask=[2,25])
    assert b['chosen'][0].tolist()==want[0][0]+[0,0]

def test_pairs_over_two_shards(tmp_path):
    ds = TextDataset.load('dpo', write_tree(tmp_path, starting(DATASETS, '78')['shards']))
    assert len(ds)==4
    s = list(starting(DATASETS, '78')['shards'].values())[1]['values']
    assert [ds[2][k].tolist() for k in ('chosen','rejected','chosen_mask','rejected_mask')]==[s['chosen'][:3], s['rejected'][:2], s['chosen_mask'][:3], s['rejected_mask'][:2]]

def groups_out(tmp_path, toks, number='07', **keys):
    case = starting(RUNS, number)
    for f,t in case['inputs'].items(): (tmp_path/f).write_text(t)
    TextPipeline({**case['config'], **keys}, [tmp_path/f for f in case['inputs']], tmp_path/'out', toks/case['tokenizer'], progress=False).run()
    return case,TextDataset.load('grpo', tmp_path/'out')

@pytest.mark.parametrize('number', ['06','07'])
def test_groups_from_shards(tmp_path, toks, number):
    "Prompts, grouped answers, masks and rewards, as the records say it; rewards stay what they were"
    case,ds = groups_out(tmp_path, toks, number)
    records = [json.loads(o) for o in '\n'.join(case['inputs'].values()).split('\n') if o.strip()]
    assert len(ds)==len(records)
    tok = TextTokenizer(toks/case['tokenizer'])
    for o,r in zip(ds, records):
        assert [tok.full.decode(a.tolist()) for a in o['responses']]==r['responses'] and all(m.all() and len(m)==len(a) for m,a in zip(o['masks'], o['responses']))
        assert o['rewards'].dtype==torch.float32 and np.allclose(o['rewards'], r['rewards'])
        assert r['prompt'][-1]['content'] in tok.full.decode(o['prompts'].tolist())

def test_what_has_no_offsets_has_no_records(tmp_path):
    "Pairs and groups that were written without: an error, where it was a set of nothing"
    for n,t in ('47','dpo'),('07','grpo'):
        with pytest.raises(StoreError, match='without offsets'): TextDataset.load(t, tree_of(n, tmp_path/n))

def test_masks_that_slid(tmp_path):
    with pytest.raises(StoreError, match='loss_mask has .* which are not those of sequence'): TextDataset.load('sft', tree_of('38', tmp_path), window_size=8)

# Raw chats
FIRST = [3,87,474,203,415,493,261,279,300,439,392,351,18,4,203, 3,321,267,203,412,377,495,275,281,76,300,35,4,203, 3,314,463,466,88,203,412,377,495,275,331,18,4,203]
def test_raw_chats_by_the_preset(tmp_path, toks):
    all_same(TextDataset.load('sft', inputs('68', tmp_path), 16, tokenizer_path=toks/'plain', config=TextConfig.for_shape('chat', compat='astrai')), '68')

@pytest.mark.parametrize('lazy', [False,True])
def test_raw_chats(tmp_path, toks, lazy):
    "The template writes no beginning token; trained are the answer and its end token, not what the template writes around it"
    ds = TextDataset.load('sft', inputs('68', tmp_path), tokenizer_path=toks/'plain', lazy=lazy)
    assert len(ds)==3
    assert ds[0]['input_ids'].tolist()==FIRST and ds[0]['target_ids'].tolist()==FIRST[1:]+[0]
    assert ds[0]['target_ids'][ds[0]['loss_mask']].tolist()==[412,377,495,275,331,18,4]
    assert ds[2]['target_ids'][ds[2]['loss_mask']].tolist()[-1]==4
    assert ds[1]['position_ids'].tolist()==list(range(len(ds[1]['input_ids'])))

# Raw pairs
def pairs(tmp_path, toks, number, compat=None, **kwargs):
    cfg = None if compat is None else TextConfig.for_shape('dpo', compat=compat, preprocessing=dict(max_seq_len=kwargs.pop('max_len', 2048)))
    return TextDataset.load('dpo', inputs(number, tmp_path), tokenizer_path=toks/starting(DATASETS, number)['tokenizer'], config=cfg, **kwargs)

@pytest.mark.parametrize('lazy', [None,False])
def test_raw_pairs_by_the_preset(tmp_path, toks, lazy):
    ds = pairs(tmp_path, toks, '69', 'astrai', lazy=lazy)
    all_same(ds, '69')
    same(dpo_collate(list(ds)), expected('69')['collated'])

def without_last(o):
    "A recorded mask without the line break behind the end token"
    n = len(o['data'])
    return dict(o, data=[x and i<n-1 for i,x in enumerate(o['data'])])

@pytest.mark.parametrize('lazy', [None,False])
def test_raw_pairs(tmp_path, toks, lazy):
    "The same tokens; the line break that the template writes behind an answer is not the model's"
    ds = pairs(tmp_path, toks, '69', lazy=lazy)
    assert len(ds)==3
    for got,want in zip(ds, expected('69')['items']): same(got, {k:without_last(v) if k.endswith('_mask') else v for k,v in want.items()})

def test_raw_pairs_with_special_tokens_by_the_preset(tmp_path, toks):
    "All of the answer is trained: recorded masks begin one token late, since the prompt alone was counted with an end token"
    ds = pairs(tmp_path, toks, '70', 'astrai')
    for got,want in zip(ds, expected('70')['items']):
        for k in 'chosen_mask','rejected_mask':
            m = want[k]['data']
            want[k] = dict(want[k], data=[a or b for a,b in zip(m, m[1:]+[False])])
        same(got, want)

def test_raw_pairs_with_special_tokens(tmp_path, toks):
    "Beginning and end are what the template writes, so the samples are those of the tokenizer that adds none"
    for a,b in zip(pairs(tmp_path, toks, '70'), pairs(tmp_path, toks, '69')):
        for k in a: assert torch.equal(a[k], b[k])

def test_rows_of_two_conversations(tmp_path, toks):
    "The rows of the other tool's guide, which it refuses: the prompt stands in both conversations"
    ds = pairs(tmp_path, toks, '71')
    want = expected('69')['items'][0]
    assert ds[0]['chosen'].tolist()==want['chosen']['data'] and ds[0]['chosen'][ds[0]['chosen_mask']].tolist()==[24,4]
    assert ds[1]['chosen'].tolist()==[3,321,267,203,411,93,392,318,18,4,203,3,314,463,466,88,203,404,318,18,4,203] and ds[1]['chosen_mask'].tolist()==[False]*17+[True]*4+[False]

@pytest.mark.parametrize('compat', [None,'astrai'])
def test_longest_pairs(tmp_path, toks, compat): all_same(pairs(tmp_path, toks, '72', compat, max_len=20), '72')

# Raw groups, encoded beforehand
@pytest.mark.parametrize('compat', [None,'astrai'])
def test_raw_groups(tmp_path, toks, compat):
    "Two records: the recorded one was all that the positions left. The preset puts a beginning token first, as it is recorded"
    inputs('74', tmp_path)
    cfg = TextConfig(**{**json.loads((tmp_path/'dataset_config.json').read_text()), **({'compat':compat} if compat else {})})
    ds = TextDataset.load('grpo', tmp_path, tokenizer_path=toks/'plain', config=cfg)
    assert len(ds)==2
    first = expected('74')['items'][0]
    if not compat: first = dict(first, prompts=dict(dtype='int64', shape=[14], data=first['prompts']['data'][1:]))
    same(ds[0], first)
    assert ds[1]['prompts'].tolist()==[1]*bool(compat)+[3,321,267,203,411,93,392,318,18,4,203]
    assert [o.tolist() for o in ds[1]['responses']]==[[404,318,18],[50,83,18],[404,318,296,397,18]]
    assert ds[1]['rewards'].tolist()==torch.tensor([.9,.1,.5]).tolist()

def test_groups_of_different_sizes(tmp_path, toks):
    "They make a batch, in which group_mask says what there is"
    inputs('75', tmp_path)
    (tmp_path/'plain').symlink_to(toks/'plain')
    ds = TextDataset.load('grpo', tmp_path)
    b = grpo_collate(list(ds))
    assert b['prompts'].tolist()==[[0]*3+[3,321,267,203,411,93,392,318,18,4,203], [3,321,267,203,413,300,275,225,22,15,22,35,4,203]]
    assert b['prompt_mask'].tolist()==[[False]*3+[True]*11, [True]*14]
    assert b['responses'].tolist()==[[[404,318,18],[50,83,18],[0,0,0]], [[24,0,0],[42,317,73],[42,282,0]]]
    assert b['masks'].tolist()==[[[True]*3,[True]*3,[False]*3], [[True,False,False],[True]*3,[True,True,False]]]
    assert torch.equal(b['rewards'], torch.tensor([[.9,.1,0],[1.,.3,.8]])) and b['group_mask'].tolist()==[[True,True,False],[True]*3]

def test_dataset_config_and_its_tokenizer(tmp_path, toks):
    "The tokenizer is looked for where we are, then beside the configuration, then in the folder itself"
    inputs('74', tmp_path)
    with pytest.raises(FileNotFoundError, match='tokenizer.json does not exist'): TextDataset.load('grpo', tmp_path)
    (tmp_path/'plain').symlink_to(toks/'plain')
    assert len(TextDataset.load('grpo', tmp_path))==2
    with pytest.raises(FileNotFoundError, match='no dataset_config.json'): TextDataset.load('sft', tmp_path/'input.jsonl')

# No target over a border: a slow oracle
docs = st.lists(st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=7), max_size=6), min_size=1, max_size=4)
def write_docs(root, shards, offsets=True, bins=None):
    "Shards of documents; each token has another id, from 1 on, and a mask"
    i = 1
    for k,s in enumerate(shards):
        ids,mask,o = [],[],lengths_to_offsets([len(d) for d in s])
        for d in s:
            ids += range(i, i+len(d)); mask += [x>0 for x in d]; i += len(d)
        pos = [j for d in s for j in range(len(d))]
        folder = root/f'd/shard_{k:04d}'
        write_token_shard(lambda f: folder/f, {n:ShardArray(np.array(v, int), t, o) for n,v,t in (('sequence',ids,'int32'),('loss_mask',mask,'bool'),('position_ids',pos,'int32'))}, bins and bins(len(s)))
        if not offsets:
            meta = json.loads((folder/'meta.json').read_text())
            (folder/'meta.json').write_text(json.dumps({n:dict(shape=v['shape'], dtype=v['dtype']) for n,v in meta.items()}))
    return TokenStore(root)

@settings(max_examples=120, deadline=None)
@given(docs, st.integers(1, 9), st.integers(1, 9), st.booleans(), st.sampled_from(['seq','sft']))
def test_windows_keep_to_documents(tmp_path_factory, shards, w, stride, offsets, kind):
    store = write_docs(tmp_path_factory.mktemp('d'), shards, offsets)
    flat = [d for s in shards for d in s]
    doc = [i for i,d in enumerate(flat) for _ in d]; mask = [x>0 for d in flat for x in d]; pos = [j for d in flat for j in range(len(d))]
    ds,L = TextDataset(store, kind, window_size=w, stride=stride),len(doc)
    assert len(ds)==(0 if L<=w else (L-1-w)//stride+1)
    for i,o in enumerate(ds):
        b = min(i*stride, L-1-w)
        assert o['input_ids'].tolist()==list(range(b+1, b+w+1)) and o['target_ids'].tolist()==list(range(b+2, b+w+2))
        assert o['loss_mask'].tolist()==[doc[p]==doc[p+1] and (kind=='seq' or mask[p+1]) for p in range(b, b+w)]
        first = {}
        assert o['segment_ids'].tolist()==[first.setdefault(doc[p], len(first)) for p in range(b, b+w)]
        begin = {d:min(p for p in range(L) if doc[p]==d) for d in first}
        assert o['position_ids'].tolist()==[pos[p] if kind=='sft' else p-max(b, begin[doc[p]]) for p in range(b, b+w)]

@settings(max_examples=100, deadline=None)
@given(docs, st.data())
def test_records_and_bins_keep_to_records(tmp_path_factory, shards, data):
    cuts = iter([sorted({0, len(s), *data.draw(st.lists(st.integers(0, len(s)), max_size=3))}) if s else [0] for s in shards])
    bounds = []
    def bins(n): bounds.append(next(cuts)); return bounds[-1]
    store = write_docs(tmp_path_factory.mktemp('d'), shards, bins=bins)
    flat = [d for s in shards for d in s]
    ids = np.split(np.arange(1, sum(map(len, flat))+1), np.cumsum([len(d) for d in flat])[:-1]) if flat else []
    base,samples = 0,[]
    for s,c in zip(shards, bounds):
        samples += [list(range(base+a, base+b)) for a,b in zip(c, c[1:])]; base += len(s)
    for unit,of in ('bin',samples),('record',[[i] for i in range(len(flat))]):
        ds = TextDataset(store, 'sft', unit)
        assert len(ds)==len(of) and ds.lengths.tolist()==[sum(len(ids[i]) for i in o) for o in of]
        for o,members in zip(ds, of):
            assert o['input_ids'].tolist()==[x for i in members for x in ids[i].tolist()]
            assert o['target_ids'].tolist()==[x for i in members if len(ids[i]) for x in [*ids[i][1:].tolist(), 0]]
            assert o['loss_mask'].tolist()==[x for i in members if len(ids[i]) for x in [*[v>0 for v in flat[i][1:]], False]]
            assert o['position_ids'].tolist()==[j for i in members for j in range(len(ids[i]))]
            assert o['record_offsets'].tolist()==np.cumsum([0]+[len(ids[i]) for i in members]).tolist()

@pytest.mark.parametrize('strategy', ['bfd','bfd_split','wrapped','simple'])
def test_through_the_job(tmp_path, toks, strategy):
    "Packed by the text job: bins of whole pieces, restarting positions, every token once, no target into another piece"
    case = starting(RUNS, '04')
    for f,t in case['inputs'].items(): (tmp_path/f).write_text(t*3)
    cfg = {**case['config'], 'preprocessing':{**case['config'].get('preprocessing', {}), 'packing_strategy':strategy, 'max_packed_len':32, 'max_seq_len':500}}
    r = TextPipeline(cfg, [tmp_path/f for f in case['inputs']], tmp_path/'out', toks/'plain', progress=False).run()
    ds = TextDataset.load('seq', tmp_path/'out')
    assert ds.unit==('record' if strategy=='simple' else 'bin')
    store = r.store()
    assert torch.cat([o['input_ids'] for o in ds]).tolist()==store.fetch(0, len(store)).tolist()
    assert all(len(o['input_ids'])<=32 for o in ds)
    for o in ds:
        a = o['record_offsets'].tolist()
        for x,y in zip(a, a[1:]):
            assert o['position_ids'][x:y].tolist()==list(range(y-x)) and o['target_ids'][x:y-1].tolist()==o['input_ids'][x+1:y].tolist()
            assert o['loss_mask'][x:y].tolist()==[True]*(y-x-1)+[False]
    if strategy=='wrapped': # pieces of one document, end to end, are one document
        plain = TextPipeline({**cfg, 'preprocessing':{**cfg['preprocessing'], 'packing_strategy':'simple', 'max_packed_len':500}}, [tmp_path/f for f in case['inputs']], tmp_path/'plain', toks/'plain', progress=False).run().store()
        assert document_borders(store).tolist()==document_borders(plain).tolist()

def test_weights_of_messages(tmp_path, toks):
    (tmp_path/'in.jsonl').write_text(json.dumps(dict(messages=[dict(role='user', content='Hello.'), dict(role='assistant', content='Hello.', weight=.5), dict(role='user', content='Hello.'), dict(role='assistant', content='Hello.')])))
    cfg = TextConfig.for_shape('chat', output=dict(dtype=dict(loss_mask='float32')))
    TextPipeline(cfg, tmp_path/'in.jsonl', tmp_path/'out', toks/'plain', progress=False).run()
    for ds in TextDataset.load('sft', tmp_path/'out'), TextDataset.load('sft', tmp_path/'in.jsonl', tokenizer_path=toks/'plain', config=cfg):
        o = ds[0]
        assert o['loss_weight'][o['loss_mask']].tolist()==[.5]*4+[1.]*4 and o['loss_weight'].dtype==torch.float32
    assert TextDataset.load('sft', tmp_path/'out', window_size=8)[0]['loss_weight'].dtype==torch.float32

# Raw records in any order, lazily, beforehand, or as shards: the same
def test_lazy_is_eager_is_shards(tmp_path, toks):
    rng = np.random.default_rng(0)
    words = 'hello world this is a small text about nothing much at all'.split()
    with open(tmp_path/'in.jsonl', 'w') as f:
        f.write('\ufeff')
        for i in range(60):
            f.write(json.dumps(dict(messages=[dict(role=('user','assistant')[j%2], content=' '.join(rng.choice(words, rng.integers(1, 9)))) for j in range(2*rng.integers(1, 3))]))+'\n'*(1+i%3))
    cfg = TextConfig.for_shape('chat')
    TextPipeline(cfg, tmp_path/'in.jsonl', tmp_path/'out', toks/'plain', progress=False).run()
    made = [TextDataset.load('sft', tmp_path/'in.jsonl', tokenizer_path=toks/'plain', lazy=o) for o in (True,False)]+[TextDataset.load('sft', tmp_path/'out')]
    assert [len(o) for o in made]==[60]*3
    idx = rng.permutation(60)[:30]
    a,b,c = (o.levels(idx)['record'] for o in made)
    for x in b,c:
        assert x.offsets.tolist()==a.offsets.tolist() and list(x.fields)==list(a.fields)
        for k in a.fields: assert a.fields[k].dtype==x.fields[k].dtype and np.array_equal(a.fields[k], x.fields[k]), k
    w = [TextDataset.load('sft', p, 32, tokenizer_path=t) for p,t in ((tmp_path/'in.jsonl', toks/'plain'), (tmp_path/'out', None))]
    assert len(w[0])==len(w[1])>5
    for k in w[0][3]: assert torch.equal(w[0][3][k], w[1][3][k])

def test_continuous_positions_of_raw_records(tmp_path, toks):
    s = encode_in_memory(inputs('68', tmp_path), TextConfig.for_shape('chat', output=dict(position_ids_mode='continuous')), toks/'plain')
    assert s.fetch(0, len(s), 'position_ids').tolist()==list(range(len(s)))
    s = encode_in_memory(tmp_path/'input.jsonl', TextConfig.for_shape('chat', output=dict(position_ids_mode='none')), toks/'plain')
    assert 'position_ids' not in s.keys and len(TextDataset(s, 'sft', window_size=16))==7

def test_bad_raw_records(tmp_path, toks):
    path = tmp_path/'in.jsonl'
    good = json.dumps(dict(messages=[dict(role='assistant', content='Hello.')]))
    path.write_text(f'{good}\n\n{{"messages": 3}}\n{good}\n')
    with pytest.raises(ValueError, match=r'in.jsonl:3: field .messages. is 3'): TextDataset.load('sft', path, tokenizer_path=toks/'plain')
    lazy = TextDataset.load('sft', path, tokenizer_path=toks/'plain', lazy=True)
    assert len(lazy)==3 and len(lazy[2]['input_ids'])
    with pytest.raises(ValueError, match=r'in.jsonl:3: field .messages.'): lazy[1]
    some = TextDataset.load('sft', path, tokenizer_path=toks/'plain', config=TextConfig.for_shape('chat', on_error='skip'))
    assert len(some)==2 and some.store.dropped=={'wrong type':1}
    path.write_text('')
    with pytest.raises(ValueError, match='is left'): TextDataset.load('sft', path, tokenizer_path=toks/'plain')

def test_bad_pairs(tmp_path, toks):
    path = tmp_path/'in.jsonl'
    for row,why in (dict(chosen='a', rejected='b'), 'no prompt'),(dict(prompt='a', chosen='b'), 'no rejected'),(dict(prompt=3, chosen='a', rejected='b'), 'prompt is 3'):
        path.write_text('\n'+json.dumps(row))
        with pytest.raises(ValueError, match=f'in.jsonl:2: .*{why}'): TextDataset.load('dpo', path, tokenizer_path=toks/'plain')[0]
        with pytest.raises(ValueError, match=f'in.jsonl:2: .*{why}'): TextDataset.load('dpo', path, tokenizer_path=toks/'plain', lazy=False)

def test_rewards_that_are_not_one_for_each(tmp_path):
    o = np.array([0,1,3])
    write_token_shard(lambda f: tmp_path/f, dict(prompts=ShardArray(np.arange(1), 'int32', [0,1]), responses=ShardArray(np.arange(3), 'int32', o, [0,2]), masks=ShardArray(np.ones(3), 'bool', o, [0,2]), rewards=ShardArray(np.ones(3), 'float32', [0,3])))
    with pytest.raises(StoreError, match='record 0 has 2 responses and 3 rewards'): TextDataset.load('grpo', tmp_path)

def test_detect_format(tmp_path):
    for name in 'a.jsonl','a.jsonl.gz','a.parquet','a.json':
        (tmp_path/name).write_text('')
        assert detect_format(tmp_path/name)=='jsonl'
    (tmp_path/'a.txt').write_text('')
    with pytest.raises(ValueError): detect_format(tmp_path/'a.txt')
    (tmp_path/'empty').mkdir()
    with pytest.raises(FileNotFoundError): detect_format(tmp_path/'empty')
    (tmp_path/'deep/er').mkdir(parents=True); (tmp_path/'deep/er/x.jsonl').write_text('{}')
    assert detect_format(tmp_path/'deep')=='jsonl'
    assert detect_format(tree_of('04', tmp_path/'deep/out'))=='bin' and detect_format(tmp_path/'deep')=='bin'

def test_nested_records_are_read(tmp_path, toks):
    (tmp_path/'x/y').mkdir(parents=True)
    inputs('68', tmp_path/'x/y')
    assert len(TextDataset.load('sft', tmp_path/'x', tokenizer_path=toks/'plain'))==3

def test_a_given_store_skips_the_rest(tmp_path): assert len(TextDataset.load('seq', 'nowhere', 16, store=TokenStore(tree_of('04', tmp_path))))==8

def test_pickled(tmp_path, toks):
    for ds in pairs(tmp_path, toks, '69'), TextDataset.load('sft', tree_of('01', tmp_path/'o'), window_size=16):
        back = pickle.loads(pickle.dumps(ds))
        assert len(back)==len(ds) and back.content_key()==ds.content_key()
        for k in ds[1]: assert torch.equal(back[1][k], ds[1][k])

def test_domains_of_raw_records(tmp_path, toks):
    "They can be chosen and mixed; what only the job can do is refused"
    from fastseqprep.text_loader import text_dl
    path = tmp_path/'in.jsonl'
    path.write_text(''.join(json.dumps(dict(text=f'{i} the sea is wide', site='web' if i%3 else 'wiki'))+'\n' for i in range(30)))
    cfg = TextConfig.for_shape('pretrain', preprocessing=dict(min_chars=0, max_items=3), output=dict(domain_key='site'))
    ds = TextDataset.load('seq', path, tokenizer_path=toks/'plain', config=cfg)
    assert ds.store.domains==['wiki','web'] and np.bincount(ds.domains).tolist()==[10,20]     # max_items has no meaning here
    TextPipeline({**cfg.resolved(), 'preprocessing':dict(min_chars=0)}, path, tmp_path/'out', toks/'plain', progress=False).run()
    job = TextDataset.load('seq', tmp_path/'out')
    for a,b in zip(ds, job): assert torch.equal(a['input_ids'], b['input_ids'])
    mixed = [x for b in text_dl(path, 'seq', 200, tokenizer_path=toks/'plain', config=cfg, weights=dict(wiki=3, web=1)) for x in b['sample'].tolist()]
    assert .6<np.mean(np.array(mixed)<10)<.9
    assert len(TextDataset.load('seq', path, tokenizer_path=toks/'plain', config=cfg, domains='wiki'))==10
    lazy = TextDataset.load('seq', path, tokenizer_path=toks/'plain', config=cfg, lazy=True)
    assert lazy.store.domains==['wiki','web'] and lazy.domains.tolist()==[int(i%3>0) for i in range(30)]
    for i,j in enumerate(np.argsort(lazy.domains, kind='stable')): assert torch.equal(lazy[int(j)]['input_ids'], ds[i]['input_ids'])
    got = [int(x) for b in text_dl(lazy, batch_size=5, shuffle=True, weights=dict(wiki=3, web=1)) for x in b['sample']]
    assert .6<np.mean(lazy.domains[got]==0)<.9
    with pytest.raises(ValueError, match='web has no weight'): text_dl(lazy, batch_size=5, weights=dict(wiki=1))
    some = TextDataset.load('seq', path, tokenizer_path=toks/'plain', config=cfg, domains='wiki', lazy=True)
    assert len(some)==10 and some.store.domains==['wiki'] and not some.domains.any() and torch.equal(some[4]['input_ids'], lazy[12]['input_ids'])
    assert len({o.content_key() for o in (lazy, some, pickle.loads(pickle.dumps(lazy)))})==2
    with pytest.raises(ValueError, match="no domain 'wikj', did you mean 'wiki'"): TextDataset.load('seq', path, tokenizer_path=toks/'plain', config=cfg, domains=['wikj'], lazy=True)
    with pytest.raises(ValueError, match='no parts'): TextDataset.load('seq', path, tokenizer_path=toks/'plain', config=cfg, part='train')

def test_domains_of_lines_that_cannot_be_read(tmp_path, toks):
    "They are an error when they are asked for, as ever, and end nothing before"
    path = tmp_path/'in.jsonl'
    path.write_bytes(b'{"text":"the sea","site":"a"}\n{"text"\n[1]\n{"text":"wide","site":3}\n{"text":"x","site":"\\ud800"}\n\xff\n')
    cfg = TextConfig.for_shape('pretrain', preprocessing=dict(min_chars=0), output=dict(domain_key='site'))
    ds = TextDataset.load('seq', path, tokenizer_path=toks/'plain', config=cfg, lazy=True)
    assert ds.store.domains==['a','__default__'] and ds.domains.tolist()==[0,1,1,1,1,1] and len(ds[3]['input_ids'])
    for i in 1,2,4,5:
        with pytest.raises(ValueError, match=f'in.jsonl:{i+1}'): ds[i]

def test_prompts_that_are_texts(tmp_path, toks):
    "Groups of answers to a text are those to what a user says, in shards and raw"
    rows = [dict(prompt=f'What is {i}+2?', responses=['4','Five'], rewards=[1,.5]) for i in range(3)]
    (tmp_path/'texts.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    (tmp_path/'chats.jsonl').write_text('\n'.join(json.dumps({**o, 'prompt':[dict(role='user', content=o['prompt'])]}) for o in rows))
    made = [TextDataset.load('grpo', tmp_path/o, tokenizer_path=toks/'plain', lazy=lazy) for o in ('chats.jsonl','texts.jsonl') for lazy in (False,True)]
    TextPipeline(TextConfig.for_shape('grpo'), tmp_path/'texts.jsonl', tmp_path/'out', toks/'plain', progress=False).run()
    made.append(TextDataset.load(path=tmp_path/'out'))
    assert TextTokenizer(toks/'plain').full.decode(made[0][0]['prompts'].tolist()).endswith('assistant\n')
    for ds in made[1:]:
        for a,b in zip(made[0], ds, strict=True):
            assert torch.equal(a['prompts'], b['prompts']) and torch.equal(a['rewards'], b['rewards']) and all(map(torch.equal, a['responses'], b['responses']))
    bare = TextConfig(input=dict(sources=dict(prompts=dict(sections=[dict(field='prompt', action='mask')]), **{k:v.model_dump() for k,v in TextConfig.for_shape('grpo').sources.items() if k!='prompts'})))
    ds = TextDataset.load('grpo', tmp_path/'texts.jsonl', tokenizer_path=toks/'plain', config=bare) # without a template, as it stands
    assert TextTokenizer(toks/'plain').full.decode(ds[0]['prompts'].tolist())=='What is 0+2?'
    with pytest.raises(ValueError, match='expected a list of messages'): TextDataset.load('sft', tmp_path/'texts.jsonl', tokenizer_path=toks/'plain', config=TextConfig.for_shape('chat', input=dict(sections=[dict(field='prompt', action='$role', template=True)])))

@pytest.mark.parametrize('lazy', [False,True])
@pytest.mark.parametrize('key', [dict(dedupe=True), dict(validation=.1)])
def test_what_raw_records_cannot_follow(tmp_path, toks, key, lazy):
    path = inputs('68', tmp_path)
    with pytest.raises(ValueError, match=f'sets {next(iter(key))}, .*run the text job'): TextDataset.load('sft', path, tokenizer_path=toks/'plain', config=TextConfig.for_shape('chat', **key), lazy=lazy)

def test_what_describes_a_dataset_is_no_record(tmp_path):
    for o in 'state.json','dataset_info.json': (tmp_path/o).write_text('{"_data_files":[]}')
    with pytest.raises(FileNotFoundError, match='neither token shards'): detect_format(tmp_path)
