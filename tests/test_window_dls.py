"""fastai over stored windows: pairs, loss and metric at what counts, showing, training, predictions by entity and position."""
import json

import numpy as np, polars as pl, pytest, torch, torch.nn.functional as F
from fastai.learner import Learner

from fastseqprep.preprocess import preprocess
from fastseqprep.window_data import StoredWindows
from fastseqprep.window_dls import HitRate, WindowLoss, inputs_of, popularity_hit_rate, predictions_frame, split_targets, targets_of, window_dls
from fastseqprep.window_loader import window_samples


def walks(n=12, length=30, seed=0):
    rng = np.random.default_rng(seed)
    at = (np.arange(length)+rng.integers(0, 6, (n, 1))+(rng.random((n, length)) < .15)) % 6
    return pl.DataFrame(dict(sequenceId=np.repeat([f'person-{i:02d}' for i in range(n)], length), itemPosition=np.tile(np.arange(length), n), place=np.array([*'abcdef'])[at.ravel()],
                             paid=(at*1.5+rng.random((n, length))).ravel(), level=np.repeat(np.arange(n) % 3, length)))


def cut(root, rows=None, **keys):
    keys = {**dict(split_ratios=[.7, .3], window_length=8, window_stride=3, prediction_aligned_splits=[1], prediction_length=2, target_offset=1), **keys}
    return preprocess(dict(project_root=str(root), dataset_name='walks', selected_columns=['place', 'paid'], **keys), walks() if rows is None else rows, progress=False)


@pytest.fixture(scope='module')
def run(tmp_path_factory): return cut(tmp_path_factory.mktemp('run'))


class Table(torch.nn.Module):
    "The next place by the place, and a straight line of what is paid"
    def __init__(self, n, both=True, last=None):
        super().__init__()
        self.scores, self.line, self.both, self.last = torch.nn.Embedding(n, n), torch.nn.Linear(1, 1), both, last
    def forward(self, x):
        p, m = self.scores(x['inputs/place']), self.line(x['inputs/paid'][..., None])[..., 0]
        if self.last: p, m = p[:, -self.last:], m[:, -self.last:]
        return dict(place=p, paid=m) if self.both else p


def n_places(run): return StoredWindows(run).facts['n_classes']['place']


def test_pairs_hold_everything_once(run):
    dls = window_dls(run, batch_size=16, device='cpu')
    for x, y in dls.valid:
        assert not targets_of(x) and 'loss_mask' not in x and set(targets_of(y)) == {'place', 'paid'} and set(inputs_of(x)) == {'place', 'paid'}
        assert x['inputs/paid'].dtype == torch.float32 and x['inputs/place'].dtype == torch.int64
    assert sum(int(y['loss_mask'].sum()) for _, y in dls.valid) == run.report()['rows'][1]
    assert sorted(i for _, y in dls.train for i in y['sample'].tolist()) == list(range(run.windows[0]))
    a, b = ([i for _, y in dls.train for i in y['sample'].tolist()] for _ in range(2))
    assert a != b # another order in each epoch
    a, b = ([i for _, y in dls.valid for i in y['sample'].tolist()] for _ in range(2))
    assert a == b == list(range(run.windows[1]))


@pytest.mark.parametrize('last', [None, 2, 5])
def test_loss_and_metric_against_plain_loops(run, last):
    "Per slot, over all batches; what does not count may be anything"
    dls = window_dls(run, batch_size=7, device='cpu')
    torch.manual_seed(0)
    model = Table(n_places(run), last=last).eval()
    hit = HitRate(2, 'place')
    hit.reset()
    class Now: pass
    hits = asked = 0
    for x, y in dls.valid:
        pred = model(x)
        C = pred['place'].shape[1]
        ce, se, n = 0., 0., 0
        for i, p in np.argwhere(y['loss_mask'].numpy()):
            q = p-(y['loss_mask'].shape[1]-C)
            if q < 0: continue
            t = int(y['targets/place'][i, p])
            ce += F.cross_entropy(pred['place'][i, q], torch.tensor(t)).item()
            se += (pred['paid'][i, q]-y['targets/paid'][i, p]).item()**2
            hits += t in pred['place'][i, q].topk(2).indices.tolist()
            n += 1
        asked += n
        parts = WindowLoss().parts(pred, y)
        assert parts['place'].item() == pytest.approx(ce/n, rel=1e-4) and parts['paid'].item() == pytest.approx(se/n, rel=1e-4)
        assert WindowLoss(dict(paid=3.))(pred, y).item() == pytest.approx(ce/n+3*se/n, rel=1e-4)
        wild = {k: torch.where(y['loss_mask'][:, -C:].reshape(*y['loss_mask'][:, -C:].shape, *[1]*(v.ndim-2)), v, torch.full_like(v, 1e6)) for k, v in pred.items()}
        assert WindowLoss()(wild, y).item() == pytest.approx((ce+se)/n, rel=1e-4)
        now = Now()
        now.pred, now.yb = pred, (y,)
        hit.accumulate(now)
    assert hit.value == pytest.approx(hits/asked)


def test_nothing_asked_for_has_no_loss_but_a_gradient():
    y = {'targets/a': torch.zeros(2, 3, dtype=torch.int64), 'loss_mask': torch.zeros(2, 3, dtype=torch.bool), 'sample': torch.arange(2)}
    p = torch.randn(2, 3, 4, requires_grad=True)
    loss = WindowLoss()(p, y)
    loss.backward()
    assert loss.item() == 0 and not p.grad.any()


def test_popularity_against_plain_counting(run):
    train, valid = (window_samples(run, split=i, targets='place') for i in (0, 1))
    rows = walks()
    fitted = rows.filter(pl.col('itemPosition') < 21)
    asked = rows.filter(pl.col('itemPosition') >= 21)['place'].to_list()
    counts = train.counts('place')
    best = set(np.argsort(-counts, kind='stable')[:2].tolist())
    ids = train.windows.facts['id_maps']['place']
    assert popularity_hit_rate(train, valid, 'place', 2) == pytest.approx(np.mean([ids[p] in best for p in asked]))
    assert counts[3:].all() and counts.sum() >= len(fitted)-12


@pytest.mark.parametrize('keys', [{}, dict(write_format='pt', merge_output=False), dict(layout='wide'), dict(write_format='bin')])
def test_trains_and_beats_popularity(keys, tmp_path):
    run = cut(tmp_path, **keys)
    dls = window_dls(run, targets='place', batch_size=16, device='cpu')
    torch.manual_seed(0)
    learn = Learner(dls, Table(n_places(run), both=False), metrics=HitRate(1))
    with learn.no_logging(): learn.fit(6, .1)
    got = learn.recorder.values[-1][-1]
    assert got > popularity_hit_rate(dls.train.samples, dls.valid.samples, 'place', 1)+.3
    frame = predictions_frame(dls.valid, learn)
    truth = walks().filter(pl.col('itemPosition') >= 21).sort('sequenceId', 'itemPosition')
    assert frame.select('sequenceId', 'itemPosition', 'place').equals(truth.select('sequenceId', 'itemPosition', 'place'))
    assert frame.select((pl.col('place') == pl.col('place_guess')).mean()).item() == pytest.approx(got)
    preds, y = learn.get_preds()
    assert y['sample'].tolist() == list(range(len(dls.valid.samples))) and len(preds) == len(y['sample'])


def test_predictions_of_numbers_and_of_several_guesses(run):
    dls = window_dls(run, batch_size=16, device='cpu')
    frame = predictions_frame(dls.valid, Table(n_places(run), last=2), k=3)
    truth = walks().filter(pl.col('itemPosition') >= 21).sort('sequenceId', 'itemPosition')
    assert np.allclose(frame['paid'], truth['paid'], atol=1e-4) and frame['place_guess'].list.len().unique().to_list() == [3]
    assert all(a >= b >= c for a, b, c in frame['place_p'].to_list())


def test_show_batch_decodes(run):
    dls = window_dls(run, batch_size=4, device='cpu')
    first = repr(dls.valid.show_batch(max_n=2, show=False))
    row = walks().filter(pl.col('sequenceId') == 'person-00').filter(pl.col('itemPosition') == 29)
    last = repr(dls.valid.show_batch(split_targets(dls.valid.loader.batch(np.array([int(np.flatnonzero(dls.valid.samples.windows.block(np.arange(run.windows[1])).sequence_ids == 0)[-1])]))), show=False))
    assert 'person-00' in first and '→ place' in first and f"{row['paid'][0]:.4g}" in last
    out = Table(n_places(run))(dls.valid.one_batch()[0])
    assert 'guess place' in repr(dls.valid.show_results(dls.valid.one_batch(), out, show=False))
    assert '<table>' in dls.valid.show_batch(show=False)._repr_html_()


def test_bert_and_other_objectives(run):
    dls = window_dls(run, targets='place', batch_size=16, device='cpu', objective='bert')
    x, y = dls.one_batch()
    assert (y['loss_mask'] <= x['bert_mask']).all() and y['loss_mask'].any()
    again = window_dls(run, targets='place', batch_size=16, device='cpu', objective='bert').valid
    for (xa, _), (xb, _) in zip(dls.valid, again): assert torch.equal(xa['inputs/place'], xb['inputs/place'])
    for keys in (dict(objective='final_value'), dict(objective='next_occurrence', trigger=('place', ['a', 'c']))):
        x, y = window_dls(run, targets='place', batch_size=16, device='cpu', **keys).one_batch()
        if 'trigger' in keys:
            ids = StoredWindows(run).facts['id_maps']['place']
            assert set(y['targets/place'][y['loss_mask']].tolist()) <= {ids['a'], ids['c']}


def test_curriculum_and_workers_and_resume(tmp_path):
    run = cut(tmp_path, curriculum_column='level', write_format='pt', merge_output=False, prediction_aligned_splits=[], prediction_length=None, target_offset=None)
    dls = window_dls(run, batch_size=8, device='cpu', curriculum='level', num_workers=2)
    v = dls.train.samples.curriculum('level')
    got = [i for _, y in dls.train for i in y['sample'].tolist()]
    assert (np.diff(v[got]) >= 0).all() and sorted(got) == list(range(len(v)))
    plain = window_dls(run, batch_size=8, device='cpu', curriculum='level')
    it = iter(plain.train)
    seen = [next(it)[1]['sample'].tolist() for _ in range(2)]
    state = json.loads(json.dumps(plain.train.state_dict()))
    rest = [y['sample'].tolist() for _, y in it]
    other = window_dls(run, batch_size=8, device='cpu', curriculum='level').train
    other.load_state_dict(state)
    assert [y['sample'].tolist() for _, y in other] == rest and sum(seen+rest, []) == got


def test_what_cannot_be_is_refused(run, tmp_path):
    for bad, match in ((run.splits[0], 'pair'), ([run.splits[0]], 'pair')):
        with pytest.raises(TypeError, match=match): window_dls(bad)
    with pytest.raises(ValueError, match="no feature 'plce'"): window_dls(run, targets='plce')
    dls = window_dls(run, batch_size=8, device='cpu')
    with pytest.raises(ValueError, match='name one with target='):
        h = HitRate()
        h.reset()
        class Now: pass
        now = Now()
        x, y = dls.one_batch()
        now.pred, now.yb = Table(n_places(run))(x), (y,)
        h.accumulate(now)
    with pytest.raises(ValueError, match='dict of predictions'): WindowLoss()(torch.zeros(8, 7, 9), dls.one_batch()[1])
    assert isinstance(window_dls([run.splits[0], run.splits[1]], batch_size=8, device='cpu').one_batch()[0], dict)
