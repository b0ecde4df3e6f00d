"fastai's Learner on packed batches: sides that never meet, a model that learns, and what callbacks ask of a loader."
import contextlib, io

import numpy as np, pytest, torch
from fastai.callback.schedule import lr_find
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.torch_core import set_seed
from torch import nn

from fastseqprep.compiled import compile_records
from fastseqprep.events import PRAGMADataset
from fastseqprep.hashing import split_position
from fastseqprep.learner import pragma_dls
from fastseqprep.sample import movielens_sample, movielens_sources


class TinyModel(nn.Module):
    "Hidden values from the rest of their event and the mean event of their record"
    def __init__(self, tok, d=32):
        super().__init__()
        self.key, self.value = nn.Embedding(tok.n_keys, d), nn.Embedding(tok.n_vals, d)
        self.guess = nn.Sequential(nn.Linear(3*d, 2*d), nn.GELU(), nn.Linear(2*d, tok.n_vals))

    def forward(self, b):
        tokens, user = b['event_tokens'], b['event_user']
        event = torch.repeat_interleave(b['event_offsets'].diff())
        cells = self.key(tokens[:, 0])+self.value(tokens[:, 1])
        events = cells.new_zeros(len(user), cells.shape[1]).index_add(0, event, cells)
        people = cells.new_zeros(len(b['uids']), cells.shape[1]).index_reduce(0, user, events, 'mean', include_self=False)
        at = b['mlm_mask']
        return self.guess(torch.cat([self.key(tokens[at, 0]), events[event[at]], people[user[event[at]]]], 1))


@pytest.fixture(scope='module')
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp('learner')
    job = PRAGMADataset(*movielens_sources(movielens_sample(folder/'raw')), entity_col='user_id', out_path=folder/'shards', progress=False)
    job.fit_tokenizer(fit_on='train', valid_pct=.25, seed=3)
    return job.write_kv('2026-01-01', n_shards=3)


@pytest.fixture(scope='module')
def dls(shards): return pragma_dls(shards, max_tokens=1500, unk_targets=False, device='cpu')


def test_sides_are_those_of_the_manifest_and_never_meet(shards, dls):
    recs = compile_records(shards)
    uids = np.array(recs.uid_list(np.arange(len(recs))))
    held_out = split_position(uids, 3) < .25
    assert sorted(dls.train_ds.uids) == sorted(uids[~held_out]) and sorted(dls.valid_ds.uids) == sorted(uids[held_out])
    seen = [[u for x, _ in side for u in x['uids']] for side in (dls.train, dls.valid)]
    assert sorted(seen[0]) == sorted(uids[~held_out]) and sorted(seen[1]) == sorted(uids[held_out])


def test_training_moves_on_and_validation_stays(dls):
    def uids(dl): return [x['uids'] for x, _ in dl]
    def answers(dl): return torch.cat([y for _, y in dl])
    assert uids(dls.train) != uids(dls.train)
    assert uids(dls.valid) == uids(dls.valid)
    assert torch.equal(answers(dls.valid), answers(dls.valid))


def test_answers_are_not_in_the_batch(dls):
    x, y = dls.one_batch()
    assert 'event_labels' not in x and len(y) == int(x['mlm_mask'].sum()) > 0
    assert set(x['event_tokens'][x['mlm_mask'], 1].tolist()) == {dls.train.tok.val_vocab['[MASK]']}


def test_another_split_than_the_declared_one_is_refused(shards):
    with pytest.raises(ValueError, match='valid_pct=0.5.*not the split that the manifest'): pragma_dls(shards, valid_pct=.5)


def counted_loss(dls):
    "Cross-entropy of always predicting each key's shares of values among the training records"
    tok, counts = dls.train.tok, None
    counts = torch.full((tok.n_keys, tok.n_vals), .1)
    for x, y in dls.train: counts.index_put_((x['event_tokens'][x['mlm_mask'], 0], y), torch.ones(len(y)), accumulate=True)
    log_share = (counts/counts.sum(1, keepdim=True)).log()
    keys, y = (torch.cat(c) for c in zip(*[(x['event_tokens'][x['mlm_mask'], 0], y) for x, y in dls.valid]))
    most = log_share.argmax(1)[keys]
    return nn.functional.nll_loss(log_share[keys], y).item(), (most == y).float().mean().item()


def test_a_small_model_beats_counting(dls):
    set_seed(0)
    learn = Learner(dls, TinyModel(dls.train.tok), metrics=accuracy)
    with learn.no_bar(), learn.no_logging(): learn.fit_one_cycle(10, 1e-2)
    loss, right = learn.validate()
    base_loss, base_right = counted_loss(dls)
    assert loss < base_loss-.05 and right > base_right+.02, (loss, base_loss, right, base_right)
    with learn.no_bar(): preds, answers = learn.get_preds()
    assert preds.shape == (len(answers), dls.train.tok.n_vals)
    assert abs((preds.argmax(1) == answers).float().mean().item()-right) < 1e-6


def test_lr_find(dls):
    learn = Learner(dls, TinyModel(dls.train.tok))
    with learn.no_bar(), contextlib.redirect_stdout(io.StringIO()): found = learn.lr_find(show_plot=False)
    assert 0 < found.valley < 10


def test_show_batch_reads_like_values(dls):
    text = str(dls.train.show_batch(show=False))
    assert 'movie_id' in text and 'rating' in text and '→' in text
