"""fastai over stored windows: pairs, loss and metric at what counts, showing, training, predictions by entity and position."""
import json, warnings

import numpy as np, polars as pl, pytest, torch, torch.nn.functional as F
from fastai.learner import Learner

from fastseqprep.preprocess import preprocess
from fastseqprep.span_mask import SpanMask
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


# ---------------------------------------------------------------- numbers that were not standardised
@pytest.mark.parametrize('normalize', [True, False])
def test_numbers_are_shown_as_they_were(normalize, tmp_path):
    "With and without an encoder; without standardising there is nothing to undo"
    run = cut(tmp_path, normalize_real_columns=normalize)
    dls = window_dls(run, batch_size=16, device='cpu')
    truth = walks().filter(pl.col('itemPosition') >= 21).sort('sequenceId', 'itemPosition')
    for tok in (dls.tok, None):
        dls.valid.tok = tok
        frame = predictions_frame(dls.valid, Table(n_places(run)))
        assert np.allclose(frame['paid'], truth['paid'], atol=1e-4) and frame['place'].to_list() == truth['place'].to_list()
        assert frame['sequenceId'].to_list() == truth['sequenceId'].to_list()
        x, y = split_targets(dls.valid.loader.batch(np.array([0])))
        [(_, lines)] = dls.valid.show_batch((x, y), show=False).tables
        seq, at = walks().filter(pl.col('sequenceId') == 'person-00')['paid'].to_list(), [int(p) for p in dict(lines)['position'] if p]
        assert [float(v) for v in dict(lines)['paid'] if v] == pytest.approx([seq[p] for p in at], rel=1e-3)


# ---------------------------------------------------------------- splits by their paths
@pytest.mark.parametrize('keys', [dict(write_format='pt', merge_output=False), dict(), dict(write_format='bin', merge_output=False)])
def test_splits_by_path_know_their_run(keys, tmp_path):
    run = cut(tmp_path, **keys)
    want = window_dls(run, batch_size=4, device='cpu')
    for what in ([run.splits[0], run.splits[1]], [str(run.splits[0]), str(run.splits[1])], [StoredWindows(s) for s in run.splits]):
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            dls = window_dls(what, batch_size=4, device='cpu')
        assert dls.tok is not None and repr(dls.valid.show_batch(show=False)) == repr(want.valid.show_batch(show=False))
    for tok in (dls.tok, None): # no encoder: from the run's file of ids
        dls.valid.tok = tok
        assert 'sequence person-00' in repr(dls.valid.show_batch(show=False))
        assert set(predictions_frame(dls.valid, Table(n_places(run)))['sequenceId']) == {f'person-{i:02d}' for i in range(12)}


def test_a_run_without_an_encoder_says_so(tmp_path):
    run = cut(tmp_path, write_format='pt', merge_output=False)
    for f in (tmp_path/'data').rglob('*manifest.json'): f.unlink()
    path = tmp_path/'configs'/'metadata_configs'/'walks.json'
    meta = json.loads(path.read_text())
    meta['column_data_types']['paid'] = 'Decimal(3)'
    path.write_text(json.dumps(meta))
    with pytest.warns(UserWarning, match='labels of the metadata.*Decimal'): dls = window_dls(run.splits, batch_size=4, device='cpu')
    assert dls.tok is None and 'sequence person-00' in repr(dls.valid.show_batch(show=False))
    path.unlink()
    assert window_dls(run.splits, batch_size=4, device='cpu').tok is None


# ---------------------------------------------------------------- where an answer belongs
@pytest.mark.parametrize('keys', [{}, dict(objective='final_value'), dict(objective='next_occurrence', trigger=('item', ['b', 'e'])), dict(target_offset=2), dict(objective='bert')], ids=lambda k: k.get('objective', 'causal'))
def test_answers_stand_at_the_position_of_their_target(keys, tmp_path):
    "Items that tell their position"
    n, W = 40, 6
    rows = pl.DataFrame(dict(sequenceId=['s']*n, itemPosition=np.arange(n), item=['abcdefg'[p % 7] for p in range(n)]))
    run = preprocess(dict(project_root=str(tmp_path), dataset_name='d', split_ratios=[.6, .4], window_length=W, window_stride=1, max_target_offset=2), rows, progress=False)
    dls = window_dls(run, targets='item', batch_size=8, device='cpu', context_length=4, **keys)
    model = torch.nn.Embedding(10, 10)
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.e = model
        def forward(self, x): return self.e(x['inputs/item'])
    frame = predictions_frame(dls.valid, Model())
    assert len(frame) and frame['item'].to_list() == ['abcdefg'[p % 7] for p in frame['itemPosition']]
    ahead = frame['itemPosition']-frame['inputPosition']
    if keys.get('objective') == 'final_value': assert ahead.min() == 1 and ahead.max() == 4
    elif keys.get('objective') == 'next_occurrence': assert set(frame['item']) == {'b', 'e'} and ahead.min() == 1
    else: assert set(ahead) == {0 if 'objective' in keys else keys.get('target_offset', 1)}


# ---------------------------------------------------------------- items with children
def baskets(n=8, length=20, seed=0):
    "Children of items: 1 to 3 articles, whose prices say which they are"
    rng = np.random.default_rng(seed)
    out = []
    for i in range(n):
        for p in range(length):
            for c in range(rng.integers(1, 4)): out.append((f'u{i}', p, c, 'xy'[p % 2], f'art{rng.integers(0, 9)}', float(rng.integers(1, 99))))
    return pl.DataFrame(out, schema=['sequenceId', 'itemPosition', 'line', 'shop', 'art', 'price'], orient='row')


@pytest.fixture(scope='module')
def nested(tmp_path_factory):
    return preprocess(dict(project_root=str(tmp_path_factory.mktemp('nested')), dataset_name='b', split_ratios=[.7, .3], window_length=6, window_stride=3, write_format='pt', merge_output=False,
                           selected_columns=['shop', 'art', 'price'], depth_layouts=dict(basket=dict(position_column='line', columns=['art', 'price'], context_length=3))), baskets(), progress=False)


def test_only_children_that_are_there_are_shown(nested):
    dls = window_dls(nested, targets=['shop', 'art', 'price'], batch_size=8, device='cpu')
    df = baskets().group_by('sequenceId', 'itemPosition', maintain_order=True).agg('art', 'price')
    want = {(s, p): (' '.join(a), ' '.join(f'{v:.4g}' for v in x)) for s, p, a, x in df.iter_rows()}
    for tok in (dls.tok, None):
        dls.valid.tok = tok
        x, y = dls.valid.one_batch()
        out = dict(shop=torch.zeros(8, 5, 5), art=torch.zeros(8, 5, 3, 12), price=torch.zeros(8, 5, 3, 1))
        for head, lines in dls.valid.show_results((x, y), out, max_n=8, show=False).tables:
            lines, seq = dict(lines), head.rsplit(' ', 1)[1]
            for p, art, price, target, guess in zip(lines['position'], lines['art'], lines['price'], lines['→ art'], lines['guess art']):
                if p: assert (art, price) == want[seq, int(p)]
                if target: assert target == want[seq, int(p)+1][0] and len(guess.split()) == len(target.split())
            assert any(lines['→ art'])


@pytest.mark.parametrize('deep', [False, True])
def test_hidden_values_are_shown_as_hidden(deep, run, nested):
    "Whatever a model is not told is [mask], numbers and children too; everything else is what it reads"
    names = ('shop', 'art', 'price') if deep else ('place', 'paid')
    dls = window_dls(nested if deep else run, targets=names[0], batch_size=32, device='cpu', objective='bert', hide=SpanMask(.5, masked=.5, random=.2))
    for tok in (dls.tok, None):
        dls.valid.tok = tok
        x, y = dls.valid.one_batch()
        shown = dls.valid.show_batch((x, y), max_n=32, max_slots=99, show=False)
        masked = x[f'inputs/{names[0]}']==2
        assert masked.any() and (masked <= x['bert_mask']).all() and not (masked==x['bert_mask']).all()
        for (_, lines), m, real in zip(shown.tables, masked.tolist(), x['attention_valid_mask'].tolist()):
            lines = dict(lines)
            for c in names: assert [t=='[mask]' for t in lines[c]]==m and [t!='' for t in lines[c]]==real, (c, lines[c])
            assert '[mask]' not in lines[f'→ {names[0]}']


def test_ready_samples_are_taken_as_they_are(run):
    "Two WindowSamples make loaders; what would be left unheeded is refused"
    pair = [window_samples(run, split=i, targets='place', float_dtype='float32') for i in (0, 1)]
    ready, dls = window_dls(pair, batch_size=8, device='cpu'), window_dls(run, targets='place', batch_size=8, device='cpu')
    for (x, y), (x2, y2) in zip(ready.valid, dls.valid):
        for a, b in ((x, x2), (y, y2)):
            assert a.keys()==b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert type(ready.tok)==type(dls.tok) and 'person-00' in repr(ready.valid.show_batch(show=False))
    for keys in (dict(targets='place'), dict(inputs=['paid']), dict(valid_view=dict(window_stride=1)), dict(context_length=3), dict(float_dtype='float64')):
        with pytest.raises(ValueError, match=f'{[*keys][0]}: samples are made already'): window_dls(pair, device='cpu', **keys)
    with pytest.raises(TypeError, match='two WindowSamples'): window_dls((pair[0], run.splits[1]), device='cpu')


def test_sides_that_are_not_there(run, tmp_path):
    one = cut(tmp_path, split_ratios=[1.], prediction_aligned_splits=[], prediction_length=None, target_offset=None)
    with pytest.raises(ValueError, match='valid=1: the result has 1 split, .*split_ratios'): window_dls(one)
    with pytest.raises(ValueError, match='train=3: the result has 2 splits'): window_dls(run, train=3)
    with pytest.raises(TypeError, match='or a pair'): window_dls([*run.splits, run.splits[0]])
    dls = window_dls(run, targets='place', batch_size=8, device='cpu')
    with pytest.raises(TypeError, match='such as dls.valid'): predictions_frame(dls, Table(n_places(run), both=False))
    with pytest.raises(TypeError, match='by a list: make loaders of other windows'): dls.test_dl([0, 1])


def test_loss_and_counts_of_children(nested):
    "Against plain loops; children that are not there may be anything"
    dls = window_dls(nested, targets=['shop', 'art', 'price'], batch_size=8, device='cpu')
    assert dls.valid.samples.layouts == dls.train_ds.loss_func.layouts == dict(art='basket', price='basket')
    x, y = dls.valid.one_batch()
    torch.manual_seed(0)
    there = y['target_depth_valid_mask:basket']
    assert there.any() and not there[y['loss_mask']].all()
    pred = dict(shop=torch.randn(8, 5, 5), art=torch.randn(8, 5, 3, 12), price=torch.randn(8, 5, 3))
    ce, se = [], []
    for i, p, d in np.argwhere((y['loss_mask'][:, :, None] & there).numpy()):
        ce.append(F.cross_entropy(pred['art'][i, p, d], y['targets/art'][i, p, d]).item())
        se.append((pred['price'][i, p, d]-y['targets/price'][i, p, d]).item()**2)
    wild = {**pred, 'art': torch.where(there[..., None], pred['art'], 1e9), 'price': torch.where(there, pred['price'], torch.nan)}
    for loss in (WindowLoss(), dls.train_ds.loss_func):
        parts = loss.parts(wild, y)
        assert parts['art'].item() == pytest.approx(np.mean(ce), rel=1e-4) and parts['price'].item() == pytest.approx(np.mean(se), rel=1e-4)
    hit = HitRate(12, 'art')
    hit.reset()
    class Now: pass
    now = Now()
    now.pred, now.yb = pred, (y,)
    hit.accumulate(now)
    assert hit.value == 1 and hit.asked == len(ce)
    train, valid = dls.train.samples, dls.valid.samples
    rows = baskets().filter(pl.col('itemPosition') >= 14)
    assert valid.counts('art').sum() == sum(int((b['loss_mask'][:, :, None] & b['target_depth_valid_mask:basket']).sum()) for b in valid.batches_of()) and valid.counts('art').sum() <= len(rows)
    assert 0 < popularity_hit_rate(train, valid, 'art', 1) < popularity_hit_rate(train, valid, 'art', 9) == 1
    with pytest.raises(ValueError, match="'art' is of children"): predictions_frame(dls.valid, lambda x: pred)


def test_texts_are_shown_as_texts(tmp_path):
    words = ['red shoes', 'a blue hat', 'green']
    rows = pl.DataFrame(dict(sequenceId=np.repeat([f'u{i}' for i in range(6)], 20), itemPosition=np.tile(np.arange(20), 6), kind=[*'ab']*60, title=[words[i % 3] for i in range(120)]))
    run = preprocess(dict(project_root=str(tmp_path), dataset_name='t', split_ratios=[.7, .3], window_length=6, window_stride=3, write_format='pt', merge_output=False, text_columns=dict(title=dict(max_tokens=8))), rows, progress=False)
    dls = window_dls(run.splits, targets='kind', batch_size=4, device='cpu')
    [(head, lines)] = dls.valid.show_batch(max_n=1, show=False).tables
    lines = dict(lines)
    by_place = {(s, p): t for s, p, t in rows.select('sequenceId', 'itemPosition', 'title').iter_rows()}
    assert [t for t in lines['title'] if t] == [by_place[head.rsplit(' ', 1)[1], int(p)] for p in lines['position'] if p]


def test_popularity_guesses_values_only():
    "Ids that stand for no value are no guesses, though they may be asked for most"
    from fastseqprep.blocks import WindowBlock
    from fastseqprep.window_samples import WindowSamples, WindowView
    z = np.zeros(4, np.int64)
    b = WindowBlock(np.arange(4), z, z, z, z, z+6, dict(x=np.array([[0, 0, 0, 0, 3, 4]]*4)))
    for ids, want in ((dict(x={'a': 3, 'b': 4}), 1/5), ({}, 3/5)):
        s = WindowSamples(StoredWindows.of(b, 1, id_maps=ids), WindowView(5))
        assert popularity_hit_rate(s, s, 'x', 1) == pytest.approx(want)
