"""The text job: recorded runs, right values where ours differ, and the same bytes whatever the workers, the splits and the kills."""
import functools, gc, gzip, json, os, random, signal, subprocess, sys, time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
import numpy as np, pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Tokenizer
import fastseqprep.text_pipeline as pipeline
from fastseqprep.files import StoreError
from fastseqprep.sections import as_dtype, make_builder
from fastseqprep.store import Ledger, read_manifest
from fastseqprep.text_config import TextConfig
from fastseqprep.text_encode import encode_split, fields_of_chats, fields_read, source_texts
from fastseqprep.text_input import input_splits
from fastseqprep.text_pipeline import TextPipeline
from fastseqprep.text_tokenizer import TextTokenizer
from fastseqprep.token_store import TokenStore

CASES = Path(__file__).parent/'cases/text'
RECORDED = {o['name']:o for o in map(json.loads, (CASES/'pipeline.jsonl').read_text(encoding='utf-8').splitlines())}

@pytest.fixture(scope='session')
def toks(tmp_path_factory):
    "Folder with the recorded tokenizer in all its dressings"
    root,parts = tmp_path_factory.mktemp('tokenizers'),json.loads((CASES/'tokenizers.json').read_text(encoding='utf-8'))
    for name,o in parts['dressings'].items():
        (root/name).mkdir()
        (root/name/'tokenizer.json').write_text(json.dumps({**parts['tokenizer'], 'post_processor':o['post_processor']}))
        (root/name/'tokenizer_config.json').write_text(json.dumps(o['config']))
    return root

def tree(out):
    "Shard → name → array, as its meta.json says"
    res = {}
    for m in sorted(Path(out).rglob('meta.json')):
        res[m.parent.relative_to(out).as_posix()] = {k:np.fromfile(m.parent/f'{k}.bin', v['dtype']) for k,v in json.loads(m.read_text()).items()}
    return res

def same(a, b):
    assert list(a)==list(b)
    for s in a:
        assert list(a[s])==list(b[s])
        for k in a[s]: assert a[s][k].dtype==b[s][k].dtype and np.array_equal(a[s][k], b[s][k]), (s, k)

def files(out): return {o.relative_to(out).as_posix():o.read_bytes() for o in sorted(Path(out).rglob('*')) if o.is_file() and not o.name.startswith('.')}
def data_files(out): return {k:v for k,v in files(out).items() if k!='manifest.json'}

def run(case, where, toks, out='out', **keys):
    for f,t in case['inputs'].items(): (where/f).write_text(t, encoding='utf-8')
    TextPipeline({**case['config'], **keys}, [where/f for f in case['inputs']], where/out, toks/case['tokenizer'], progress=False).run()
    return tree(where/out)

def expected(case): return {s:{k:np.array(o['values'][k]).astype(v['dtype']) for k,v in o['meta'].items()} for s,o in case['expected']['shards'].items()}

# By the preset every recorded run is the same, but for: 10, 13, 51, 53 (nothing is left: an error), 50, 52 (errors there, too), 11 (the generation tag is known here),
# 22, 37, 38, 39 (masks slide there), 48 (a bad line costs only itself), 36 (see below)
OTHER = '10','11','13','22','36','37','38','39','48','50','51','52','53'
@pytest.mark.parametrize('name', [o for o in RECORDED if o[:2] not in OTHER])
def test_preset(tmp_path, toks, name): same(run(RECORDED[name], tmp_path, toks, compat='astrai'), expected(RECORDED[name]))

# With the defaults: text, packing, shards and positions are the same
@pytest.mark.parametrize('name', [o for o in RECORDED if o[:2] in ('04','20','25','26','27','30','32','34')])
def test_default(tmp_path, toks, name): same(run(RECORDED[name], tmp_path, toks), expected(RECORDED[name]))

# The same ids where only the type of the mask is ours
@pytest.mark.parametrize('name', [o for o in RECORDED if o[:2] in ('02','03','21','23','42','44')])
def test_masks_are_bool(tmp_path, toks, name):
    got,want = run(RECORDED[name], tmp_path, toks),expected(RECORDED[name])
    same(got, {s:{k:v.astype(bool) if k.endswith('_mask') else v for k,v in o.items()} for s,o in want.items()})
    assert any(v.dtype==bool for o in got.values() for v in o.values())

# Whatever a configuration asks for, what is written is what the builder gives, end to end: builders have their own tests with values by hand
@pytest.mark.parametrize('name', [o for o in RECORDED if o[:2] in ('01','06','07','08','09','11','12','14','15','16','18','22','37','38','41','43','47','49')])
@pytest.mark.parametrize('compat', [{}, {'compat':'astrai'}])
def test_as_built(tmp_path, toks, name, compat):
    case = RECORDED[name]
    cfg,tok = TextConfig(**case['config'], **compat, on_error='skip'),TextTokenizer(toks/case['tokenizer'])
    records = [json.loads(o) for o in '\n'.join(case['inputs'].values()).split('\n') if o.strip()]
    built = make_builder(cfg, tok).build(records)
    got = run(case, tmp_path, toks, **compat, on_error='skip')['__default__/shard_0000']
    for k,o in built.outputs.items():
        assert np.array_equal(got[k], as_dtype(o.values.values, got[k].dtype, k)) and len(got[k])
        if o.mask is not None: assert np.array_equal(got[built.masks[k]], o.mask.values)

def test_rewards_keep_their_fraction(tmp_path, toks):
    got = run(RECORDED['06-grpo'], tmp_path, toks)['__default__/shard_0000']
    assert got['rewards'].dtype==np.float32 and got['masks'].dtype==bool and (got['rewards']%1!=0).any()

def test_masks_stay_in_place(tmp_path, toks):
    "A record of which all is trained keeps its mask: 37 and 38 in either order, 39 packed"
    for name in [o for o in RECORDED if o[:2] in ('37','38','39')]:
        where = tmp_path/name[:2]; where.mkdir()
        got = run(RECORDED[name], where, toks)['__default__/shard_0000']
        assert len(got['sequence'])==len(got['loss_mask'])
        s,tok = TokenStore(where/'out'),TextTokenizer(toks/RECORDED[name]['tokenizer'])
        records = [json.loads(o) for o in RECORDED[name]['inputs']['input.jsonl'].split('\n') if o.strip()]
        answers = Counter(o.get('response', '') for o in records)
        found = Counter(tok.full.decode(s.rows('sequence', [i]).values[s.rows('loss_mask', [i]).values].tolist()) for i in range(s.n_records))
        assert found==answers

def test_a_second_run(tmp_path, toks):
    "36: shards of another run are never read along"
    case = RECORDED['36-rerun-stale']
    run(case, tmp_path, toks)
    (tmp_path/'second.jsonl').write_text('{"text":"Hello to everyone."}\n')
    def second(**kwargs): return TextPipeline(case['config'], tmp_path/'second.jsonl', tmp_path/'out', toks/'plain', progress=False, **kwargs).run()
    with pytest.raises(StoreError, match='other inputs.*overwrite=True'): second()
    second(overwrite=True)
    assert list(tree(tmp_path/'out'))==['__default__/shard_0000']

@pytest.mark.parametrize('start,words', [('10','no record is left of 3'), ('13','no chat template'), ('50',"only 'bin'"), ('51','input.sections'), ('52','which int8 does not hold'), ('53','too short')])
def test_errors(tmp_path, toks, start, words):
    name = next(o for o in RECORDED if o.startswith(start))
    with pytest.raises(ValueError, match=words): run(RECORDED[name], tmp_path, toks, compat='astrai')
    assert not (tmp_path/'out').exists() or not data_files(tmp_path/'out')

def test_bad_line(tmp_path, toks):
    "48: it ends the run with its place, or costs only itself"
    case = RECORDED['48-bad-line']
    with pytest.raises(ValueError, match=r'input\.jsonl:\d+: the line is not JSON'): run(case, tmp_path, toks)
    assert not (tmp_path/'out').exists()
    run(case, tmp_path, toks, on_error='skip')
    m = read_manifest(tmp_path/'out')
    (e,) = m.ledger.values()
    lines = [o for o in case['inputs']['input.jsonl'].split('\n') if o.strip()]
    assert e['read']==len(lines) and e['dropped']['not JSON']==1 and e['kept']==len(lines)-sum(e['dropped'].values())

# ---- a larger job, over many splits

WORDS = 'the cat sat on a mat while ten small birds sang about rain'.split()
def documents(n, seed=0):
    r = random.Random(seed)
    return [dict(text=' '.join(r.choices(WORDS, k=r.choice([1,3,8,20,60]))), site=r.choice(['news','wiki','Wiki']), id=i) for i in range(n)]

def write(path, records): path.write_text(''.join(json.dumps(o)+'\n' for o in records)); return path

PACKED = dict(input=dict(sections=[dict(field='text', action='train')]), preprocessing=dict(min_chars=1, max_seq_len=64, max_packed_len=48, packing_strategy='bfd'),
              output=dict(domain_key='site', max_tokens_per_shard=1500, dtype='auto'), dedupe=True, validation=.2)

@pytest.fixture
def small_splits(monkeypatch): monkeypatch.setattr(pipeline, 'input_splits', functools.partial(input_splits, size=2000))

def job(path, out, toks, cfg=PACKED, **kwargs): return TextPipeline(cfg, path, out, toks/'plain', progress=False, **kwargs).run()

def test_same_bytes(tmp_path, toks, small_splits, monkeypatch):
    docs = documents(300)
    path = write(tmp_path/'d.jsonl', docs)
    job(path, tmp_path/'none', toks)
    want = files(tmp_path/'none')
    assert sum(o.endswith('meta.json') for o in want)>8
    for n in (1,2):
        job(path, tmp_path/f'w{n}', toks, n_workers=n)
        assert files(tmp_path/f'w{n}')==want
    with ProcessPoolExecutor(2, mp_context=get_context('spawn')) as pool: job(path, tmp_path/'pool', toks, executor=pool)
    assert files(tmp_path/'pool')==want
    for n in (1,2,5):
        monkeypatch.setattr(pipeline, '_n_threads', lambda cfg, encoder, todo: min(n, todo))
        job(path, tmp_path/f'threads{n}', toks)
        assert files(tmp_path/f'threads{n}')==want
    monkeypatch.setattr(pipeline, 'input_splits', input_splits)
    job(path, tmp_path/'one', toks)
    assert files(tmp_path/'one')==want
    (tmp_path/'parts').mkdir()
    write(tmp_path/'parts/a.jsonl', docs[:120])
    with gzip.open(tmp_path/'parts/b.jsonl.gz', 'wt') as f: f.write(''.join(json.dumps(o)+'\n' for o in docs[120:]))
    job(tmp_path/'parts', tmp_path/'two', toks)
    assert data_files(tmp_path/'two')==data_files(tmp_path/'none')

def test_dask(tmp_path, toks, small_splits):
    "Workers of a cluster give the bytes of one process, for packed documents and for chats"
    distributed = pytest.importorskip('distributed')
    path = write(tmp_path/'d.jsonl', documents(200))
    chats = write(tmp_path/'c.jsonl', [dict(messages=[dict(role='user', content=f'question {i}'), dict(role='assistant', content='reply '*(1+i%5))]) for i in range(120)])
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster, distributed.Client(cluster) as client:
        for name,cfg,where in ('docs',PACKED,path), ('chats',CHAT,chats):
            job(where, tmp_path/name, toks, cfg)
            job(where, tmp_path/f'{name}-dask', toks, cfg, executor=client.get_executor())
            assert files(tmp_path/f'{name}-dask')==files(tmp_path/name)

KILLED = '''
import functools, json, sys
import fastseqprep.text_pipeline as p
from fastseqprep.text_input import input_splits
p.input_splits = functools.partial(input_splits, size=2000)
cfg,path,out,tok = sys.argv[1:]
p.TextPipeline(json.loads(cfg), path, out, tok, progress=False).run()
'''

def test_killed_and_resumed(tmp_path, toks, small_splits):
    path = write(tmp_path/'d.jsonl', documents(400, 1))
    job(path, tmp_path/'want', toks)
    want,kills,r = files(tmp_path/'want'),0,random.Random(5)
    args = [sys.executable, '-c', KILLED, json.dumps(PACKED), str(path), str(tmp_path/'out'), str(toks/'plain')]
    for _ in range(40):
        p = subprocess.Popen(args, stderr=subprocess.PIPE)
        begin = time.monotonic()
        while p.poll() is None and not (tmp_path/'out/.run').exists() and time.monotonic()-begin<60: time.sleep(.005)
        if kills<6: time.sleep(r.uniform(0, .25))
        if kills<6 and p.poll() is None:
            p.send_signal(signal.SIGKILL); p.wait(); kills += 1
            assert not (tmp_path/'out/manifest.json').exists() or files(tmp_path/'out')==want
        else:
            assert p.wait()==0, p.stderr.read()
            break
    assert files(tmp_path/'out')==want and not (tmp_path/'out/.run').exists()

def test_a_failed_run_stops_its_threads(tmp_path, toks, small_splits, monkeypatch):
    path,done = write(tmp_path/'d.jsonl', [dict(text=['no text'])]+documents(300)),[]
    def slow(spec, **how):
        if spec['split'][4]: time.sleep(.05)
        done.append(encode_split(spec, **how))
        return done[-1]
    monkeypatch.setattr(pipeline, 'encode_split', slow)
    before = gc.get_threshold()
    with pytest.raises(ValueError, match='d.jsonl:1: '): job(path, tmp_path/'out', toks, {**PACKED, 'on_error':'raise'})
    assert len(done)<=4 and gc.get_threshold()==before and not (tmp_path/'out').exists()

def test_nobody_waits_for_a_split_that_is_not_wanted(tmp_path, toks):
    from concurrent.futures import CancelledError
    from fastseqprep.text_encode import encode_specs
    from fastseqprep.text_input import list_inputs
    path = write(tmp_path/'d.jsonl', documents(20))
    spec, = encode_specs(input_splits(list_inputs(path)), TextConfig(**PACKED), TextTokenizer(toks/'plain'), tmp_path/'scratch')
    with pytest.raises(CancelledError): encode_split(spec, stopped=lambda: True)

@pytest.mark.parametrize('threads', [1,3])
def test_encoded_splits_are_not_done_again(tmp_path, toks, small_splits, monkeypatch, threads):
    monkeypatch.setattr(pipeline, '_n_threads', lambda cfg, encoder, n: min(n, threads))
    path = write(tmp_path/'d.jsonl', documents(300, 2))
    done = []
    def dies(spec, **how):
        if len(done)==9: raise KeyboardInterrupt
        done.append(spec['split'])
        return encode_split(spec, **how)
    monkeypatch.setattr(pipeline, 'encode_split', dies)
    with pytest.raises(KeyboardInterrupt): job(path, tmp_path/'out', toks)
    again = []
    monkeypatch.setattr(pipeline, 'encode_split', lambda spec, **how: again.append(spec['split']) or encode_split(spec, **how))
    job(path, tmp_path/'out', toks)
    monkeypatch.setattr(pipeline, 'encode_split', encode_split)
    assert again and len([o for o in again if o in done])<=threads+1 # those under way or not yet taken
    job(path, tmp_path/'want', toks)
    assert files(tmp_path/'out')==files(tmp_path/'want')

def test_ledger_and_tokens(tmp_path, toks):
    docs = documents(300, 3)
    cfg = {**PACKED, 'validation':0}
    res = job(write(tmp_path/'d.jsonl', docs), tmp_path/'out', toks, cfg)
    tok = TextTokenizer(toks/'plain')
    unique = list({d['text']:d for d in docs}.values())         # the first of equal texts
    n = sum(len(tok.encode([d['text']]).values) for d in unique)
    (e,) = res.ledger.to_dict().values()
    assert e['read']==300 and e['dropped']=={'duplicate':300-len(unique)}
    facts = res.facts
    cut = facts['packing']['cut_tokens'] + sum(max(0, len(tok.encode([d['text']]).values)-64) for d in unique)
    assert res.tokens==n-cut and facts['packing']['rows']==len(unique)

def test_validation(tmp_path, toks):
    docs = documents(400, 4)
    path = write(tmp_path/'d.jsonl', docs+docs[:100])
    cfg = {**PACKED, 'dedupe':False, 'output':{}, 'preprocessing':dict(min_chars=1)}
    job(path, tmp_path/'out', toks, cfg)
    tok = TextTokenizer(toks/'plain')
    parts = {o:TokenStore(tmp_path/'out', o) for o in ('train','validation')}
    texts = {o:Counter(tok.full.decode(r.tolist()) for r in s.rows('sequence', np.arange(s.n_records)).to_rows()) for o,s in parts.items()}
    assert not set(texts['train']) & set(texts['validation']) and texts['train']+texts['validation']==Counter(d['text'] for d in docs+docs[:100])
    assert .1<sum(texts['validation'].values())/500<.3
    job(path, tmp_path/'key', toks, {**cfg, 'validation_key':'id'})
    with pytest.raises(ValueError, match='d.jsonl:1: field .who. is None, expected a text or a whole number'): job(path, tmp_path/'who', toks, {**cfg, 'validation_key':'who'})

def test_most_items(tmp_path, toks, small_splits):
    docs = documents(300, 6)
    for dedupe in (False, True):
        out = tmp_path/f'out{dedupe}'
        cfg = {**PACKED, 'validation':0, 'dedupe':dedupe, 'output':{}, 'preprocessing':dict(min_chars=1, max_items=37)}
        job(write(tmp_path/'d.jsonl', docs), out, toks, cfg)
        s,tok = TokenStore(out),TextTokenizer(toks/'plain')
        want = list(dict.fromkeys(d['text'] for d in docs)) if dedupe else [d['text'] for d in docs]
        assert [tok.full.decode(r.tolist()) for r in s.rows('sequence', np.arange(s.n_records)).to_rows()]==want[:37]

@pytest.mark.parametrize('n,dtype', [(65_535,'uint16'), (65_536,'uint16'), (65_537,'int32')])
def test_auto_dtype(tmp_path, n, dtype):
    from tokenizers import models, pre_tokenizers
    t = Tokenizer(models.WordLevel({f'w{i}':i for i in range(n)}, 'w0'))
    t.pre_tokenizer = pre_tokenizers.Whitespace()
    t.save(str(tmp_path/'tokenizer.json'))
    write(tmp_path/'d.jsonl', [dict(text=f'w1 w{n-1}')])
    cfg = dict(input=PACKED['input'], preprocessing=dict(min_chars=0), output=dict(dtype='auto'))
    TextPipeline(cfg, tmp_path/'d.jsonl', tmp_path/'out', tmp_path, progress=False).run()
    s = TokenStore(tmp_path/'out')
    assert str(s.dtypes['sequence'])==dtype and s.fetch(0, 2).tolist()==[1,n-1]

def test_domains_stay_inside(tmp_path, toks):
    names = ['../x', '/etc', 'a/b', '..', 'CON', 'Wiki', 'wiki', '', '__default__']
    path = write(tmp_path/'d.jsonl', [dict(text='Hello to everyone.', site=o) for o in names])
    job(path, tmp_path/'out', toks, {**PACKED, 'dedupe':False, 'validation':0})
    s = TokenStore(tmp_path/'out')
    assert s.domains==names or set(s.domains)==set(names)
    assert {o.name for o in tmp_path.iterdir()}=={'d.jsonl','out'} and len({o.lower() for o in os.listdir(tmp_path/'out')})==len(names)+1

def test_another_tokenizer_is_refused(tmp_path, toks):
    path = write(tmp_path/'d.jsonl', documents(5))
    cfg = {**PACKED, 'validation':0}
    job(path, tmp_path/'out', toks, cfg)
    with pytest.raises(StoreError, match='another config .tokenizer.'): TextPipeline(cfg, path, tmp_path/'out', toks/'adds_bos_eos', progress=False).run()

CHAT = dict(input=dict(sections=[dict(field='messages', action='$role', template=True)]), mask=dict(user='mask', assistant='train'))
def test_chats_are_split_between_messages(tmp_path, toks):
    chat = [dict(role=r, content=f'{w} Hello to everyone.') for w in ('One','Two','Three') for r in ('user','assistant')]
    path = write(tmp_path/'d.jsonl', [dict(messages=chat)]*3)
    for strategy in ('bfd','bfd_split','simple'):
        cfg = {**CHAT, 'overlong':'split', 'preprocessing':dict(max_seq_len=60, max_packed_len=60, packing_strategy=strategy)}
        job(path, tmp_path/strategy, toks, cfg)
        s,tok = TokenStore(tmp_path/strategy),TextTokenizer(toks/'plain')
        rows = s.rows('sequence', np.arange(s.n_records)).to_rows()
        assert len(rows)>3 and all(tok.full.decode(r.tolist(), skip_special_tokens=False).startswith('<|im_start|>') for r in rows) and max(map(len, rows))<=60
        assert s.pieces()[:,0].max()==2
        assert len(s)==3*len(tok.encode([''.join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat)]).values)

def test_conversations_are_not_wrapped_unasked():
    chat = TextConfig.for_shape('chat').resolved()
    for o in 'chat','dpo','grpo':
        with pytest.raises(ValueError, match='split_turns'): TextConfig.for_shape(o, preprocessing=dict(packing_strategy='wrapped'))
    TextConfig(**chat | dict(preprocessing=dict(packing_strategy='wrapped'), split_turns=True))
    TextConfig.for_shape('pretrain', preprocessing=dict(packing_strategy='wrapped'))

@pytest.mark.parametrize('n_workers', [0,1])
def test_preferences_as_people_write_them(tmp_path, toks, n_workers):
    "The builder takes a prompt with two answers, and gives what two conversations give"
    def user(t, role='user', **k): return dict(role=role, content=t, **k)
    (tmp_path/'short.jsonl').write_text('\n'.join(map(json.dumps, [dict(prompt='Hello', chosen='The sea', rejected='is wide'), dict(prompt=[user('a')], chosen=[user('b', 'assistant')], rejected='c')])))
    (tmp_path/'long.jsonl').write_text('\n'.join(map(json.dumps, [{k:[user(p), user(a, 'assistant')] for k,a in (('chosen',c),('rejected',r))} for p,c,r in (('Hello','The sea','is wide'),('a','b','c'))])))
    got = {}
    for name,builder in ('short','preference'),('long','preference'),('long','sectioned'):
        TextPipeline(TextConfig.for_shape('dpo', builder=builder), tmp_path/f'{name}.jsonl', tmp_path/f'{name}-{builder}', toks/'hf_style', n_workers=n_workers, progress=False).run()
        got[name,builder] = tree(tmp_path/f'{name}-{builder}')
    first = got.pop(('long','sectioned'))
    assert first['__default__/shard_0000']['chosen_mask'].any()
    for o in got.values(): same(o, first)
    (tmp_path/'bad.jsonl').write_text('{"chosen":"a","rejected":"b"}')
    with pytest.raises(ValueError, match='bad.jsonl:1: there is no prompt'): TextPipeline(TextConfig.for_shape('dpo', builder='preference'), tmp_path/'bad.jsonl', tmp_path/'bad', toks/'hf_style', progress=False).run()
    assert not (tmp_path/'bad').exists()

def test_order_of_inputs_with_one_name(tmp_path, toks):
    "Records follow in the order of the inputs, so another order is another run, and the same one is found to be done"
    for o in 'ab':
        (tmp_path/o).mkdir()
        (tmp_path/o/'x.jsonl').write_text(json.dumps(dict(text=f'{o} is the sea '*9)))
    def go(order, **kw): return TextPipeline(dict(input=dict(sections=[dict(field='text', action='train')])), [tmp_path/o/'x.jsonl' for o in order], tmp_path/'out', toks/'plain', progress=False, **kw).run()
    go('ab'); first = tree(tmp_path/'out')
    go('ab')
    with pytest.raises(StoreError, match='another config'): go('ba')
    go('ba', overwrite=True)
    assert not np.array_equal(tree(tmp_path/'out')['__default__/shard_0000']['sequence'], first['__default__/shard_0000']['sequence'])

def test_overlong_is_an_error_with_its_place(tmp_path, toks):
    path = write(tmp_path/'d.jsonl', [dict(text='Hello.'), dict(text='Hello to everyone. '*30)])
    cfg = dict(input=PACKED['input'], preprocessing=dict(min_chars=0, max_packed_len=16), overlong='error')
    with pytest.raises(ValueError, match='d.jsonl:2: .*max_packed_len=16'): job(path, tmp_path/'out', toks, cfg)
    res = job(path, tmp_path/'out', toks, {**cfg, 'overlong':'drop'})
    (e,) = res.ledger.to_dict().values()
    assert e['dropped']=={'too many tokens':1} and e['kept']==1

def test_end_token(tmp_path, toks):
    path = write(tmp_path/'d.jsonl', documents(20))
    cfg = dict(input=PACKED['input'], preprocessing=dict(min_chars=0), append_eos=True)
    try: eos = TextTokenizer(toks/'adds_bos_eos').token_id('eos_token')
    except ValueError: pytest.fail('the recorded tokenizer names an end token')
    TextPipeline(cfg, path, tmp_path/'out', toks/'adds_bos_eos', progress=False).run()
    s = TokenStore(tmp_path/'out')
    assert all(r[-1]==eos and (r[:-1]!=eos).all() for r in s.rows('sequence', np.arange(20)).to_rows())

@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), most=st.integers(1, 24), strategy=st.sampled_from(['simple','bfd','bfd_split','wrapped']), scope=st.sampled_from(['shard','all']),
       shard=st.integers(1, 60), keep=st.sampled_from(['keep_start','keep_end']))
def test_all_tokens_are_accounted_for(tmp_path_factory, toks, lengths, most, strategy, scope, shard, keep):
    "Whatever the packing: pieces are ranges of their records, and tokens in = tokens out + tokens counted as cut"
    where = tmp_path_factory.mktemp('p')
    texts = [' '.join(random.Random(i*100+n).choices(WORDS, k=n)) for i,n in enumerate(lengths)]
    cfg = dict(input=PACKED['input'], preprocessing=dict(min_chars=0, max_packed_len=most, packing_strategy=strategy, truncation_mode=keep), output=dict(max_tokens_per_shard=shard), pack_scope=scope)
    res = job(write(where/'d.jsonl', [dict(text=o) for o in texts]), where/'out', toks, cfg)
    s,tok = TokenStore(where/'out'),TextTokenizer(toks/'plain')
    ids = [o.tolist() for o in tok.encode(texts).to_rows()]
    rows,positions,pieces = s.rows('sequence', np.arange(s.n_records)).to_rows(),s.rows('position_ids', np.arange(s.n_records)).to_rows(),s.pieces()
    for r,p,(i,start) in zip(rows, positions, pieces.tolist()):
        assert r.tolist()==ids[i][start:start+len(r)] and p.tolist()==list(range(start, start+len(r)))
    p = res.facts['packing']
    assert len(s)+p['cut_tokens']+p['dropped_tokens']==sum(map(len, ids)) and (strategy in ('bfd_split','wrapped'))<=(len(s)==sum(map(len, ids)))
    if strategy!='simple':
        b = s.bin_rows()
        assert all(1<=sum(map(len, rows[lo:hi]))<=most for lo,hi in zip(b[:-1], b[1:]))

# ---- content decides, and every token is counted

def one_text(s, tok, i, key='sequence'): return tok.full.decode(s.record(i)[key].tolist())
TEXTS = dict(input=PACKED['input'], preprocessing=dict(min_chars=0))
def beside(**preprocessing): return {**TEXTS, 'preprocessing':dict(min_chars=0, **preprocessing)}

def test_changed_tokenizer_at_one_path(tmp_path, toks):
    "Shards are of the tokenizer that the manifest names, also when another stood there before in the same process"
    (tmp_path/'tok').mkdir()
    state = json.loads((toks/'plain/tokenizer.json').read_text())
    path,found = write(tmp_path/'d.jsonl', [dict(text='Hello to everyone.')]),[]
    for n in (None,5):
        (tmp_path/'tok/tokenizer.json').write_text(json.dumps({**state, 'model':{**state['model'], 'merges':state['model']['merges'][:n]}}))
        res = TextPipeline(TEXTS, path, tmp_path/f'out{n}', tmp_path/'tok', progress=False).run()
        tok = TextTokenizer(tmp_path/'tok')
        found.append(res.store().record(0)['sequence'].tolist())
        assert found[-1]==tok.encode(['Hello to everyone.'])[0].tolist() and res.manifest.fitted_hash==tok.hash
    assert found[0]!=found[1]

LISTED = dict(sequence=dict(sections=[dict(field='text', action='train')]), extra=dict(sections=[dict(field='more', action='train')], list_field=True), val=dict(sections=[dict(field='v', action='value')]))
@pytest.mark.parametrize('strategy,overlong', [('bfd','truncate'),('bfd','split'),('bfd_split','truncate'),('simple','split'),('wrapped','truncate')])
@pytest.mark.parametrize('scope', ['shard','all'])
def test_lists_stay_with_their_record(tmp_path, toks, strategy, overlong, scope):
    r = random.Random(3)
    docs = [dict(text=' '.join(r.choices(WORDS, k=n)), more=[f'{i} {w}' for w in r.sample(WORDS, 1+i%3)], v=[i]) for i,n in enumerate([2,40,9,1,30,5,5,12])]
    cfg = dict(input=dict(sources=LISTED), preprocessing=dict(min_chars=0, packing_strategy=strategy, max_packed_len=24), overlong=overlong, pack_scope=scope, output=dict(max_tokens_per_shard=60))
    s,tok = job(write(tmp_path/'d.jsonl', docs), tmp_path/'out', toks, cfg).store(),TextTokenizer(toks/'plain')
    seen = set()
    for i,(n,start) in enumerate(s.pieces().tolist()):
        rec,doc = s.record(i),docs[n]
        assert rec['sequence'].tolist()==tok.encode([doc['text']])[0].tolist()[start:start+len(rec['sequence'])]
        if rec['extra']:
            assert [tok.full.decode(o.tolist()) for o in rec['extra']]==doc['more'] and rec['val'].tolist()==doc['v'] and all(o.all() for o in rec['extra_mask'])
            seen.add(n)
        else: assert not len(rec['val'])
    assert seen==set(range(len(docs)))

def pairs(**more): return dict(input=dict(sources={k:dict(sections=[dict(field=k, action='train')], mask_key=f'{k}_mask') for k in ('chosen','rejected')}), **more)
def test_cut_tokens_of_every_output_are_counted(tmp_path, toks):
    path,tok = write(tmp_path/'d.jsonl', [dict(chosen='the cat sat on a mat', rejected='a'), dict(chosen='a', rejected='ten small birds sang'), dict(chosen='a', rejected='a')]),TextTokenizer(toks/'plain')
    n = [[len(tok.encode([t]).values) for t in o] for o in (['the cat sat on a mat','a','a'], ['a','ten small birds sang','a'])]
    assert n[0][0]>5<n[1][1]
    for where in 'max_packed_len','max_seq_len':
        res = job(path, tmp_path/where, toks, pairs(preprocessing={"min_chars":0, where:5}))
        f = res.facts
        assert list(f['tokens_read'].values())==[sum(o) for o in n]
        written = {k:sum(s['tokens'][k] for s in res.shards) for k in ("chosen","rejected")}
        assert written==dict(chosen=7, rejected=7) and f['tokens_encoded']==(f['tokens_read'] if where=='max_packed_len' else written)
        assert f'{sum(n[0])-7} of {sum(n[0])} tokens of chosen were cut off by {where}' in str(res)
        res = job(path, tmp_path/f'{where}-drop', toks, pairs(preprocessing={"min_chars":0, where:5}, overlong='drop'))
        (e,) = res.ledger.to_dict().values()
        assert e['dropped']=={'too many tokens':2} and len(res.store())==1
        with pytest.raises(ValueError, match=f'd.jsonl:1: chosen .*{where}=5'): job(path, tmp_path/'error', toks, pairs(preprocessing={"min_chars":0, where:5}, overlong='error'))
    with pytest.raises(ValueError, match="overlong: is 'split'"): pairs(overlong='split') and TextConfig(**pairs(overlong='split'))

def test_a_long_row_of_a_list_is_too_long(tmp_path, toks):
    docs = [dict(text='a', more=['a', 'the cat sat on a mat while ten'], v=[1]), dict(text='a', more=['a'], v=[1])]
    cfg = dict(input=dict(sources=LISTED), preprocessing=dict(min_chars=0, max_packed_len=6, packing_strategy="bfd"), overlong='drop')
    res = job(write(tmp_path/'d.jsonl', docs), tmp_path/'out', toks, cfg)
    assert res.store().n_records==1 and [s['records'] for s in res.shards]==[1]

def parts(out, tok):
    "Texts of the validation part"
    s = TokenStore(out, 'validation')
    return {tok.full.decode(r.tolist()).strip() for r in s.rows('sequence', np.arange(s.n_records)).to_rows()}

def test_validation_follows_content_alone(tmp_path, toks):
    path,tok = write(tmp_path/'d.jsonl', [dict(text=f'document {i}', id=i) for i in range(80)]),TextTokenizer(toks/'plain')
    for i,(name,more) in enumerate([('plain',{}), ('plain',dict(append_eos=True)), ('adds_bos_eos',{}), ('plain',dict(mask_dtype='float32', dedupe=True)), ('plain',dict(preprocessing=dict(min_chars=0, packing_strategy='bfd')))]):
        try: TextPipeline({**TEXTS, 'validation':.3, **more}, path, tmp_path/str(i), toks/name, progress=False).run()
        except ValueError as e:
            assert 'eos_token' in str(e)    # that tokenizer names none
            continue
        found = parts(tmp_path/str(i), tok)
        if not i: want = found
        assert found==want and 10<len(found)<40
    chats = write(tmp_path/'c.jsonl', [dict(messages=[dict(role='user', content=f'question {i}'), dict(role='assistant', content=f'reply {i}')]) for i in range(60)])
    found = []
    for i,more in enumerate([{}, dict(train_span='turn'), dict(output=dict(dtype=dict(loss_mask='float32')))]):
        job(chats, tmp_path/f'c{i}', toks, {**CHAT, 'validation':.2, **more})
        found.append(parts(tmp_path/f'c{i}', tok))
    assert found[0]==found[1]==found[2] and found[0]

def test_records_that_begin_alike_are_not_duplicates(tmp_path, toks):
    docs = [dict(text='the cat sat on a mat'), dict(text='the cat sat on a rain', id=2), dict(id=3, text='the cat sat on a mat')]
    res = job(write(tmp_path/'d.jsonl', docs), tmp_path/'out', toks, {**beside(max_seq_len=5), 'dedupe':True})
    (e,) = res.ledger.to_dict().values()
    assert e['kept']==2 and e['dropped']=={'duplicate':1}

def test_nulls_of_a_table_are_no_content(tmp_path, toks):
    "A table gives every message all keys; null is as missing, but for lenient types, and in lists it is not"
    import pyarrow as pa, pyarrow.parquet as pq
    chats = [dict(messages=[dict(role='user', content=f'question {i}'), dict(role='assistant', content='reply')]) for i in range(6)]
    filled = [dict(messages=[dict(m, name=None, tool_calls=None) for m in o['messages']], source=None) for o in chats]
    pq.write_table(pa.Table.from_pylist([*filled, dict(messages=[dict(role='user', content='question 0', name='me'), dict(role='assistant', content='reply')])]), tmp_path/'b.parquet')
    path = [write(tmp_path/'a.jsonl', chats), tmp_path/'b.parquet']
    res = job(path, tmp_path/'out', toks, {**CHAT, 'dedupe':True})
    assert sum(e['kept'] for e in res.ledger.to_dict().values())==7 and res.ledger.to_dict()['b.parquet']['dropped']=={'duplicate':6}
    res = job(write(tmp_path/'c.jsonl', chats+filled), tmp_path/'lenient', toks, {**CHAT, 'dedupe':True, 'types':'lenient'})
    assert res.ledger.to_dict()['c.jsonl']['kept']==12

def test_what_is_not_the_runs_own_stays(tmp_path, toks):
    "Runs in folders further inside, whatever these are named, and inputs are left alone; another job's output is not replaced"
    from fastseqprep.store import Manifest, write_manifest
    path = write(tmp_path/'d.jsonl', [dict(text=f'the sea is {i}', site='wiki') for i in range(30)])
    cfg = {**beside(), 'output':dict(domain_key='site')}
    for o,more in ('old',{}), ('train',dict(validation=.3)), ('parts',dict(validation=.3)): job(path, tmp_path/o, toks, {**cfg, **more})
    before = files(tmp_path)
    def kept(): return {k:v for k,v in files(tmp_path).items() if k in before}==before
    res = job(tmp_path, tmp_path, toks, cfg) # shards of others are no inputs, nor in the way
    assert kept() and [o.name for o in res.manifest.inputs]==['d.jsonl']
    with pytest.raises(StoreError, match='train holds the output of another run, where the part train would be written'): job(path, tmp_path, toks, {**cfg, 'validation':.3}, overwrite=True)
    res = job(tmp_path, tmp_path, toks, beside(max_seq_len=3), overwrite=True)
    assert kept() and {o.name.rpartition('/')[0] for o in res.manifest.outputs}=={'__default__/shard_0000'} and not list((tmp_path/'wiki').rglob('*.*'))
    (tmp_path/'table').mkdir()
    write_manifest(tmp_path/'table', Manifest(job='events', config={}, inputs=[]))
    with pytest.raises(StoreError, match='output of the events job, which the text job does not replace'): job(path, tmp_path/'table', toks, cfg, overwrite=True)
    for o in tmp_path/'old/wiki/shard_0000/sequence.bin', tmp_path/'old/manifest.json':
        with pytest.raises(ValueError, match='would be replaced'): job([path, o], tmp_path/'old', toks, cfg, overwrite=True)
        assert o.exists()
    assert kept()

def test_bins_of_a_store_are_the_plan(tmp_path, toks):
    "They can be drawn and checked as before they were written"
    from fastseqprep.pack import pack
    path = write(tmp_path/'d.jsonl', [dict(text=' '.join(['sea']*n)) for n in (3,9,30,2,14,1)])
    for strategy in 'bfd','bfd_split','wrapped':
        res = job(path, tmp_path/strategy, toks, {**beside(packing_strategy=strategy, max_packed_len=12)})
        whole = job(path, tmp_path/f'{strategy}-whole', toks, beside()).store().lengths()
        plan,found = pack(whole, 12, strategy),res.store().packing()
        assert found.pieces==plan.pieces and (found.max_len, found.strategy)==(12, strategy)
        assert TokenStore(tmp_path/strategy/'__default__').packing(12).pieces==plan.pieces
        if strategy!='bfd': found.check(whole)
    assert len(found.draw().patches)==len(plan.pieces.values)+len(plan)
    with pytest.raises(StoreError, match='no bins'): TokenStore(tmp_path/'bfd-whole').packing()

def test_pieces_name_their_record_in_any_shard(tmp_path, toks):
    "Domains, of which some records are split, and some shards have only whole ones"
    from fastseqprep.text_export import export_parquet
    import polars as pl
    docs = [dict(text=f'{i} '+' '.join(WORDS[:n]), site=d) for i,(n,d) in enumerate(zip([1,9,1,1,7,1,2,12], 'ABABAACA'))]
    cfg = {**beside(max_seq_len=6), 'overlong':'split', 'output':dict(domain_key='site', max_tokens_per_shard=8)}
    res,tok = job(write(tmp_path/'d.jsonl', docs), tmp_path/'out', toks, cfg),TextTokenizer(toks/'plain')
    s = res.store()
    def right(pieces, rows): return all(tok.encode([docs[n]['text']])[0].tolist()[a:a+len(r)]==list(r) for (n,a),r in zip(pieces, rows))
    assert len(res.shards)>3 and right(s.pieces().tolist(), s.rows('sequence', np.arange(s.n_records)).to_rows()) and set(s.pieces()[:,0].tolist())==set(range(8))
    export_parquet(tmp_path/'out', tmp_path/'x.parquet')
    df = pl.read_parquet(tmp_path/'x.parquet')
    assert right(df.select('record','first_token').rows(), df['sequence'].to_list())

def test_answers_and_rewards_agree(tmp_path, toks):
    from fastseqprep.text_data import TextDataset
    path = write(tmp_path/'d.jsonl', [dict(prompt='a', responses=['cat','mat'], rewards=[1,0]), dict(prompt='a', responses=['cat','mat'], rewards=[1])])
    cfg = dict(input=dict(sources=dict(prompts=dict(sections=[dict(field='prompt', action='mask')]), responses=dict(sections=[dict(field='responses', action='train')], list_field=True, mask_key='masks'), rewards=dict(sections=[dict(field='rewards', action='value')]))))
    with pytest.raises(ValueError, match='d.jsonl:2: .*2 responses and 1 reward'): job(path, tmp_path/'out', toks, cfg)
    res = job(path, tmp_path/'out', toks, {**cfg, 'on_error':'skip'})
    (e,) = res.ledger.to_dict().values()
    assert e['dropped']=={'wrong type':1} and len(TextDataset(res.store(), 'grpo'))==1

def test_long_domains_in_two_cases(tmp_path, toks):
    names = ['A'*150, 'a'*150, 'Ä'*90, 'ä'*90]
    s = job(write(tmp_path/'d.jsonl', [dict(text=o[:3], site=o) for o in names]), tmp_path/'out', toks, {**TEXTS, 'output':dict(domain_key='site')}).store()
    assert s.domains==names and len({o.lower() for o in os.listdir(tmp_path/'out')})==5

@pytest.mark.parametrize('scope', ['shard','all'])
def test_all_too_long(tmp_path, toks, scope):
    path = write(tmp_path/'d.jsonl', [dict(text='the cat sat on a mat')]*3)
    with pytest.raises(ValueError, match='no record is left of 3: 3 too many tokens .*d.jsonl:1'): job(path, tmp_path/'out', toks, {**beside(max_packed_len=3), 'overlong':'drop', 'pack_scope':scope})
    assert not (tmp_path/'out').exists()

@pytest.mark.parametrize('scope', ['shard','all'])
@pytest.mark.parametrize('overlong', ['drop','split','truncate'])
def test_records_are_counted_once(tmp_path, toks, scope, overlong):
    "Whatever was dropped, and in how many shards a record lies"
    cfg = {**beside(max_packed_len=8, packing_strategy='bfd', max_seq_len=64), 'overlong':overlong, 'pack_scope':scope, 'output':dict(max_tokens_per_shard=10)}
    res = job(write(tmp_path/'d.jsonl', [dict(text=' '.join(WORDS[:n])) for n in (1,13,2,13,1,5)]), tmp_path/'out', toks, cfg)
    (e,) = res.ledger.to_dict().values()
    s = res.store()
    assert sum(o['records'] for o in res.shards)==e['kept']==len(np.unique(s.pieces()[:,0])) and (e['kept']<6)==(overlong=='drop')
    assert sum(o.rows for o in res.manifest.outputs if o.name.endswith('/sequence.bin'))==e['kept']
    assert all(o['rows']>0 for o in res.shards)

def test_most_items_are_filled_up(tmp_path, toks, small_splits):
    docs = documents(300, 6)
    s = job(write(tmp_path/'d.jsonl', docs), tmp_path/'out', toks, {**beside(max_items=37, max_packed_len=20), 'overlong':'drop'}).store()
    tok = TextTokenizer(toks/'plain')
    assert [one_text(s, tok, i) for i in range(s.n_records)]==[d['text'] for d in docs if len(tok.encode([d['text']]).values)<=20][:37]

BUILDER = '''
import numpy as np
from fastseqprep.sections import SingleBuilder, builders
class Upper(SingleBuilder):
    def build(self, records): return super().build([{**o, 'text':o['text'].upper()} for o in records])
'''
def test_own_builder_in_worker_processes(tmp_path, toks, small_splits, monkeypatch):
    "Workers import its class, though nothing registers it there"
    from fastseqprep.sections import Builder, builders
    (tmp_path/'own_builder.py').write_text(BUILDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_builder
    path,tok = write(tmp_path/'d.jsonl', documents(60)),TextTokenizer(toks/'plain')
    monkeypatch.setitem(builders, 'upper', own_builder.Upper)
    for n in (0,2):
        s = job(path, tmp_path/f'out{n}', toks, {**TEXTS, 'builder':'upper'}, n_workers=n).store()
        assert one_text(s, tok, 3)==documents(60)[3]['text'].upper()
    assert data_files(tmp_path/'out0')==data_files(tmp_path/'out2')
    class Local(Builder): pass
    monkeypatch.setitem(builders, 'local', Local)
    with pytest.raises(ValueError, match="builder 'local' is the class .*Local.*put it at the top level of a module"): TextPipeline({**TEXTS, 'builder':'local'}, path, tmp_path/'x', toks/'plain', n_workers=2)

def test_output_folder_is_a_file(tmp_path, toks):
    path = write(tmp_path/'d.jsonl', documents(2))
    with pytest.raises(FileExistsError, match='d.jsonl is a file, expected a folder'): job(path, path, toks, TEXTS)

def test_half_a_character_as_validation_key(tmp_path, toks):
    path = tmp_path/'d.jsonl'
    path.write_text('{"text":"aa","k":"\\ud800"}\n{"text":"aab","k":"x"}\n')
    res = job(path, tmp_path/'out', toks, {**TEXTS, 'validation':.3, 'validation_key':'k', 'on_error':'skip'})
    (e,) = res.ledger.to_dict().values()
    assert e['kept']==1 and sum(e['dropped'].values())==1

def test_a_program_may_end_at_once(tmp_path, toks):
    "Nothing that a run has left in threads aborts the program, be it finished before or refused"
    path = write(tmp_path/'d.jsonl', [dict(text=f'the sea is {i}') for i in range(20)])
    job(path, tmp_path/'out', toks, beside())
    def again(cfg):
        code = f"from fastseqprep.text_pipeline import TextPipeline; print(TextPipeline({cfg!r}, {str(path)!r}, {str(tmp_path/'out')!r}, {str(toks/'plain')!r}, progress=False).run())"
        return subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    for _ in range(4):
        found,refused = again(beside()),again(beside(max_seq_len=3))
        assert found.returncode==0 and 'finished before' in found.stdout, found.stderr
        assert refused.returncode==1 and 'another config' in refused.stderr, (refused.returncode, refused.stderr)

def test_what_a_template_writes_is_no_duplicate(tmp_path, toks):
    "Nulls inside of calls and tools are written by templates, and builders of a user's own may tell a null from nothing"
    call = lambda **more: dict(messages=[dict(role='user', content='Where?'), dict(role='assistant', content='Here', tool_calls=[dict(function=dict(name='find', arguments=dict(city='Rome', **more)))])])
    tool = lambda **more: dict(messages=[dict(role='user', content='Where?'), dict(role='assistant', content='Here')], tools=[dict(name='find', **more)])
    for records in [call(), call(unit=None)],[tool(), tool(default=None)]:
        res = job(write(tmp_path/'a.jsonl', [*records, records[0]]), tmp_path/'out', toks, {**CHAT, 'dedupe':True}, overwrite=True)
        assert res.ledger.to_dict()['a.jsonl']['kept']==2

def test_mending_takes_nothing_away(tmp_path, toks):
    "A damaged run that is done again leaves shards of others where they are"
    path = write(tmp_path/'d.jsonl', [dict(text=f'the sea is {i}') for i in range(30)])
    res = job(path, tmp_path/'out', toks, beside())
    want,other = files(tmp_path/'out'),tmp_path/'out/astrai/shard_0000'
    other.mkdir(parents=True)
    for o in 'sequence.bin','meta.json': (other/o).write_bytes(b'{}')
    own = tmp_path/'out'/next(o.name for o in res.manifest.outputs if o.name.endswith('.bin'))
    own.write_bytes(own.read_bytes()[:-1])
    job(path, tmp_path/'out', toks, beside())
    assert {k:v for k,v in files(tmp_path/'out').items() if 'astrai' not in k}==want and len(list(other.iterdir()))==2

def test_half_a_run_is_not_opened(tmp_path, toks, monkeypatch):
    "Shards that are in place before the manifest is are not read as if they were all"
    from fastseqprep.resume import Run
    import fastseqprep.resume as resume
    path = write(tmp_path/'d.jsonl', [dict(text=f'the sea is {i}', site=f's{i%4}') for i in range(30)])
    seen = []
    def move(*args):
        if len(seen)>4: raise KeyboardInterrupt
        seen.append(real(*args))
    real = resume.move_file
    monkeypatch.setattr(resume, 'move_file', move)
    with pytest.raises(KeyboardInterrupt): job(path, tmp_path/'out', toks, {**beside(), 'output':dict(domain_key='site')})
    assert list((tmp_path/'out').rglob('s*/shard_*/*'))
    with pytest.raises(StoreError, match='a run that was not finished: run the job again'): TokenStore(tmp_path/'out')
    monkeypatch.setattr(resume, 'move_file', real)
    assert job(path, tmp_path/'out', toks, {**beside(), 'output':dict(domain_key='site')}).store().n_records==30

def test_why_nothing_is_left(tmp_path, toks):
    path = write(tmp_path/'d.jsonl', [dict(messages=[], id=i) for i in range(5)])
    with pytest.raises(ValueError, match=r"5 empty \(first in .*d.jsonl:1: it has no 'text', but 'messages', 'id'; see input.sections"): job(path, tmp_path/'out', toks, beside())
    path = write(tmp_path/'s.jsonl', [dict(text='sea')]*3)
    with pytest.raises(ValueError, match=r"3 too short \(first in .*s.jsonl:1: min_chars is 50\)"): job(path, tmp_path/'out', toks, dict(input=dict(sections=[dict(field='text', action='train')])))

def test_the_generation_tag_is_known(tmp_path, toks):
    "The recorded chats whose template has the tag: AstrAI drops them all; right is that what the tag encloses is trained"
    case = next(o for k,o in RECORDED.items() if k.startswith('11'))
    (tmp_path/'input.jsonl').write_text(case['inputs']['input.jsonl'], encoding='utf-8')
    TextPipeline(case['config'], tmp_path/'input.jsonl', tmp_path/'out', toks/case['tokenizer'], progress=False).run()
    s,tok = TokenStore(tmp_path/'out'),TextTokenizer(toks/case['tokenizer'])
    whole = ['<|im_start|>system\nYou are a patient helper.<|im_end|>\n<|im_start|>user\nTwo plus two is what?<|im_end|>\n<|im_start|>assistant\nTwo plus two is four.<|im_end|>\n',
             '<|im_start|>user\nSay hello to everyone.<|im_end|>\n<|im_start|>assistant\nHello to everyone.<|im_end|>\n<|im_start|>user\nAnd in French?<|im_end|>\n<|im_start|>assistant\nBonjour, mon ami.<|im_end|>\n',
             '<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n']
    trained = ['Two plus two is four.<|im_end|>', 'Hello to everyone.<|im_end|>Bonjour, mon ami.<|im_end|>', 'Paris.<|im_end|>']
    rows,masks = (s.rows(k, np.arange(3)).to_rows() for k in ('sequence','loss_mask'))
    decoded = lambda ids: tok.full.decode(list(map(int, ids)), skip_special_tokens=False)
    assert [decoded(o) for o in rows]==whole and [decoded(np.array(o)[np.array(m, bool)]) for o,m in zip(rows, masks)]==trained

def test_a_manifest_does_not_tell_where_inputs_lie(tmp_path, toks):
    "Moved elsewhere, the same inputs and configuration give the same bytes, manifest included"
    found = []
    for o in 'a','b/c':
        (tmp_path/o/'in').mkdir(parents=True)
        for n in 'x.jsonl','y.jsonl': write(tmp_path/o/'in'/n, [dict(text=f'the sea {i}') for i in range(3)]+[dict(text=''), dict(text=7, n=n)])
        (tmp_path/o/'in/y.jsonl').open('a').write('{"text"\n')
        res = job(tmp_path/o/'in', tmp_path/o/'out', toks, {**beside(max_seq_len=3, max_packed_len=2), 'on_error':'skip'})
        found.append(files(tmp_path/o/'out'))
    assert found[0]==found[1] and str(tmp_path).encode() not in b''.join(found[0].values())
    assert [*res.ledger.to_dict()]==['x.jsonl','y.jsonl'] and res.facts['dropped_first']=={'empty':['x.jsonl:4',''], 'not JSON':['y.jsonl:6', res.facts['dropped_first']['not JSON'][1]]}

def test_progress_tells_tokens_by_the_second(tmp_path, toks, small_splits, monkeypatch):
    "The bar of the encoding counts the tokens of all splits"
    import fastseqprep.runner as runner
    seen = []
    class Bar(runner._Progress):
        def __init__(self, total, desc, show):
            super().__init__(total, desc, False)
            self.bar = type('Shown', (), dict(total=-1, comment=desc, update=lambda self, done: seen.append((self.comment, done))))()
        def __call__(self, *args):
            super().__call__(*args)
            if self.desc=='encode': Bar.amount = self.amount
    monkeypatch.setattr(runner, '_Progress', Bar)
    path = write(tmp_path/'d.jsonl', [dict(text=f'the sea is {i}') for i in range(200)])
    res = job(path, tmp_path/'out', toks, beside())
    assert Bar.amount==res.tokens and len([o for o in seen if o[0].startswith('encode: ') and o[0].endswith(' tokens/s')])>2

@functools.cache
def around_both(root):
    "A tokenizer that puts one token before a text and two behind it, and ends a conversation with what no one says"
    from tokenizers.processors import TemplateProcessing
    tok = TextTokenizer(root/'adds_bos_eos')
    (root/'two_ends').mkdir(exist_ok=True)
    t = Tokenizer.from_file(str(root/'adds_bos_eos/tokenizer.json'))
    t.post_processor = TemplateProcessing(single='<|bos|> $A <|eos|> <|bos|>', special_tokens=[(o, t.token_to_id(o)) for o in ('<|bos|>','<|eos|>')])
    t.save(str(root/'two_ends/tokenizer.json'))
    (root/'two_ends/tokenizer_config.json').write_text((root/'adds_bos_eos/tokenizer_config.json').read_text())
    return tok,TextTokenizer(root/'two_ends')

PAIRS = [dict(prompt='hi there', chosen='yes and more words', rejected='no'), dict(prompt='Hello', chosen='The sea', rejected='is wide and the birds sang'), dict(chosen='a', rejected='b'),
         dict(prompt='a', chosen='b', rejected='c'), dict(prompt='the cat sat on a mat while ten small birds sang', chosen='no', rejected='yes')]

def pair_oracle(whole, i, most, overlong, side, untrained):
    "What is to become of a pair, row by row: its rows, or why there are none"
    rows = {k:(whole[k].values[i].tolist(), whole[k].mask[i].tolist()) for k in whole}
    if overlong!='truncate':
        for k,(ids,_) in rows.items():
            if len(ids)>most: return 'too many tokens' if overlong=='drop' else ('too many tokens', f'{k} has {len(ids)} tokens, more than max_seq_len={most}')
    rows = {k:tuple(o[-most:] if side=='keep_end' else o[:most] for o in both) for k,both in rows.items()}
    if untrained=='drop' and not all(any(m) for _,m in rows.values()): return 'no trained token'
    return rows

@pytest.mark.parametrize('compat', [None,'astrai'])
@pytest.mark.parametrize('which', [0,1])
def test_what_is_put_around_pairs_is_cut_as_the_rest(toks, which, compat):
    "Whichever end stays, rows are the first or the last tokens of the whole, which begins and ends as the tokenizer has it"
    tok = around_both(toks)[which]
    def built(**keys): return make_builder(TextConfig.for_shape('dpo', builder='preference', compat=compat, bos='first', on_error='skip', **keys), tok).build(PAIRS)
    bare = make_builder(TextConfig.for_shape('dpo', builder='preference', compat=compat, bos='template', untrained='keep', on_error='skip'), tok).build(PAIRS)
    whole,rows = built(untrained='keep').outputs,bare.rows.tolist()
    ends = [2] if not which else [2,1]
    for k,o in whole.items():
        for i in range(len(o)):
            ids,mask = (v[i].tolist() for v in (bare.outputs[k].values, bare.outputs[k].mask))
            assert (o.values[i].tolist(), o.mask[i].tolist())==([1,*ids,*ends], [0,*mask,*mask[-1:]*len(ends)])
    longest = max(int(o.lengths.max()) for o in whole.values())
    choices = [*product(range(1, longest+2), ('truncate','drop','error'), ('keep_start','keep_end'), (False,True), ('keep','drop'))]
    for most,overlong,side,by,untrained in random.Random(0).sample(choices, 150): # all hold, and take half a minute
        keys = dict(seq_truncation=side) if by or compat else {}
        got = built(overlong=overlong, untrained=untrained, preprocessing=dict(max_seq_len=most, truncation_mode=side if not by else 'keep_start'), **keys)
        want = [pair_oracle(whole, i, most, overlong, side, untrained) for i in range(len(rows))]
        assert got.rows.tolist()==[r for r,w in zip(rows, want) if isinstance(w, dict)]
        assert got.dropped==[(r,w) for r,w in zip(rows, want) if isinstance(w, str)]
        assert got.failed==sorted([*bare.failed, *((r, *w) for r,w in zip(rows, want) if isinstance(w, tuple))])
        kept = [(i,w) for i,w in enumerate(want) if isinstance(w, dict)]
        for k,o in got.outputs.items():
            assert [(a.tolist(), b.tolist()) for a,b in zip(o.values.to_rows(), o.mask.to_rows())]==[w[k] for _,w in kept]
            assert o.n_cut==sum(len(whole[k].values[i])-len(w[k][0]) for i,w in kept) and o.lengths.tolist()==[len(whole[k].values[i]) for i,_ in kept]

@pytest.mark.parametrize('side', ['keep_start','keep_end'])
def test_messages_of_cut_pairs_keep_their_place(toks, side):
    "Where messages begin moves with what is put first, and with what is cut"
    tok = around_both(toks)[0]
    def turns(most=2048, bos='first'):
        res = make_builder(TextConfig.for_shape('dpo', builder='preference', bos=bos, untrained='keep', preprocessing=dict(max_seq_len=most, truncation_mode=side)), tok, turns=True).build(PAIRS[:2])
        return {k:[(len(v),t.tolist()) for v,t in zip(o.values.to_rows(), o.turns.to_rows())] for k,o in res.outputs.items()}
    for k,whole in turns().items():
        assert [t for _,t in whole]==[[p+1 for p in t] for _,t in turns(bos='template')[k]]
        for most in range(1, 30):
            for (n,t),(kept,got) in zip(whole, turns(most)[k]):
                assert kept==min(n, most) and got==[min(max(p-(n-kept if side=='keep_end' else 0), 0), kept) for p in t]

@pytest.mark.parametrize('side', ['keep_start','keep_end'])
@pytest.mark.parametrize('shape', ['chat','pretrain','instruction','grpo','dpo'])
def test_other_rows_are_cut_as_a_whole(toks, shape, side):
    "Beginnings and ends that other builders put around texts and conversations are there before a row is cut"
    tok = around_both(toks)[0]
    talk = [dict(role='user', content='hi there'), dict(role='assistant', content='yes and more words')]
    record = dict(chat=dict(messages=talk), pretrain=dict(text='the cat sat on a mat'), instruction=dict(prompt='hi there', response='yes and more'), dpo=dict(chosen=talk, rejected=talk),
                  grpo=dict(prompt=talk[:1], responses=['yes and more','no'], rewards=[1.,0.]))[shape]
    def rows(most=2048):
        out = make_builder(TextConfig.for_shape(shape, bos='first', append_eos=True, untrained='keep', preprocessing=dict(min_chars=0, max_seq_len=most, truncation_mode=side)), tok).build([record]).outputs
        return {k:[(v.tolist(), None if o.mask is None else m.tolist()) for v,m in zip(o.values.to_rows(), (o.mask if o.mask is not None else o.values).to_rows())] for k,o in out.items() if k!='rewards'}
    for most in range(1, 30):
        assert rows(most)=={k:[tuple(None if o is None else o[:most] if side=='keep_start' else o[-most:] for o in row) for row in v] for k,v in rows().items()}

def test_cut_pairs_end_to_end(tmp_path, toks):
    "The last tokens of both conversations are written, and those that were cut are counted"
    tok,path = around_both(toks)[0],write(tmp_path/'d.jsonl', PAIRS[:1])
    def run(name, **keys): return TextPipeline(TextConfig.for_shape('dpo', builder='preference', bos='first', preprocessing=keys), path, tmp_path/name, toks/'adds_bos_eos', progress=False).run()
    run('whole')
    whole = tree(tmp_path/'whole')['__default__/shard_0000']
    n = len(whole['chosen'])-1
    res = run('cut', max_seq_len=n, truncation_mode='keep_end')
    got = tree(tmp_path/'cut')['__default__/shard_0000']
    for k in 'chosen','rejected','chosen_mask','rejected_mask': assert got[k].tolist()==whole[k][-n:].tolist()
    assert got['chosen'][-1]==2 and f'1 of {n+1} tokens of chosen were cut off by max_seq_len' in str(res)

def test_order_that_a_template_writes_is_no_duplicate(tmp_path, toks):
    "Keys of records and messages have no order; those of tools, of arguments and of parts of a content have one"
    def turned(o): return dict(reversed(o.items()))
    ab,user = dict(city='Rome', unit='C'),dict(role='user', content='Where?')
    def call(args): return dict(role='assistant', content='Here', tool_calls=[dict(type='function', function=dict(name='find', arguments=args))])
    base = dict(messages=[user, call(ab)], tools=[dict(name='find', parameters=ab)])
    others = [{**base, 'messages':[user, call(turned(ab))]}, {**base, 'tools':[dict(name='find', parameters=turned(ab))]}, {**base, 'tools':[turned(base['tools'][0])]},
              {**base, 'messages':[user, {**call(ab), 'tool_calls':[turned(call(ab)['tool_calls'][0])]}]}]
    equal = [turned(base), {**base, 'messages':[turned(m) for m in base['messages']]}, {**base, 'messages':[{**user, 'name':None}, turned(call(ab))], 'x':None}]
    res = job(write(tmp_path/'a.jsonl', [base, *equal, *others, *map(turned, others)]), tmp_path/'a', toks, {**CHAT, 'dedupe':True})
    assert res.ledger.to_dict()['a.jsonl']['kept']==1+len(others)
    parts = [dict(role='user', content=[dict(type='text', text='a')]), dict(role='user', content=[dict(text='a', type='text')])]
    for lenient,n in (False,2),(True,3): # a null inside of a message is told from nothing where types are lenient
        texts = source_texts([dict(messages=[m]) for m in [*parts, *map(turned, parts), {**parts[0], 'name':None}]], ['messages'], lenient, ['messages'])
        assert len(set(texts))==n
    pair = dict(prompt=[user], chosen=[call(ab)], rejected='no')
    fields,chats = (f(TextConfig.for_shape('dpo', builder='preference')) for f in (fields_read, fields_of_chats))
    assert len(set(source_texts([pair, turned(pair), {**pair, 'prompt':[turned(user)]}, {**pair, 'chosen':[turned(call(ab))]}, {**pair, 'chosen':[call(turned(ab))]}], fields, chats=chats)))==2

def test_order_in_tokens_and_in_duplicates_agree(tmp_path, toks):
    "Two records of which a template makes different texts are both kept"
    (tmp_path/'tok').mkdir()
    (tmp_path/'tok/tokenizer.json').write_text((toks/'plain/tokenizer.json').read_text())
    c = json.loads((toks/'plain/tokenizer_config.json').read_text())
    (tmp_path/'tok/tokenizer_config.json').write_text(json.dumps(dict(c, chat_template="{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>'+m.role+'\\n'+m.content }}{% for t in m.tool_calls or [] %}{{ t.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}")))
    ab = [dict(a=1, b=2), dict(b=2, a=1)]
    records = [dict(messages=[dict(role='user', content='x'), dict(role='assistant', content='y', tool_calls=[dict(function=dict(name='f', arguments=x))])], tools=[y]) for x in ab for y in ab]
    path = write(tmp_path/'a.jsonl', records+records)
    TextPipeline({**CHAT, 'dedupe':True}, path, tmp_path/'out', tmp_path/'tok', progress=False).run()
    TextPipeline(CHAT, path, tmp_path/'all', tmp_path/'tok', progress=False).run()
    every,kept = ([tuple(o.tolist()) for o in s.rows('sequence', np.arange(s.n_records)).to_rows()] for s in (TokenStore(tmp_path/'all'), TokenStore(tmp_path/'out')))
    assert len(every)==8 and sorted(kept)==sorted(set(every)) and len(kept)==4


DOCS = dict(input=dict(sections=[dict(field='text', action='train')]), preprocessing=dict(min_chars=0))
def test_a_shard_of_somebody_else_is_left_alone(tmp_path, toks):
    "Without a manifest, or with a damaged one, only files that the `meta.json` of a shard tells of are taken for our own"
    path = write(tmp_path/'a.jsonl', [dict(text=f'text {i}') for i in range(20)])
    for damaged in (False, True):
        out = tmp_path/f'out{damaged}'
        if damaged:
            job(path, out, toks, DOCS)
            (out/'manifest.json').write_text('{')
        theirs = [out/'ckpt'/'shard_0001'/'pytorch_model.bin', out/'b'/'shard_0099'/'sequence.bin', out/'c'/'shard_0000'/'meta.json']
        for o in theirs:
            o.parent.mkdir(parents=True)
            o.write_text('{"theirs": 1}')
        res = job(path, out, toks, {**DOCS, 'preprocessing': dict(min_chars=0, max_seq_len=2)}, overwrite=True)
        assert [o.read_text() for o in theirs] == ['{"theirs": 1}']*3
        assert res.manifest.ledger['a.jsonl']['kept'] == 20


def test_inputs_in_the_folder_of_an_unfinished_run_are_kept(tmp_path, toks):
    path = write((tmp_path/'out'/'.run').mkdir(parents=True) or tmp_path/'out'/'.run'/'a.jsonl', [dict(text='a')])
    with pytest.raises(ValueError, match='a.jsonl lies where'): job(path, tmp_path/'out', toks, DOCS)
    assert Path(path).exists()


def test_spellings_of_one_file_are_told_apart(tmp_path, toks):
    "`..` behind a link is for the system to say; each spelling is an input of its own"
    (tmp_path/'b'/'c').mkdir(parents=True)
    (tmp_path/'a').mkdir()
    (tmp_path/'a'/'link').symlink_to('../b/c')
    for d, n in (('a', 5), ('b', 3)): write(tmp_path/d/'t.jsonl', [dict(text=f'text {i}') for i in range(n)])
    inputs = [f'{tmp_path}/a/link/../t.jsonl', f'{tmp_path}/a/t.jsonl', f'{tmp_path}/a/../a/t.jsonl']
    res = job(inputs, tmp_path/'out', toks, DOCS)
    assert sorted(e['read'] for e in res.manifest.ledger.values()) == [3, 5, 5] and len(set(res.manifest.config['order'])) == 3
    with pytest.raises(StoreError, match='another config'): job(inputs[::-1], tmp_path/'out', toks, DOCS)


def test_output_elsewhere_leaves_nothing_here(tmp_path, toks, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path/'a.jsonl', [dict(text=f'text {i}') for i in range(20)])
    job(path, 'memory://text-elsewhere', toks, DOCS)
    assert sorted(o.name for o in tmp_path.iterdir()) == ['a.jsonl']
