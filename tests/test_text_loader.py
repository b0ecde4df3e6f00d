"Batches of text: each sample once over ranks and workers, the same order whatever their number, on from any step, and mixtures by weight."
import json, sys
import numpy as np, pytest, torch
from hypothesis import given, settings, strategies as st
from text_cases import tokenizers, write_tree
from fastseqprep.plan import OversizeError
from fastseqprep.ragged import lengths_to_offsets
from fastseqprep.text_config import TextConfig
from fastseqprep.text_data import TextDataset, dpo_collate, grpo_collate
from fastseqprep.text_loader import TextLoader, domain_weights, mixed_samples, stream_places, text_dl
from fastseqprep.text_pipeline import TextPipeline
from fastseqprep.token_store import ShardArray, write_token_shard

def write_text(root, domains, seed=0, shards=2, most=12):
    "Shards of records with a mask, in bins of at most 24 tokens; ids count through everything"
    rng,i = np.random.default_rng(seed),1
    for d,n in domains.items():
        for k in range(shards):
            lengths = rng.integers(0, most, n)
            o = lengths_to_offsets(lengths)
            bins,total = [0],0
            for j,m in enumerate(lengths):
                if total+m>24: bins.append(j); total = 0
                total += m
            arrays = dict(sequence=ShardArray(np.arange(i, i+o[-1]), 'int32', o), loss_mask=ShardArray(rng.random(o[-1])<.6, 'bool', o), position_ids=ShardArray(np.arange(o[-1]), 'int32', o))
            write_token_shard(lambda f: root/f'{d}/shard_{k:04d}'/f, arrays, bins+[n])
            i += o[-1]
    return root

def write_pairs(root, n=20, seed=0):
    rng,arrays = np.random.default_rng(seed),{}
    for k in 'chosen','rejected':
        o = lengths_to_offsets(rng.integers(1, 9, n))
        arrays |= {k:ShardArray(rng.integers(1, 99, o[-1]), 'uint16', o), f'{k}_mask':ShardArray(rng.random(o[-1])<.5, 'bool', o)}
    write_token_shard(lambda f: root/'d/shard_0000'/f, arrays)
    return root

def write_groups(root, n=15, seed=0):
    rng = np.random.default_rng(seed)
    p,g = lengths_to_offsets(rng.integers(1, 6, n)),lengths_to_offsets(rng.integers(1, 5, n))
    a = lengths_to_offsets(rng.integers(0, 6, g[-1]))
    write_token_shard(lambda f: root/'d/shard_0000'/f, dict(prompts=ShardArray(rng.integers(1, 99, p[-1]), 'int32', p), responses=ShardArray(rng.integers(1, 99, a[-1]), 'int32', a, g),
        masks=ShardArray(np.ones(a[-1]), 'bool', a, g), rewards=ShardArray(rng.random(g[-1]), 'float32', g)))
    return root

@pytest.fixture(scope='module')
def folder(tmp_path_factory): return write_text(tmp_path_factory.mktemp('text'), dict(code=9, web=31, wiki=20))
@pytest.fixture(scope='module')
def kinds(tmp_path_factory, folder):
    root = tmp_path_factory.mktemp('kinds')
    return dict(bin=(TextDataset.load('sft', folder), dict(max_tokens=64)), record=(TextDataset.load('sft', folder, unit='record'), dict(max_tokens=50)),
                window=(TextDataset.load('sft', folder, window_size=10, stride=7), dict(batch_size=6)), padded=(TextDataset.load('seq', folder), dict(max_tokens=64, layout='padded', n_classes=3)),
                dpo=(TextDataset.load('dpo', write_pairs(root/'p')), dict(max_tokens=60)), grpo=(TextDataset.load('grpo', write_groups(root/'g')), dict(batch_size=4)),
                mix=(TextDataset.load('sft', folder, unit='record'), dict(max_tokens=50, weights=dict(code=2, web=1, wiki=1))))
KINDS = 'bin','record','window','padded','dpo','grpo','mix'

def samples(b): return b['sample'][b['real']].tolist()
def equal(a, b):
    assert list(a)==list(b)
    for k in a: assert a[k].dtype==b[k].dtype and torch.equal(a[k], b[k]), k

@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('shuffle', [False,True])
def test_union_over_ranks_and_workers(kinds, kind, shuffle):
    "Each sample once (or as often as the mixture has it), steps equally many, whatever ranks and workers"
    ds,rule = kinds[kind]
    whole = [sorted(samples(b)) for b in TextLoader(ds, shuffle=shuffle, seed=3, **rule)]
    if kind!='mix': assert sorted(x for o in whole for x in o)==list(range(len(ds)))
    for W,n in (1,2),(2,0),(3,1):
        ranks = [[samples(b) for b in text_dl(ds, shuffle=shuffle, seed=3, num_workers=n, rank=r, world_size=W, multiprocessing_context='fork' if n else None, **rule)] for r in range(W)]
        assert {len(o) for o in ranks}=={len(whole)}
        assert [sorted(x for o in step for x in o) for step in zip(*ranks)]==whole

@pytest.mark.parametrize('kind', KINDS)
def test_per_rank_budgets(kinds, kind):
    ds,rule = kinds[kind]
    whole = [samples(b) for b in TextLoader(ds, shuffle=True, seed=3, **rule)]
    ranks = [[samples(b) for b in TextLoader(ds, shuffle=True, seed=3, rank=r, world_size=2, per_rank=True, **rule)] for r in range(2)]
    assert [x for step in zip(*ranks) for x in step][:len(whole)]==whole

@pytest.mark.parametrize('kind', KINDS)
def test_on_from_any_step(kinds, kind):
    "A state of any rank, after any step, goes on under other ranks and workers with just what is left"
    ds,rule = kinds[kind]
    make = lambda **kw: TextLoader(ds, shuffle=True, seed=5, **rule, **kw)
    whole = [sorted(samples(b)) for b in make()]
    twice = make()
    second = [[sorted(samples(b)) for b in twice] for _ in range(2)][1]
    first = make(rank=1, world_size=2)
    it = iter(first)
    for k in range(len(whole)+1):
        state = json.loads(json.dumps(first.state_dict()))
        for W in 1,3:
            ranks = [make(rank=r, world_size=W) for r in range(W)]
            for o in ranks: o.load_state_dict(state); o.pass_end()
            got = [sorted(x for o in step for x in samples(o)) for step in zip(*ranks)]
            assert got==(whole[k:] if k<len(whole) else second)
        if k<len(whole): next(it)

@pytest.mark.parametrize('kind', KINDS)
def test_on_with_workers(kinds, kind):
    ds,rule = kinds[kind]
    made = [list(text_dl(ds, shuffle=True, seed=5, **rule))]
    for n,k in (1,1),(2,3),(1,2):
        dl = text_dl(ds, shuffle=True, seed=5, num_workers=n, multiprocessing_context='fork', **rule)
        it = iter(dl)
        for _ in range(k): next(it)
        state = dl.state_dict()
        del it
        on = text_dl(ds, shuffle=True, seed=5, num_workers=3-n, multiprocessing_context='fork', **rule)
        on.load_state_dict(state)
        assert len(on)==len(made[0])
        got = list(on)
        assert len(got)==len(made[0])-k
        for a,b in zip(got, made[0][k:]): equal(a, b)

def test_spawned_workers(folder):
    "Workers that share nothing open the shards themselves; epochs go on with persistent ones"
    kw = dict(train_type='sft', max_tokens=64, shuffle=True, unit='record', weights=dict(code=2, web=1, wiki=1))
    here = text_dl(folder, **kw)
    dl = text_dl(folder, num_workers=2, persistent_workers=True, multiprocessing_context='spawn', **kw)
    for _ in range(3):
        for a,b in zip(dl, here, strict=True): equal(a, b)

# What is in batches
def by_sample(ds, b):
    "Each sample of a flat batch of records or bins"
    at = b['bin_offsets'] if 'bin_offsets' in b else b['record_offsets']
    return {int(s):(b['input_ids'][x:y], b['target_ids'][x:y], b['loss_mask'][x:y], b['position_ids'][x:y]) for s,x,y in zip(b['sample'], at.tolist(), at[1:].tolist())}

@pytest.mark.parametrize('kind', ['bin','record'])
def test_flat_is_the_samples(kinds, kind):
    ds,rule = kinds[kind]
    for b in TextLoader(ds, shuffle=True, **rule):
        assert b['record_offsets'][0]==0 and b['record_offsets'][-1]==len(b['input_ids'])
        assert b['segment_ids'].tolist()==np.repeat(np.arange(len(b['record_offsets'])-1), np.diff(b['record_offsets'])).tolist()
        for i,fields in by_sample(ds, b).items():
            for got,k in zip(fields, ('input_ids','target_ids','loss_mask','position_ids')): assert torch.equal(got, ds[i][k])

@pytest.mark.parametrize('kind', ['bin','record'])
def test_padded_is_flat(kinds, kind):
    ds,rule = kinds[kind]
    for f,p in zip(TextLoader(ds, shuffle=True, **rule), TextLoader(ds, shuffle=True, layout='padded', **rule), strict=True):
        m = p['attention_mask']
        for k in 'input_ids','target_ids','loss_mask','position_ids': assert torch.equal(f[k], p[k][m]) and not p[k][~m].any()
        assert (p['segment_ids'][~m]==-1).all() and all(s[o].tolist()==sorted(s[o].tolist()) for s,o in zip(p['segment_ids'], m))
    wide = [b['input_ids'].shape[1] for b in TextLoader(ds, layout='padded', width=40, **rule)]
    assert set(wide)=={40}

def test_windows_are_the_samples(kinds):
    ds,rule = kinds['window']
    for b in TextLoader(ds, shuffle=True, **rule):
        for i,s in enumerate(b['sample'].tolist()):
            for k,v in ds[s].items(): assert torch.equal(b[k][i], v)

def test_ranks_get_windows_of_one_shape(kinds):
    ds,_ = kinds['window']
    a,b = (list(TextLoader(ds, batch_size=7, rank=r, world_size=2)) for r in (0,1))
    for x,y in zip(a, b, strict=True):
        assert x['input_ids'].shape==y['input_ids'].shape
        assert not y['loss_mask'][~y['real']].any()

@pytest.mark.parametrize('kind,collate', [('dpo',dpo_collate),('grpo',grpo_collate)])
def test_pairs_and_groups_are_collated(kinds, kind, collate):
    ds,rule = kinds[kind]
    for b in TextLoader(ds, shuffle=True, **rule):
        want = collate([ds[i] for i in b['sample'].tolist()])
        equal({k:b[k] for k in want}, want)
    for b in TextLoader(ds, shuffle=True, layout='flat', **rule):
        for j,i in enumerate(b['sample'].tolist()):
            if kind=='dpo':
                for k in 'chosen','rejected':
                    x,y = b[f'{k}_offsets'][j:j+2].tolist()
                    assert torch.equal(b[k][x:y], ds[i][k]) and torch.equal(b[f'{k}_mask'][x:y], ds[i][f'{k}_mask'])
            else:
                rows = range(*b['group_offsets'][j:j+2].tolist())
                assert [b['responses'][slice(*b['response_offsets'][r:r+2].tolist())].tolist() for r in rows]==[o.tolist() for o in ds[i]['responses']]
                assert b['rewards'][slice(*b['reward_offsets'][j:j+2].tolist())].tolist()==ds[i]['rewards'].tolist()

def test_packed_is_unpacked(kinds):
    "A model's summed loss over packed batches is that over the records one by one"
    torch.manual_seed(0)
    V,ds = 1500,kinds['record'][0]
    E,U = torch.randn(V, 6, dtype=torch.float64),torch.randn(6, V, dtype=torch.float64)
    def loss(ids, targets, mask, segments):
        "Each token sees the mean of those before it in its record"
        see = (segments[:,None]==segments) & torch.ones(len(ids), len(ids)).tril().bool()
        h = (see.double()/see.sum(1, keepdim=True)) @ E[ids]
        return torch.nn.functional.cross_entropy(h@U, targets, reduction='none')[mask].sum()
    alone = sum(loss(o['input_ids'], o['target_ids'], o['loss_mask'], torch.zeros_like(o['input_ids'])) for o in ds if len(o['input_ids']))
    for name in 'record','bin':
        whole = sum(loss(b['input_ids'], b['target_ids'], b['loss_mask'], b['segment_ids']) for b in TextLoader(kinds[name][0], shuffle=True, **kinds[name][1]))
        assert torch.isclose(whole, alone, rtol=1e-10)

# Mixtures
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 2**40), st.lists(st.integers(1, 70), min_size=1, max_size=6))
def test_streams_go_round(n, seed, steps):
    "Whatever it is cut into, a stream has each sample once in every pass"
    ends = np.cumsum(steps)
    got = np.concatenate([stream_places(n, b-s, b, seed, 9) for s,b in zip(steps, ends)])
    assert len(got)==ends[-1] and np.ptp(np.bincount(got, minlength=n))<=1
    for i in range(0, len(got)-n+1, n): assert sorted(got[i:i+n])==list(range(n))

@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 5), min_size=3, max_size=3).filter(lambda w: sum(w)>.1), st.integers(0, 5), st.integers(0, 3))
def test_shares_of_tokens(w, epoch, seed):
    rng = np.random.default_rng(seed)
    domains,lengths = np.repeat([0,1,2], [200,500,300]),rng.integers(1, 40, 1000)
    shares = domain_weights(dict(zip('abc', w)), ['a','b','c'])
    got = mixed_samples(domains, lengths, shares, seed, epoch)
    tokens = np.bincount(domains[got], lengths[got], minlength=3)
    assert np.abs(tokens/tokens.sum()-shares).max()<.03
    assert abs(tokens.sum()/lengths[shares[domains]>0].sum()-1)<.05
    assert np.array_equal(got, mixed_samples(domains, lengths, shares, seed, epoch))
    assert not (shares==0)[domains[got]].any()

def test_mixture_is_even_and_another_each_epoch(kinds):
    ds,rule = kinds['mix']
    dl = TextLoader(ds, **rule)
    first,second = ([x for b in dl for x in samples(b)] for _ in range(2))
    assert first!=second
    half = ds.domains[first[:len(first)//2]]
    assert np.allclose(np.bincount(half)/len(half), np.bincount(ds.domains[first])/len(first), atol=.05)

def test_weights_of_some_samples(kinds):
    ds,_ = kinds['mix']
    some = np.flatnonzero(np.arange(len(ds))%2==0)
    got = [x for b in TextLoader(ds, 50, shuffle=True, weights=dict(code=1, web=1, wiki=0), records=some) for x in samples(b)]
    assert set(got)<=set(some.tolist()) and set(ds.domains[got])=={0,1}

@pytest.mark.parametrize('shuffle', ['block','hash'])
def test_weights_in_other_orders(kinds, shuffle):
    ds,rule = kinds['mix']
    a = [x for b in TextLoader(ds, shuffle=shuffle, **{**rule, 'lookahead':0}) for x in samples(b)]
    b = [x for b in TextLoader(ds, **{**rule, 'lookahead':0}) for x in samples(b)]
    assert a!=b and sorted(a)==sorted(b)

# Raw records through the same machine
@pytest.fixture(scope='module')
def toks(tmp_path_factory): return tokenizers(tmp_path_factory.mktemp('toks'))
def test_raw_records(tmp_path, toks):
    path = tmp_path/'in.jsonl'
    path.write_text('\n'.join(json.dumps(dict(prompt=f'What is {i}?', chosen='four '*(i%5+1), rejected='No.')) for i in range(30)))
    raw = dict(train_type='dpo', tokenizer_path=toks/'plain', batch_size=4, shuffle=True)
    a = list(text_dl(path, **raw))
    for kw in dict(lazy=False), dict(num_workers=2, multiprocessing_context='spawn'):
        for x,y in zip(a, text_dl(path, **raw, **kw), strict=True): equal(x, y)
    with pytest.raises(ValueError, match='give batch_size, or load with lazy=False'): text_dl(path, 'dpo', tokenizer_path=toks/'plain')
    assert sum(len(b['sample']) for b in text_dl(path, 'dpo', 200, tokenizer_path=toks/'plain', lazy=False))==30

def test_state_and_other_data(tmp_path, toks):
    records = [json.dumps(dict(text='some words that are long enough to be kept, number '+str(i))) for i in range(40)]
    (tmp_path/'in.jsonl').write_text('\n'.join(records))
    TextPipeline(TextConfig.for_shape('pretrain'), tmp_path/'in.jsonl', tmp_path/'a', toks/'plain', progress=False).run()
    (tmp_path/'in.jsonl').write_text('\n'.join(records[:-1]+[records[-1].replace('some', 'Some')]))
    TextPipeline(TextConfig.for_shape('pretrain'), tmp_path/'in.jsonl', tmp_path/'b', toks/'plain', progress=False).run()
    dl = text_dl(tmp_path/'a', max_tokens=100, shuffle=True)
    next(iter(dl))
    state = dl.state_dict()
    assert state['manifest'] and len(json.dumps(state))<1500
    text_dl(tmp_path/'a', max_tokens=100, shuffle=True).load_state_dict(state)
    for other in dict(), dict(max_tokens=101), dict(seed=1), dict(unit='window', window_size=8):
        where = tmp_path/('b' if not other else 'a')
        with pytest.raises(ValueError, match='The state is of'): text_dl(where, **{**dict(max_tokens=100, shuffle=True), **other}).load_state_dict(state)

def test_only_listed_shards(tmp_path, toks):
    (tmp_path/'in.jsonl').write_text('\n'.join(json.dumps(dict(text='some words that are long enough to be kept, number '+str(i))) for i in range(20)))
    r = TextPipeline(TextConfig.for_shape('pretrain'), tmp_path/'in.jsonl', tmp_path/'out', toks/'plain', progress=False).run()
    write_tree(tmp_path/'out', {'__default__/shard_0001':dict(values=dict(sequence=[1,2]), meta=dict(sequence=dict(shape=[2], dtype='int32')))})
    assert sum(len(b['sample']) for b in text_dl(r, max_tokens=100))==20

def test_oversize(kinds):
    ds,_ = kinds['record']
    with pytest.raises(OversizeError, match='more than max_tokens=5'): len(TextLoader(ds, 5, oversize='refuse'))
    with pytest.raises(OversizeError, match='more than max_tokens=5'): len(TextLoader(ds, 5, oversize='refuse', weights=dict(code=1, web=1, wiki=1)))
    assert sorted(x for b in TextLoader(ds, 5) for x in samples(b))==list(range(len(ds)))

@pytest.mark.parametrize('kwargs,why', [(dict(last='no'),"last is 'no'"), (dict(layout='square'),"layout is 'square'"), (dict(width=9),'width is for padded'), (dict(oversize='cut'),"oversize is 'cut'"), (dict(max_tokens=0),'max_tokens'),
                                        (dict(weights=dict(cod=1)),"did you mean 'code'"), (dict(weights=dict(code=0, web=0, wiki=0)),'all are 0'), (dict(weights=dict(code=-1, web=1, wiki=1)),'weight of code is -1'), (dict(rank=1),'rank and world_size')])
def test_wrong_arguments(kinds, kwargs, why):
    with pytest.raises(ValueError, match=why): TextLoader(kinds['record'][0], **kwargs)

def test_no_loop_over_rows(tmp_path):
    "A hundred thousand short records in random order, and their batches"
    n,rng = 200_000,np.random.default_rng(0)
    o = lengths_to_offsets(rng.integers(1, 20, n))
    write_token_shard(lambda f: tmp_path/'d/shard_0000'/f, dict(sequence=ShardArray(np.arange(o[-1])%60_000, 'uint16', o)))
    ds = TextDataset.load('seq', tmp_path)
    idx = rng.permutation(n)[:100_000]
    calls = []
    def count(frame, event, arg):
        if event=='call': calls.append(frame.f_code.co_name)
    sys.setprofile(count)
    try: ds.levels(idx)
    finally: sys.setprofile(None)
    assert len(calls)<300
    dl = TextLoader(ds, 16_384, shuffle=True)
    assert sum(len(b['input_ids']) for b in dl)==o[-1]

def test_passes_are_in_random_orders():
    "A part of a pass is a random part, another one for another pass, seed or stream"
    some = [stream_places(100, a, a+40, seed, stream).tolist() for a,seed,stream in ((0,0,8),(100,0,8),(0,1,8),(0,0,9))]
    assert len(set(map(tuple, some)))==4 and all(o!=sorted(o) and max(o)>60 for o in some)
    assert stream_places(100, 0, 40, 0, 8).tolist()==some[0]
