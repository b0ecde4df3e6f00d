"Training with Lightning: its checkpoints hold the loader's place, and what is trained on after loading one is what was left."
import logging, os, sys, time, warnings

import numpy as np, pytest, torch
from torch import nn

warnings.filterwarnings('ignore')
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from fastseqprep.dataloader import pragma_dl
from test_dataloader import write_shards

logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
WAIT = 120 # seconds after which a worker that hangs fails the test


@pytest.fixture(scope='module')
def shards(tmp_path_factory): return write_shards(tmp_path_factory.mktemp('checkpoints')/'shards', (60, 1, 17, 2))

@pytest.fixture(autouse=True)
def one_thread():
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n)


class Model(pl.LightningModule):
    def __init__(self, dl):
        super().__init__()
        torch.manual_seed(0)
        self.dl, self.emb, self.seen = dl, nn.Embedding(600, 4), []
    def train_dataloader(self):
        "Of a checkpoint that was made between epochs, Lightning loads no loader's state, and counts `current_epoch` up only later"
        self.dl.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
        return self.dl
    def training_step(self, b, i):
        loss = self.emb(b['event_tokens'][:,1]).pow(2).mean()
        self.seen.append((self.current_epoch, i, list(b['uids']), loss.item()))
        return loss
    def validation_step(self, b, i): assert not self.training
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), .1)


class Broken(Exception): "What ends a training here"

class Break(pl.Callback):
    "Ends a training before a batch of it is used"
    def __init__(self, step): self.step = step
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step==self.step: raise Broken


def loader(shards, n=0, **kw):
    "Batches of ten records, as many in each epoch: Lightning asks for the length once"
    return pragma_dl(shards, batch_size=10, num_workers=n, **{'shuffle':True, 'mask':True, 'seed':5, **(dict(timeout=WAIT) if n else {}), **kw})

def fit(shards, n, folder, *cbs, ckpt=None, valid=False, dl=None, **kw):
    model = Model(dl or loader(shards, n))
    trainer = pl.Trainer(max_epochs=3, accelerator='cpu', devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=list(cbs),
                         default_root_dir=folder, enable_checkpointing=any(isinstance(o, ModelCheckpoint) for o in cbs), num_sanity_val_steps=0, **kw)
    try: trainer.fit(model, val_dataloaders=loader(shards, shuffle=False) if valid else None, ckpt_path=ckpt)
    except Broken: pass
    return model.seen, model.emb.weight.detach().clone()

def each_step(folder): return ModelCheckpoint(dirpath=folder, filename='{step}', every_n_train_steps=1, save_top_k=-1)
def each_epoch(folder): return ModelCheckpoint(dirpath=folder, filename='{epoch}', every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)

@pytest.fixture(scope='module')
def whole(shards, tmp_path_factory): return fit(shards, 0, tmp_path_factory.mktemp('whole'))


@pytest.mark.parametrize('n', [0, 2])
def test_lightning_goes_on_in_mid_epoch(shards, whole, tmp_path, n):
    steps = len(loader(shards).dataset.plan_of(0))
    assert len(whole[0])==sum(len(loader(shards).dataset.plan_of(e)) for e in range(3))
    for k in (1, 3, steps-1, steps, steps+1) if n==0 else (3, steps):    # `steps`: after the last batch of an epoch, before its end
        before, _ = fit(shards, n, tmp_path, each_step(tmp_path/str(k)), Break(k))
        assert len(before)==k                                       # workers had prepared more
        after, weight = fit(shards, n, tmp_path, ckpt=tmp_path/str(k)/f'step={k}.ckpt')
        assert before + after == whole[0] and torch.equal(weight, whole[1]), k


@pytest.mark.parametrize('reload', [0, 1])
def test_lightning_goes_on_after_an_epoch(shards, whole, tmp_path, reload):
    kw = dict(valid=True, reload_dataloaders_every_n_epochs=reload)
    steps = len(loader(shards).dataset.plan_of(0))
    before, _ = fit(shards, 0, tmp_path, each_epoch(tmp_path/'c'), Break(steps+3), **kw)
    after, weight = fit(shards, 2, tmp_path, ckpt=tmp_path/'c'/'epoch=0.ckpt', **kw)  # and with another number of workers
    assert before[:steps] + after == whole[0] and torch.equal(weight, whole[1])


def test_epochs_of_different_lengths(shards, tmp_path):
    "With `reload_dataloaders_every_n_epochs=1`, Lightning asks each epoch"
    kw = dict(reload_dataloaders_every_n_epochs=1)
    def make(): return pragma_dl(shards, max_tokens=500, lookahead=0, shuffle=True, seed=6)
    sizes = [len(make().dataset.plan_of(e)) for e in range(3)]
    assert len(set(sizes))>1 and sizes[0]<max(sizes), sizes
    want, weight = fit(shards, 0, tmp_path, dl=make(), **kw)
    assert [(e,u) for e,_,u,_ in want]==[(e, list(b['uids'])) for e in range(3) for b in make().dataset.batches(e)]
    for k in (2, sizes[0]+2, sum(sizes[:2])):  # not at the last batch of an epoch that a longer one follows: Lightning would count on from there
        before, _ = fit(shards, 0, tmp_path, each_step(tmp_path/str(k)), Break(k), dl=make(), **kw)
        after, again = fit(shards, 0, tmp_path, dl=make(), ckpt=tmp_path/str(k)/f'step={k}.ckpt', **kw)
        assert before + after==want and torch.equal(again, weight), k


def test_the_state_in_a_checkpoint(shards, tmp_path):
    "Plain values that load without unpickling code, and that any loader of the same data takes"
    fit(shards, 0, tmp_path, each_step(tmp_path), Break(4))
    state, = torch.load(tmp_path/'step=4.ckpt', weights_only=True)['loops']['fit_loop']['state_dict']['combined_loader']
    assert (state['epoch'], state['next_batch'])==(0, 4)
    want = [list(b['uids']) for b in loader(shards)][4:]
    for kw in dict(n=2), dict(rank=0, world_size=1):
        dl = loader(shards, **kw)
        dl.load_state_dict(state)
        assert [list(b['uids']) for b in dl]==want
    other = write_shards(tmp_path/'other', (60, 1, 17, 2), seed=1)
    with pytest.raises(ValueError, match='other data'): fit(other, 0, tmp_path, ckpt=tmp_path/'step=4.ckpt')
