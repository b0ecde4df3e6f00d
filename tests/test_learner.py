"fastai over packed batches: nobody on both sides, the same questions each time, and a model that learns."
import contextlib, io, json, math, os, pickle, random, signal, subprocess, sys, warnings
from functools import partial

import numpy as np, polars as pl, pytest

torch = pytest.importorskip('torch')
pytest.importorskip('fastai')
warnings.filterwarnings('ignore', category=FutureWarning)
from fastai.callback.core import Callback
from fastai.callback.progress import CSVLogger
from fastai.callback.schedule import *
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.learner import Learner, load_learner
from fastai.metrics import accuracy
from fastai.optimizer import OptimWrapper, ranger
from fastai.torch_core import set_seed
from torch import nn
from torch.nn import functional as F

from conftest import root
from fastseqprep.dataloader import PRAGMADataLoader
from fastseqprep.events import PRAGMADataset
from fastseqprep.hashing import split_position
from fastseqprep.batch import Batch
from fastseqprep.checkpoints import Ahead, ResumeCallback, from_plain, to_plain
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


@pytest.mark.parametrize('text', [False, True])
def test_entities_that_are_given_by_id(sources, tmp_path, text):
    "Who the tokenizer was fitted on is trained on, all others are validated on"
    if text:
        df = pl.DataFrame(dict(who=[f'u{i%40}' for i in range(400)], what=[f'v{i*7%11}' for i in range(400)], at=list(range(400))))
        sources, col, everyone, ids = (None, DataSource.from_df(df, cats='what', time_col='at', entity_col='who', name='acts')), 'who', {f'u{i}' for i in range(40)}, [f'u{i}' for i in range(0, 40, 3)]
    else: col, everyone, ids = 'user_id', set(range(1, 301)), list(range(1, 301, 2))
    path = write(tmp_path/'s', sources, col, fit_on=ids)
    dls = dls_of(path)
    assert users(dls.train)==set(ids) and users(dls.valid)==everyone-set(ids)
    assert set(dls_of(sorted(path.glob('shard_*.parquet'))).train_ds.uids)==set(ids)
    for kw in dict(valid_pct=.2), dict(split_seed=0):
        with pytest.raises(ValueError, match=f'its {len(ids)} training entities by id: leave out'): pragma_dls(path, **kw)
    trained = dls.train.loader.recs
    trained = np.flatnonzero(np.isin(np.array(trained.uid_list(range(len(trained)))), ids))
    with pytest.raises(ValueError, match=f"for validation: .*The tokenizer's ids, {len(ids)} of them"): pragma_dls(path, records=trained)
    (path/'tokenizer.train_ids.parquet').unlink()
    with pytest.raises(ValueError, match='tokenizer.train_ids.parquet'): pragma_dls(path)


def test_models_get_a_batch(shards):
    kinds = set()
    class Looks(KeyModel):
        def forward(self, b):
            kinds.add((type(b), b.max_seqlen('record')>0))
            return super().forward(b)
    for kw in {}, dict(num_workers=2, timeout=WAIT):
        dls = dls_of(shards, max_tokens=4000, **kw)
        learn = Learner(dls, Looks(dls.tok))
        quietly(learn, lambda o: (o.fit(1, .1), o.get_preds(), o.validate()))
        assert {type(x) for dl in dls for x in (dl.one_batch()[0], pickle.loads(pickle.dumps(dl.one_batch()))[0])}=={Batch}
    assert kinds=={(Batch, True)}


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


# ---------------------------------------------------------------- going on

class Watch(Callback):
    "Keeps each loss and draw as it is"
    def before_fit(self): self.seen = []
    def after_batch(self): self.seen.append((self.training, self.epoch, self.iter, self.loss.item(), random.random(), np.random.rand()))

class Stop(Callback):
    "Breaks off at an event of some batch, as an error would"
    order = -5
    def __init__(self, event, epoch, batch=None): self.event,self.at = event,(epoch, batch)
    def __call__(self, event):
        if event==self.event and self.epoch==self.at[0] and self.at[1] in (None, self.iter) and (self.training or event not in ('after_pred','after_loss','before_batch','after_batch')): raise KeyboardInterrupt

class Noisy(nn.Module):
    "Has dropout, batch statistics, and two groups of parameters, some of which are not used by every batch"
    def __init__(self, tok):
        super().__init__()
        self.body,self.norm,self.head,self.often = nn.Embedding(tok.n_keys, 8),nn.BatchNorm1d(8),nn.Linear(8, tok.n_vals),nn.Parameter(torch.zeros(8))
    def forward(self, b):
        x = F.dropout(self.norm(self.body(b['event_tokens'][b['mlm_mask'],0])), .3, self.training)
        return self.head(x + self.often if len(x)%2 else x)

def some_dls(shards, **kw): return dls_of(shards, **{'max_tokens':1000, 'seed':3, 'records':np.arange(100), **kw})

def noisy(shards, folder, n=0, **kw):
    set_seed(7)
    dls = some_dls(shards, num_workers=n, timeout=WAIT if n else 0)
    return Learner(dls, Noisy(dls.tok), path=folder, metrics=accuracy, splitter=lambda m: [[*m.body.parameters(), *m.norm.parameters()], [*m.head.parameters(), m.often]], **kw)

one_cycle = lambda o, *cbs: o.fit_one_cycle(3, slice(.01, .05), cbs=[Watch(), *cbs])
flat = lambda o, *cbs: o.fit(3, .02, wd=.1, cbs=[Watch(), *cbs])
flat_cos = lambda o, *cbs: o.fit_flat_cos(3, .02, cbs=[GradientAccumulation(700), GradientClip(.5), Watch(), *cbs])

def run(learn, fit, *cbs):
    "All that training leaves behind"
    found = []
    class Find(Callback):
        order = 900
        def after_fit(self): found.append(self.watch.seen)
    quietly(learn, lambda o: fit(o, Find(), *cbs))
    r = learn.recorder
    return dict(seen=found[-1], losses=torch.stack(r.losses).tolist(), lrs=[float(v) for v in r.lrs], iters=list(r.iters), values=[[None if v is None else float(v) for v in o] for o in r.values],
                hps={k:[float(v) for v in vs] for k,vs in getattr(r, 'hps', {}).items()}, weights=[p.tolist() for p in learn.model.state_dict().values()], epoch=learn.epoch, n_epoch=learn.n_epoch, train_iter=learn.train_iter)

@pytest.fixture(scope='module')
def whole_runs(shards, tmp_path_factory):
    "Runs that nothing interrupts, each once"
    runs = {}
    def get(fit, **kw):
        if fit not in runs: runs[fit] = run(noisy(shards, tmp_path_factory.mktemp('whole'), **kw), fit)
        return runs[fit]
    return get

def n_batches(shards, epoch=0): return len(some_dls(shards).train.loader.steps(epoch))
def is_same(got, want):
    for k in want: assert got[k]==want[k], k

def interrupted(shards, folder, fit, stop, n=0, every=1, **kw):
    with pytest.raises(KeyboardInterrupt): run(noisy(shards, folder, n, **kw), fit, ResumeCallback(every=every), stop)
    return run(noisy(shards, folder, n, **kw), fit, ResumeCallback(every=every))


WHERE = dict(first=('after_batch', 0, 0), second=('before_batch', 0, 1), middle=('after_pred', 1, 5), last=('after_step', 1, -1), after_last=('after_train', 1, None),
             validation=('before_validate', 0, None), within_validation=('after_validate', 2, None), border=('before_epoch', 1, None), start=('before_train', 2, None), end=('after_epoch', 2, None))

@pytest.mark.parametrize('where', WHERE)
def test_going_on_is_as_if_nothing_had_happened(shards, whole_runs, tmp_path, where):
    event, epoch, batch = WHERE[where]
    if batch==-1: batch = n_batches(shards)-1
    is_same(interrupted(shards, tmp_path, one_cycle, Stop(event, epoch, batch)), whole_runs(one_cycle))


@pytest.mark.parametrize('fit', [flat, flat_cos])
@pytest.mark.parametrize('where', ['middle', 'last', 'validation', 'border'])
def test_going_on_with_other_ways_to_fit(shards, whole_runs, tmp_path, fit, where):
    event, epoch, batch = WHERE[where]
    is_same(interrupted(shards, tmp_path, fit, Stop(event if batch is None else 'after_loss', epoch, n_batches(shards)-1 if batch==-1 else batch)), whole_runs(fit))


@pytest.mark.parametrize('n,batch', [(2, 4), (2, 0), (2, -1)])
def test_going_on_with_workers(shards, whole_runs, tmp_path, n, batch):
    "The batches that workers had prepared are not lost; and losses are those without workers"
    is_same(interrupted(shards, tmp_path, one_cycle, Stop('after_pred', 1, batch % n_batches(shards)), n), whole_runs(one_cycle))


def test_some_batches_are_done_again(shards, whole_runs, tmp_path):
    "Saved every third batch only; broken off twice"
    with pytest.raises(KeyboardInterrupt): run(noisy(shards, tmp_path), one_cycle, ResumeCallback(every=3), Stop('after_pred', 0, 5))
    with pytest.raises(KeyboardInterrupt): run(noisy(shards, tmp_path), one_cycle, ResumeCallback(every=3), Stop('after_pred', 2, 1))
    is_same(run(noisy(shards, tmp_path), one_cycle, ResumeCallback()), whole_runs(one_cycle))
    assert [o.name for o in (tmp_path/'models').iterdir()]==['resume.pth']


@pytest.mark.parametrize('opt', ['adamw', 'lookahead'])
def test_going_on_with_other_optimizers(shards, tmp_path, opt):
    kw = dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW) if opt=='adamw' else ranger)
    want = run(noisy(shards, tmp_path, **kw), one_cycle)
    is_same(interrupted(shards, tmp_path, one_cycle, Stop('after_pred', 1, 5), **kw), want)


def test_other_callbacks_go_on_too(shards, tmp_path):
    "How long early stopping has waited, the best so far, metrics of training"
    class Worse(Callback):
        def after_validate(self): self.recorder.loss.total += 1000*self.epoch
    def fit(o, *cbs):
        o.recorder.train_metrics = True
        with contextlib.redirect_stdout(io.StringIO()): o.fit(6, .02, cbs=[Worse(), EarlyStoppingCallback(patience=3), SaveModelCallback(fname='best'), Watch(), *cbs])
    (tmp_path/'a').mkdir(), (tmp_path/'b').mkdir()
    want = run(noisy(shards, tmp_path/'a'), fit)
    assert len(want['values'])==4 and len(want['values'][0])==4
    is_same(interrupted(shards, tmp_path/'b', fit, Stop('after_pred', 2, 6)), want)


def test_fine_tuning_is_two_trainings(shards, tmp_path):
    fit = lambda o, *cbs: o.fine_tune(2, .02, freeze_epochs=1, cbs=[Watch(), *cbs])
    want = run(noisy(shards, tmp_path), fit)
    for epoch in 0, 1: # the first of them is in both
        for o in (tmp_path/'models').glob('*'): o.unlink()
        is_same(interrupted(shards, tmp_path, fit, Stop('after_pred', epoch, 5)), want)


def test_what_is_done_stays_done(shards, whole_runs, tmp_path):
    want = whole_runs(one_cycle)
    run(noisy(shards, tmp_path), one_cycle, ResumeCallback())
    got = run(noisy(shards, tmp_path), one_cycle, ResumeCallback(), Stop('before_train', 0))
    for k in 'losses', 'values', 'weights', 'hps': assert got[k]==want[k], k
    learn = noisy(shards, tmp_path)
    run(learn, one_cycle, ResumeCallback())
    quietly(learn, lambda o: (o.validate(), o.get_preds(), o.fit(1, .01))) # and nothing of it stays in the learner
    assert not learn._grab_cbs(ResumeCallback) and not learn._grab_cbs(Ahead)


def test_a_model_has_names_of_its_own(shards, tmp_path):
    "fastai looks up a callback's names in learner and model, so its own are none that a model would use"
    learn = noisy(shards, tmp_path)
    learn.model.place = nn.Embedding(4, 4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        run(learn, one_cycle, ResumeCallback())
    assert not [o for o in found if 'shadowing' in str(o.message)] and isinstance(learn.place, nn.Embedding)


def test_one_training_after_another(shards, tmp_path):
    "The loader's epochs go on from fit to fit"
    def fit(o, *cbs):
        o.fit(1, .02, cbs=[Watch(), *(ResumeCallback('one') for c in cbs if isinstance(c, ResumeCallback))])
        o.fit_one_cycle(2, .02, cbs=[Watch(), *cbs])
    want = run(noisy(shards, tmp_path), fit)
    is_same(interrupted(shards, tmp_path, fit, Stop('after_pred', 1, 3)), want)


@pytest.mark.parametrize('sign', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('event', ['after_pred', 'before_step', 'before_batch', 'after_validate', 'after_epoch'])
def test_a_signal_lets_the_batch_end(shards, whole_runs, tmp_path, sign, event):
    if os.name=='nt' and sign==signal.SIGTERM: pytest.skip('ends the process on Windows')
    class Signal(Callback):
        sent = False
        def __call__(self, name):
            if name==event and not self.sent and (self.epoch, self.iter)==(1, n) : self.sent = True; signal.raise_signal(sign)
    n = 5 if 'batch' in event or event in ('after_pred', 'before_step') else len(some_dls(shards).valid)-1
    class Ended(BaseException): pass
    def end(*_): raise Ended
    old = {s:signal.signal(s, end) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(Ended): run(noisy(shards, tmp_path), one_cycle, ResumeCallback(), Signal())
        assert all(signal.getsignal(s) is end for s in old)
    finally:
        for s,f in old.items(): signal.signal(s, f)
    state = torch.load(tmp_path/'models'/'resume.pth', weights_only=True)
    assert state['place']==((1, 6) if n==5 else (1, n_batches(shards, 1)) if event=='after_validate' else state['place'])
    is_same(run(noisy(shards, tmp_path), one_cycle, ResumeCallback()), whole_runs(one_cycle))


def test_a_second_signal_does_not_wait(shards, tmp_path):
    class Twice(Callback):
        def after_pred(self):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler) # a shell may have started this in the background, where it is ignored
    try:
        with pytest.raises(KeyboardInterrupt): run(noisy(shards, tmp_path), one_cycle, ResumeCallback(), Twice())
    finally: signal.signal(signal.SIGINT, before)
    assert not (tmp_path/'models'/'resume.pth').exists()


KILLED = """
import os, signal, sys, warnings
warnings.simplefilter('ignore')
sys.path.insert(0, 'tests')
from pathlib import Path
import torch
torch.set_num_threads(1)
import test_learner as t
class Kill(t.Callback):
    def after_pred(self):
        if self.train_iter==int(sys.argv[4]) and self.training: os.kill(os.getpid(), signal.SIGKILL)
got = t.run(t.noisy(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])), t.one_cycle, t.ResumeCallback(every=4), Kill())
print(t.json.dumps(got))
"""

@pytest.mark.skipif(os.name=='nt', reason='needs SIGKILL')
def test_killed_processes(shards, whole_runs, tmp_path):
    go = lambda at: subprocess.run([sys.executable, '-c', KILLED, str(shards), str(tmp_path), '2', str(at)], capture_output=True, text=True, cwd=root, timeout=WAIT)
    assert go(n_batches(shards)+7).returncode==-signal.SIGKILL
    done = go(-1)
    assert done.returncode==0, done.stderr
    is_same(json.loads(done.stdout.splitlines()[-1]), json.loads(json.dumps(whole_runs(one_cycle))))


def test_states_that_do_not_fit(shards, tmp_path):
    with pytest.raises(KeyboardInterrupt): run(noisy(shards, tmp_path), one_cycle, ResumeCallback(every=1), Stop('after_pred', 1, 2))
    again = lambda learn=None, fit=one_cycle: run(learn or noisy(shards, tmp_path), fit, ResumeCallback())
    for fit in flat, lambda o, *cbs: o.fit_one_cycle(4, slice(.01, .05), cbs=[Watch(), *cbs]), lambda o, *cbs: o.fit_one_cycle(3, .05, cbs=[Watch(), *cbs]):
        with pytest.raises(ValueError, match='call it as it was called'): again(fit=fit)
    other = noisy(shards, tmp_path)
    other.model.head = nn.Linear(8, 5)
    with pytest.raises(ValueError, match='another model'): again(other)
    for kw in dict(seed=4), dict(max_tokens=700), dict(valid_pct=.4):
        dls = some_dls(shards, **kw)
        learn = Learner(dls, Noisy(dls.tok), path=tmp_path, metrics=accuracy, splitter=noisy(shards, tmp_path).splitter)
        with pytest.raises(ValueError, match='The state is of'): again(learn)
    file = tmp_path/'models'/'resume.pth'
    whole = file.read_bytes()
    for bad in whole[:len(whole)//2], b'', b'\x80\x04junk':
        file.write_bytes(bad)
        with pytest.raises(ValueError, match='remove it to begin anew'): again()
    class Evil:
        def __reduce__(self): return (os.system, ('touch '+str(tmp_path/'ran'),))
    torch.save(dict(a=Evil()), file)
    with pytest.raises(ValueError, match='cannot be read'): again()
    assert not (tmp_path/'ran').exists()
    torch.save(dict(model={}), file)
    with pytest.raises(ValueError, match='not a state of training'): again()
    dls = DataLoaders(*(torch.utils.data.DataLoader([0, 1]) for _ in range(2)))
    with pytest.raises(TypeError, match='pragma_dls'): Learner(dls, nn.Linear(1, 1), loss_func=F.mse_loss, path=tmp_path).fit(1, cbs=ResumeCallback())


def test_a_whole_epoch_is_its_length_and_nothing_is_drawn(shards):
    dl = dls_of(shards, max_tokens=1500).train
    n, it = len(dl), iter(dl)
    for _ in range(3): next(it)
    other = dls_of(shards, max_tokens=1500, num_workers=2, timeout=WAIT).train
    other.load_state_dict(dl.state_dict())
    before = torch.get_rng_state()
    assert len(other)==n and stream(other)==[(x['uids'], x['event_tokens'].tolist(), y.tolist()) for x,y in it]
    assert torch.equal(before, torch.get_rng_state())


def test_long_histories_are_saved_quickly():
    "Losses of 100,000 batches: one tensor, not as many"
    import io, time
    losses, start = [torch.tensor(float(i)) for i in range(100_000)], time.perf_counter()
    f = io.BytesIO()
    torch.save(to_plain(losses), f)
    assert f.tell() < 1_000_000 and time.perf_counter()-start < 20
    assert from_plain(torch.load(io.BytesIO(f.getvalue()), weights_only=True))==losses


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
