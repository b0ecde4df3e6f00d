"DataLoaders of text: parts, the loss of what is trained, going on, and batches as text."
import json, pickle
import numpy as np, pytest, torch
from fastai.learner import Learner
from torch import nn
from text_cases import tokenizers
from fastseqprep.text_config import TextConfig
from fastseqprep.text_data import TextDataset
from fastseqprep.text_dls import ShownText, TextDL, TextLoss, TokenAccuracy, split_text, text_dls
from fastseqprep.text_pipeline import TextPipeline
from fastseqprep.token_store import TokenStore

@pytest.fixture(scope='module')
def toks(tmp_path_factory): return tokenizers(tmp_path_factory.mktemp('toks'))

@pytest.fixture(scope='module')
def result(tmp_path_factory, toks):
    where = tmp_path_factory.mktemp('text')
    rng = np.random.default_rng(0)
    words = 'hello world this is a small text about nothing much at all'.split()
    text = lambda: ' '.join(rng.choice(words, rng.integers(1, 6)))
    chats = [dict(messages=[dict(role='user', content=text()), dict(role='assistant', content=text())], of=('a','b')[i%3==0]) for i in range(120)]
    (where/'in.jsonl').write_text('\n'.join(map(json.dumps, chats)))
    cfg = TextConfig.for_shape('chat', validation=.25, preprocessing=dict(packing_strategy='bfd', max_packed_len=96), output=dict(domain_key='of', dtype=dict(sequence='auto')))
    return TextPipeline(cfg, where/'in.jsonl', where/'out', toks/'plain', progress=False).run()

class Model(nn.Module):
    "Scores from the token alone"
    def __init__(self, n=512):
        super().__init__()
        self.scores = nn.Embedding(n, n)
    def forward(self, b): return self.scores(b['input_ids'])

def test_parts_are_apart(result, toks):
    dls = text_dls(result, max_tokens=256, device='cpu')
    texts = [{tuple(x['input_ids'][a:b].tolist()) for x,_ in dl for a,b in zip(x['record_offsets'].tolist(), x['record_offsets'][1:].tolist())} for dl in (dls.train, dls.valid)]
    assert sum(map(len, texts)) and len(dls.train.dataset)+len(dls.valid.dataset)==result.store('train').n_bins+result.store('validation').n_bins
    assert sum(s['records'] for s in result.shards)==120
    n = [sum(len(x['record_offsets'])-1 for x,_ in dl) for dl in (dls.train, dls.valid)]
    assert n==[sum(s['records'] for s in result.shards if s['part']==p) for p in ('train','validation')]

@pytest.mark.parametrize('kw', [{}, dict(layout='padded'), dict(unit='record'), dict(unit='record', layout='padded', batch_size=3)])
def test_the_loss_is_that_of_trained_tokens(result, kw):
    "Summed over an epoch, however the batches are made, and equal to that of the records one by one"
    torch.manual_seed(0)
    model,loss = Model(),TextLoss(sum_=True)
    dls = text_dls(result, device='cpu', **{'max_tokens':200, **kw})
    got = sum(loss(model(x), y) for x,y in dls.train)
    ds = TextDataset(result.store('train'), 'sft', 'record')
    want = sum(nn.functional.cross_entropy(model(o)[o['loss_mask']], o['target_ids'][o['loss_mask']], reduction='sum') for o in ds if o['loss_mask'].any())
    assert torch.isclose(got, want, rtol=1e-4)

def test_a_learner_trains(result):
    torch.manual_seed(0)
    dls = text_dls(result, max_tokens=256, num_workers=0, device='cpu')
    learn = Learner(dls, Model(), metrics=TokenAccuracy())
    assert isinstance(learn.loss_func, TextLoss)
    before = learn.validate()[0]
    with learn.no_logging(): learn.fit(3, .1)
    loss,acc = learn.validate()
    assert loss<before and 0<acc<=1

def test_accuracy_counts_trained_tokens():
    class L: pass
    m,l = TokenAccuracy(),L()
    m.reset()
    l.pred,l.yb = torch.eye(4)[[0,1,2,3]],[dict(target_ids=torch.tensor([0,3,2,3]), loss_mask=torch.tensor([True,True,False,True]))]
    m.accumulate(l)
    assert m.value==2/3

def test_weights_mix_the_training_side_only(result):
    dls = text_dls(result, max_tokens=256, unit='record', weights=dict(a=1, b=0), device='cpu')
    ds = dls.train.dataset.data
    assert {ds.domains[i] for _,y in dls.train for i in y['sample'].tolist()}=={ds.store.domains.index('a')}
    assert sum(len(y['sample']) for _,y in dls.valid)==len(dls.valid.dataset)

def test_goes_on(result):
    make = lambda: text_dls(result, max_tokens=128, device='cpu').train
    dl = make()
    whole = [y['sample'].tolist() for _,y in dl]
    dl = make()
    it = iter(dl)
    for _ in range(3): next(it)
    on = make()
    on.load_state_dict(dl.state_dict())
    assert [y['sample'].tolist() for _,y in on]==whole[3:]

def test_same_validation_each_time(result):
    dl = text_dls(result, max_tokens=128, device='cpu').valid
    a,b = ([y['sample'].tolist() for _,y in dl] for _ in range(2))
    assert a==b and len(dl)==len(a)

def test_one_batch_new_and_empty(result):
    dls = text_dls(result, max_tokens=128, device='cpu')
    assert dls.train.one_batch()[1]['sample'].tolist()==next(iter(dls.train))[1]['sample'].tolist()
    few = dls.train.new(dls.train.dataset.__class__(dls.train.dataset.data, np.arange(2)))
    assert sum(len(y['sample']) for _,y in few)==2
    assert len(dls.train.new(dls.train.dataset.new_empty()))==0
    assert isinstance(few, TextDL)

def test_pairs_have_no_targets(tmp_path, toks):
    path = tmp_path/'in.jsonl'
    path.write_text('\n'.join(json.dumps(dict(prompt=f'What is {i}?', chosen='Four.', rejected='No.')) for i in range(8)))
    dls = text_dls(path, 'dpo', batch_size=4, valid=path, tokenizer_path=toks/'plain', device='cpu')
    b = dls.one_batch()
    assert len(b)==1 and b[0]['chosen'].shape[0]==4
    r = repr(dls.valid.show_batch(max_n=1, show=False))
    assert r.split('\n')[0].startswith('<|im_start|>user') and '⟦Four.<|im_end|>⟧' in r and '⟦No.<|im_end|>⟧' in r

def test_shown(result, toks):
    for kw in {}, dict(layout='padded'), dict(window_size=40, batch_size=2):
        dl = text_dls(result, device='cpu', tokenizer=toks/'plain', **{'max_tokens':200, **kw}).valid
        x,y = dl.one_batch()
        s = dl.show_batch((x,y), max_n=2, show=False)
        assert isinstance(s, ShownText) and '⟦' in repr(s) and '<|im_end|>⟧' in repr(s) and 'background' in s._repr_html_() and '<|im_end|>' not in s._repr_html_()

@pytest.mark.parametrize('share,empty,full', [(.01,'validation','train'), (.999,'train','validation')])
def test_an_empty_part(tmp_path, toks, share, empty, full):
    (tmp_path/'in.jsonl').write_text('\n'.join(json.dumps(dict(text=f'the sea is {i}')) for i in range(3)))
    TextPipeline(TextConfig.for_shape('pretrain', validation=share, preprocessing=dict(min_chars=0)), tmp_path/'in.jsonl', tmp_path/'out', toks/'plain', progress=False).run()
    for f in lambda: TokenStore(tmp_path/'out', empty), lambda: TextDataset.load(path=tmp_path/'out', part=empty), lambda: text_dls(tmp_path/'out', device='cpu'):
        with pytest.raises(FileNotFoundError, match=f"the part '{empty}' of .*out is empty.* all are in {full}"): f()
    assert len(TokenStore(tmp_path/'out', full).lengths())==3

def test_what_cannot_be(result, toks, tmp_path):
    with pytest.raises(ValueError, match='has no parts'): text_dls(result.store('train'))
    with pytest.raises(ValueError, match="has no part"): TextDataset.load(path=result.path, part='test')
    with pytest.raises(ValueError, match='for each token one score'): TextLoss()(torch.zeros(2,3), dict(loss_mask=torch.ones(3, dtype=torch.bool), target_ids=torch.zeros(3, dtype=torch.long)))
    with pytest.raises(ValueError, match='needs the tokenizer'): text_dls(result, device='cpu').show_batch()
    with pytest.raises(ValueError, match='are made already'): text_dls(TextDataset(result.store('train')), valid=result.store('validation'), unit='record')
