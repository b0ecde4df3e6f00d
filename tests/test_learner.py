"fastai over packed batches: nobody on both sides, the same questions each time, and a model that learns."
import json, math, pickle, subprocess, sys, warnings
from functools import partial

import polars as pl, pytest

torch = pytest.importorskip('torch')
pytest.importorskip('fastai')
warnings.filterwarnings('ignore', category=FutureWarning)
from fastai.callback.progress import CSVLogger
from fastai.callback.schedule import *
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.learner import Learner, load_learner
from fastai.metrics import accuracy
from fastai.torch_core import set_seed
from torch import nn

from conftest import root
from fastseqprep.dataloader import PRAGMADataLoader
from fastseqprep.events import PRAGMADataset
from fastseqprep.hashing import split_position
from fastseqprep.learner import MaskedValueLoss, PackedDL, join_answers, pragma_dls, split_answers
from fastseqprep.sample import movielens_sample, movielens_sources
from fastseqprep.source import DataSource
from fastseqprep.tokenizer import Tokenizer

WAIT = 120 # seconds after which a worker that hangs fails the test


def write(folder, sources, entity_col='user_id', eval_time='2026-01-01', n_shards=4, **kw):
    ds = PRAGMADataset(*sources, entity_col=entity_col, out_path=folder, progress=False)
    ds.fit_tokenizer(**kw)
    return ds.write_kv(eval_time, n_shards=n_shards)


@pytest.fixture(scope='module')
def sources(tmp_path_factory):
    return movielens_sources(movielens_sample(tmp_path_factory.mktemp('learner')/'sample'))

@pytest.fixture(scope='module')
def shards(sources, tmp_path_factory): return write(tmp_path_factory.mktemp('learner')/'all', sources)

@pytest.fixture(scope='module')
def trained_shards(sources, tmp_path_factory): return write(tmp_path_factory.mktemp('learner')/'train', sources, fit_on='train')

@pytest.fixture(autouse=True)
def one_thread():
    "Small tensors on a busy machine: threads wait for each other more than they work"
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)

dls_of = partial(pragma_dls, device='cpu', max_tokens=2000)
def stream(dl): return [(x['uids'], x['event_tokens'].tolist(), y.tolist()) for x,y in dl]
def users(dl): return {u for x,*_ in dl for u in x['uids']}


class KeyModel(nn.Module):
    "Guesses by the key alone"
    def __init__(self, tok):
        super().__init__()
        self.logits = nn.Embedding(tok.n_keys, tok.n_vals)
        nn.init.zeros_(self.logits.weight)
    def forward(self, b): return self.logits(b['event_tokens'][b['mlm_mask'],0])

def learner(dls, **kw): return Learner(dls, KeyModel(dls.tok), **kw)
def quietly(learn, f):
    with learn.no_bar(), learn.no_logging(): return f(learn)


# ---------------------------------------------------------------- sides

@pytest.mark.parametrize('valid_pct,split_seed', [(.2,0), (.2,7), (.5,0), (.05,1), (.9,3)])
def test_each_entity_is_on_one_side(shards, valid_pct, split_seed):
    dls = dls_of(shards, valid_pct=valid_pct, split_seed=split_seed)
    train, valid = users(dls.train), users(dls.valid)
    assert not train & valid and train | valid == set(range(1, 301))
    ids = list(range(1, 301))
    assert valid == {i for i,p in zip(ids, split_position(ids, split_seed)) if p < valid_pct}
    assert (train, valid) == (set(dls.train_ds.uids), set(dls.valid_ds.uids))


def test_the_split_knows_neither_shards_nor_seed_of_training(shards, sources, tmp_path):
    valid = set(dls_of(shards).valid_ds.uids)
    assert set(dls_of(write(tmp_path/'one', sources, n_shards=1)).valid_ds.uids) == valid
    assert set(dls_of(shards, seed=5, max_tokens=300, batch_size=4).valid_ds.uids) == valid
    files = sorted(shards.glob('shard_*.parquet'))
    assert set(dls_of(files).valid_ds.uids) == valid


def test_the_declared_split_is_the_one_of_the_tokenizer(sources, tmp_path):
    path = write(tmp_path/'s', sources, fit_on='train', valid_pct=.3, seed=4)
    dls = dls_of(path)
    ids = dls.train_ds.uids
    assert all(split_position(ids, 4) >= .3) and all(split_position(dls.valid_ds.uids, 4) < .3)
    unknown = dls.tok.val_vocab['[UNK]']
    def unseen(ds): return sum(int((e[:,1]==unknown).sum()) for i in range(len(ds)) for e in [ds[i]['profile'], *ds[i]['events']])
    assert unseen(dls.train_ds)==0 < unseen(dls.valid_ds)
    for kw in dict(valid_pct=.2), dict(split_seed=0), dict(valid_pct=.3, split_seed=1):
        with pytest.raises(ValueError, match='is not the split that the manifest'): pragma_dls(path, **kw)
    assert dls_of(path, valid_pct=.3, split_seed=4).train_ds.uids == ids


def test_all_records_of_an_entity_are_on_one_side(sources, tmp_path):
    points = pl.DataFrame(dict(user_id=[u for u in range(1, 301) for _ in range(3)], at=[880_000_000+i*4_000_000 for _ in range(300) for i in range(3)]))
    path = write(tmp_path/'s', sources, eval_time=points)
    dls = dls_of(path)
    assert len(dls.train_ds)+len(dls.valid_ds) > 300
    assert not set(dls.train_ds.uids) & set(dls.valid_ds.uids)


def test_text_ids(tmp_path):
    df = pl.DataFrame(dict(who=[f'u{i%40}' for i in range(400)], what=[f'v{i*7%11}' for i in range(400)], at=list(range(400))))
    src = DataSource.from_df(df, cats='what', time_col='at', entity_col='who', name='acts')
    dls = dls_of(write(tmp_path/'s', (None, src), 'who'))
    train, valid = users(dls.train), users(dls.valid)
    assert valid and not train & valid and train | valid == {f'u{i}' for i in range(40)}


def test_lists_of_shards(shards):
    files = sorted(shards.glob('shard_*.parquet'))
    dls = dls_of(files[:2], files[2:])
    assert not users(dls.train) & users(dls.valid) and len(users(dls.train) | users(dls.valid))==300
    with pytest.raises(ValueError, match='trained on too'): pragma_dls(files[:3], files[2:])
    with pytest.raises(ValueError, match='one or the other'): pragma_dls(files[:2], files[2:], split_seed=0)


def test_bad_wishes(shards, sources, tmp_path):
    with pytest.raises(ValueError, match='No entity is left for validation'): pragma_dls(shards, valid_pct=0)
    with pytest.raises(ValueError, match='No entity is left for training'): pragma_dls(shards, valid_pct=1)
    with pytest.raises(ValueError, match='written with the tokenizer'): pragma_dls(shards, tok=Tokenizer.load(write(tmp_path/'t', sources, fit_on='train')))
    with pytest.raises(FileNotFoundError): pragma_dls(tmp_path/'nothing')


# ---------------------------------------------------------------- epochs

def test_training_changes_each_epoch_and_repeats_by_seed(shards):
    a, b, other = dls_of(shards), dls_of(shards), dls_of(shards, seed=1)
    first, second = stream(a.train), stream(a.train)
    assert first != second and [stream(b.train), stream(b.train)] == [first, second]
    assert stream(other.train) != first
    assert sorted(u for o in first for u in o[0]) == sorted(u for o in second for u in o[0]) == sorted(a.train_ds.uids)


def test_validation_asks_the_same_each_time(shards):
    dls = dls_of(shards)
    want = stream(dls.valid)
    for _ in dls.valid: break # broken off
    dls.valid.one_batch()
    learn = learner(dls)
    quietly(learn, lambda o: (o.fit(1, .1), o.get_preds()))
    assert stream(dls.valid)==want and len(dls.valid)==len(want)


def test_looking_does_not_change_training(shards):
    dls, plain = dls_of(shards), dls_of(shards)
    stream(dls.train), stream(plain.train)
    learn = learner(dls)
    dls.one_batch(), dls.show_batch(show=False)
    quietly(learn, lambda o: (o.get_preds(0), o.validate(0, dls.train.new(shuffle=False)), o.show_results(0)))
    assert stream(dls.train)==stream(plain.train)


def test_one_batch_is_the_next(shards):
    dl = dls_of(shards).train
    stream(dl)
    x, y = dl.one_batch()
    assert stream(dl)[0] == (x['uids'], x['event_tokens'].tolist(), y.tolist())


@pytest.mark.parametrize('kw', [dict(), dict(persistent_workers=True), dict(persistent_workers=True, multiprocessing_context='spawn')])
def test_workers_change_nothing(shards, kw):
    if 'multiprocessing_context' not in kw: kw = dict(kw, multiprocessing_context='fork')
    here, there = dls_of(shards), dls_of(shards, num_workers=2, timeout=WAIT, **kw)
    for _ in range(2): # both sides in turn, as in training
        assert stream(here.train)==stream(there.train)
        assert stream(here.valid)==stream(there.valid)


def test_a_worker_needs_no_fastai(shards):
    code = ("import pickle, sys\nds = pickle.load(sys.stdin.buffer)\nn = sum(1 for _ in ds)\n"
            "assert n > 1 and not {'fastai','polars'} & set(sys.modules), sorted(sys.modules)")
    subprocess.run([sys.executable, '-c', code], input=pickle.dumps(dls_of(shards).train.loader), check=True, cwd=root)


# ---------------------------------------------------------------- answers and loss

def test_answers_are_not_in_the_input(shards):
    for x,y in dls_of(shards).valid:
        assert 'event_labels' not in x and len(y)==x['mlm_mask'].sum()
        assert set(x['event_tokens'][x['mlm_mask'],1].tolist()) == {1}
        b = join_answers(x, y)
        x2, y2 = split_answers(b)
        assert torch.equal(y, y2) and (b['event_labels'][~x['mlm_mask']]==-100).all()


def test_validation_loss_is_the_mean_over_all_answers(shards):
    dls = dls_of(shards, max_tokens=700)
    learn = learner(dls, metrics=accuracy)
    quietly(learn, lambda o: o.fit(1, .1))
    loss, acc = quietly(learn, lambda o: o.validate())
    preds, targs = quietly(learn, lambda o: o.get_preds())
    assert preds.shape==(len(targs), dls.tok.n_vals) and preds.sum(1).sub(1).abs().max() < 1e-4
    assert loss==pytest.approx(-preds[torch.arange(len(targs)),targs].log().mean().item(), abs=1e-4)
    assert acc==pytest.approx((preds.argmax(1)==targs).float().mean().item(), abs=1e-6)
    assert targs.tolist()==[a for *_,y in stream(dls.valid) for a in y]


def test_people_without_events(tmp_path):
    people = pl.DataFrame(dict(id=range(60), kind=[f'k{i%3}' for i in range(60)]))
    acts = pl.DataFrame(dict(id=list(range(0, 60, 4))*5, what=['a','b','a','c','b']*15, at=range(75)))
    path = write(tmp_path/'s', (DataSource.from_df(people, cats='kind', entity_col='id', is_profile=True, name='people'),
                                DataSource.from_df(acts, cats='what', time_col='at', entity_col='id', name='acts')), 'id')
    dls = pragma_dls(path, batch_size=2, device='cpu')
    for dl in dls: assert {len(y)>0 for _,y in dl}=={True,False}
    learn = learner(dls)
    quietly(learn, lambda o: o.fit(2, .1))
    assert all(math.isfinite(v) for row in learn.recorder.values for v in row) and torch.isfinite(learn.model.logits.weight).all()
    assert MaskedValueLoss()(torch.zeros(0, 5, requires_grad=True), torch.zeros(0, dtype=int)).requires_grad


def test_without_masks(shards):
    dls = dls_of(shards, mask=False)
    b, = dls.one_batch()
    assert 'mlm_mask' not in b and users(dls.valid)==set(dls.valid_ds.uids)
    assert 'movie_id' in str(dls.show_batch(show=False))


# ---------------------------------------------------------------- fastai

def test_lr_find_and_callbacks(shards, tmp_path):
    dls = dls_of(shards)
    learn = learner(dls, path=tmp_path)
    start = learn.model.logits.weight.clone()
    assert quietly(learn, lambda o: o.lr_find(num_it=30, show_plot=False)).valley > 0
    assert torch.equal(start, learn.model.logits.weight)
    cbs = [SaveModelCallback(), EarlyStoppingCallback(patience=3), GradientAccumulation(1000), GradientClip(1.), CSVLogger(tmp_path/'log.csv')]
    quietly(learn, lambda o: (o.fit_one_cycle(3, .1, cbs=cbs), o.fit_flat_cos(1, .1)))
    losses = [float(l.split(',')[2]) for l in (tmp_path/'log.csv').read_text().splitlines()[1:]]
    assert len(losses)==3 and losses[-1] < losses[0] and (tmp_path/'models'/'model.pth').exists()


def test_export_leaves_the_data_behind(shards, sources, tmp_path):
    path = write(tmp_path/'shards', sources)
    learn = learner(dls_of(path), path=tmp_path)
    quietly(learn, lambda o: o.fit(1, .1))
    want = quietly(learn, lambda o: o.get_preds(dl=PackedDL(partial(PRAGMADataLoader, shards, mask=True))))[0]
    learn.export('out.pkl')
    path.rename(tmp_path/'moved')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        other = load_learner(tmp_path/'out.pkl')
    assert (len(other.dls.train), other.dls.valid.n, other.dls.tok.hash) == (0, 0, learn.dls.tok.hash)
    dl = PackedDL(partial(PRAGMADataLoader, shards, tok=other.dls.tok, mask=True), other.dls.tok)
    assert torch.equal(quietly(other, lambda o: o.get_preds(dl=dl))[0], want)


def test_results_show_guesses_and_answers(shards):
    learn = learner(dls_of(shards))
    x, y = learn.dls.valid.one_batch()
    shown = str(learn.dls.valid.show_results((x, y), y, max_n=len(x['uids']), max_events=10_000, show=False))
    assert shown.count('→')==len(y) and '[MASK] →' not in shown
    assert str(learn.dls.show_batch((x, y), max_n=len(x['uids']), max_events=10_000, show=False)).count('[MASK] →')==len(y)


def test_only_what_is_needed_of_fastai_is_loaded():
    code = "import sys, warnings; warnings.simplefilter('ignore'); import fastseqprep.learner; print([o for o in ('spacy','torchvision','fastai.text.core','fastai.vision.core','fastai.learner') if o in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, cwd=root).stdout.strip()=='[]'


# ---------------------------------------------------------------- it learns

def tutorial_model():
    "The model of the tutorial, from its notebook"
    cells = json.loads((root/'nbs'/'tutorials'/'movielens.ipynb').read_text(encoding='utf-8'))['cells']
    source, = [s for s in (''.join(o['source']) for o in cells if o['cell_type']=='code') if s.startswith('class EventModel')]
    space = dict(math=math, nn=nn, torch=torch)
    exec(source.split('\n\ntorch.set_num_threads')[0], space)
    return space['EventModel']


def counting(dls, shards):
    "Log share of each value of a key among the events of the training entities"
    rows = pl.concat([pl.read_parquet(o) for o in sorted(shards.glob('shard_*.parquet'))])
    found = rows.filter(pl.col('event_idx') >= 0, pl.col('user_id').is_in(dls.train_ds.uids)).group_by('key_id','val_id').len()
    counts = torch.full((dls.tok.n_keys, dls.tok.n_vals), .1)
    counts[found['key_id'].to_list(), found['val_id'].to_list()] += found['len'].to_torch()
    return (counts/counts.sum(1, keepdim=True)).log()


def test_a_model_does_better_than_counting(trained_shards):
    "On people unseen by model and tokenizer, for each key: less loss than the key's shares, more hits than its most frequent value"
    def train():
        dls = pragma_dls(trained_shards, max_tokens=1000, unk_targets=False, device='cpu')
        log_share = counting(dls, trained_shards)
        set_seed(0)
        learn = Learner(dls, tutorial_model()(dls.tok, log_share), cbs=GradientClip(1.))
        quietly(learn, lambda o: o.fit_one_cycle(6, 8e-3))
        return learn, log_share, [list(o) for o in learn.recorder.values]
    learn, log_share, losses = train()
    preds, targs = quietly(learn, lambda o: o.get_preds())
    asked = torch.cat([x['event_tokens'][x['mlm_mask'],0] for x,_ in learn.dls.valid])
    def score(logp, m): return nn.functional.nll_loss(logp[m], targs[m]).item(), (logp[m].argmax(1)==targs[m]).float().mean().item()
    res = {k:(score(log_share[asked], asked==i), score(preds.log(), asked==i)) for k,i in learn.dls.tok.key_vocab.items() if (asked==i).any()}
    assert set(res)=={'movie_id','rating'}
    for k,((base, base_hits), (loss, hits)) in res.items(): assert loss < base-.05 and hits >= base_hits, (k, res)
    assert res['rating'][1][1] > res['rating'][0][1]+.05, res
    assert train()[2]==losses # the seeds decide everything
