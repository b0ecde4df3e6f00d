"""Views of stored windows: the recorded batches of sequifier 3.1.1.0, all small cases against a slow oracle, formats, ranks, workers, resuming."""
import itertools, json, pickle
from pathlib import Path

import numpy as np, polars as pl, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st

from fastseqprep.blockfiles import block_writer, read_block
from fastseqprep.blocks import BlockSchema, WindowBlock
from fastseqprep.payload import save_pt_payload
from fastseqprep.preprocess import preprocess
from fastseqprep.span_mask import SpanMask
from fastseqprep.window_data import StoredWindows
from fastseqprep.window_samples import WindowSamples, WindowView
from fastseqprep.window_loader import WindowLoader, window_dl, window_samples
from fastseqprep.masking import record_keys

TABLE, LOADER = Path(__file__).parent/'cases'/'table', Path(__file__).parent/'cases'/'loader'
CASES = sorted(p.stem for p in LOADER.glob('*.json'))


def array(a): return np.array(a['values'], a['dtype'].lower()).reshape(a['shape'])


# ---------------------------------------------------------------- the recorded batches
def lay_pt(path, arrays, curriculum):
    "A PT file as sequifier writes it"
    t = {k: torch.from_numpy(array(a)) for k, a in arrays.items()}
    named = lambda prefix: {k.removeprefix(prefix): v for k, v in t.items() if k.startswith(prefix)}
    coords = {k: v for k, v in t.items() if '/' not in k and k != 'sample_positions'}
    torch.save(dict(format='sequifier_tensor_batch', version=5, sequences=named('sequences/'), **coords,
                    metadata=dict(depth_valid_masks=named('depth_valid_masks/'), sample_positions=t.get('sample_positions'), curriculum_columns=list(curriculum))), path)


def lay(root, case):
    "The recorded outputs of a run, as files"
    (root/'data').mkdir(parents=True)
    if case.startswith('71'):
        d = json.loads((LOADER/'stored'/f'{case}.json').read_text())
        (root/'data'/'d-split0').mkdir()
        lay_pt(root/'data'/'d-split0'/d['file'], d['arrays'], [])
        (root/'data'/'d-split0'/'metadata.json').write_text(json.dumps(d['metadata']))
        return
    d = json.loads((TABLE/case/'expected.json').read_text(encoding='utf-8'))
    (root/'configs'/'metadata_configs').mkdir(parents=True)
    for name, meta in d['metadata'].items(): (root/'configs'/'metadata_configs'/name).write_text(json.dumps(meta))
    for name, what in d['data'].items():
        path = root/'data'/name
        path.parent.mkdir(exist_ok=True)
        if name.endswith('.json'): path.write_text(json.dumps(what))
        elif name.endswith('.pt'): lay_pt(path, what['arrays'], what['curriculum_columns'])
        else: pl.DataFrame([pl.Series(c, v['values'], dtype=getattr(pl, v['dtype'])) for c, v in what['columns'].items()]).write_parquet(path)


def opened(case, root, mmap):
    d = json.loads((LOADER/f'{case}.json').read_text())
    lay(root, d['case'])
    path = root/'data'/f"{d['dataset']}-split{d['split']}{'' if d['storage'] == 'folder' else '.'+d['format']}"
    windows = StoredWindows(path, mmap=mmap, file_order=d.get('file_order', 'stored'))
    return d, WindowSamples(windows, WindowView(d['context_length'], d['target_offset'], d['window_stride'], objective=d['objective']), d['inputs'], d['targets'])


def test_all_cases_are_there(): assert len(CASES) == 13


@pytest.mark.parametrize('mmap', [True, False])
@pytest.mark.parametrize('case', CASES)
def test_recorded_batches(case, mmap, tmp_path):
    "Inputs, targets and masks in order, and the shuffled orders. Nothing of part 1 applies: stored windows are read as they are"
    d, samples = opened(case, tmp_path, mmap)
    assert len(samples) == d['samples']
    loader = WindowLoader(samples, d['batch_size'], rank=0, world_size=1)
    got = list(loader.batches(0))
    assert [len(b['sample']) for b in got] == [d['batch_size']]*(d['samples']//d['batch_size'])+[d['samples'] % d['batch_size']]*(d['samples'] % d['batch_size'] > 0)
    for key, a in d['arrays'].items():
        kind, _, name = key.partition('/')
        if kind != 'plain': continue
        have = torch.cat([b[name.removeprefix('metadata/')] for b in got]).numpy()
        want = array(a)
        assert have.dtype == want.dtype and have.shape == want.shape, key
        np.testing.assert_array_equal(have, want, err_msg=key)
    shuffled = WindowLoader(samples, d['batch_size'], True, order='sequifier', seed=d['seed'], curriculum=d.get('curriculum'), rank=0, world_size=1)
    for epoch in (0, 1):
        assert torch.cat([b['sample'] for b in shuffled.batches(epoch)]).tolist() == d['arrays'][f'order/e{epoch}']['values'], f'epoch {epoch}'


@pytest.mark.parametrize('case', ['01-right-aligned', '10-pt-folder-shards', '14-curriculum-pt'])
def test_ranks_take_the_same_samples_as_sequifier(case, tmp_path):
    "Rank r takes every W-th sample of the recorded order, in batches of its own size"
    d, samples = opened(case, tmp_path, True)
    order, W, own = d['arrays']['order/e0']['values'], 2, d['batch_size']
    for r in range(W):
        l = WindowLoader(samples, own*W, True, order='sequifier', seed=d['seed'], curriculum=d.get('curriculum'), rank=r, world_size=W)
        assert [s for b in l.batches(0) for s in b['sample'].tolist() if s >= 0] == order[r::W]


# ---------------------------------------------------------------- against a slow oracle
def slow_samples(b, view, M):
    "Every sample of every window, slot by slot"
    W, C, o = b.width, view.context_length, view.target_offset
    R = W-M-C
    out = []
    for w in range(b.n):
        pad, start, lo, hi = (int(x[w]) for x in (b.left_pad_lengths, b.start_item_positions, b.split_start_item_positions, b.split_end_item_positions))
        if view.steps > 1: starts = [R-(view.steps-1-k)*view.prediction_length for k in range(view.steps)]
        elif view.window_stride is None: starts = [R]
        else: starts = [a for a in range(R+1) if (R-a) % view.window_stride == 0 and a+o+C-1 >= max(pad, lo-start)]
        for a in starts:
            s = dict(window=w, start=a, attention_valid_mask=[a+p >= pad for p in range(C)], target_valid_mask=[a+p+o >= pad and lo <= start+a+p+o < hi for p in range(C)],
                     inputs={c: [v[w][a+p] for p in range(C)] for c, v in b.features.items()}, targets={c: [v[w][a+p+o] for p in range(C)] for c, v in b.features.items()},
                     depth={k: [m[w][a+p] for p in range(C)] for k, m in b.depth_masks.items()})
            s['loss_mask'] = [ok and p >= C-(view.prediction_length or C) for p, ok in enumerate(s['target_valid_mask'])]
            out.append(s)
    return out


def blocks_of(W, depth=None, rng=np.random.default_rng(0)):
    "A window for every padding and all bounds of the split around it"
    rows = [(pad, lo, hi) for pad in range(W) for lo in (-3, 0, *range(1, W)) for hi in range(max(lo+1, pad+1, 1), W+2)]
    n = len(rows)
    pad, lo, hi = (np.array(x) for x in zip(*rows))
    start = rng.integers(-5, 5, n)
    x = rng.integers(3, 9, (n, W))*(np.arange(W) >= pad[:, None])
    feats = dict(x=x, y=x*.5)
    masks = {}
    if depth:
        masks = dict(sub=(rng.random((n, W, depth)) < .5) & (np.arange(W) >= pad[:, None])[..., None])
        feats['z'] = rng.integers(3, 9, (n, W, depth))*masks['sub']
    return WindowBlock(np.arange(n), np.zeros(n, int), start, pad, start+lo, start+hi, feats, masks)


def agree(b, view, M, **kwargs):
    samples = WindowSamples(StoredWindows.of(b, M), view, **kwargs)
    want = slow_samples(b, view, M)
    assert len(samples) == len(want)
    if not want: return
    got = samples.gather(np.arange(len(samples)))
    for key in ('attention_valid_mask', 'target_valid_mask', 'loss_mask'): np.testing.assert_array_equal(got[key], [s[key] for s in want], err_msg=key)
    for c in b.features: np.testing.assert_array_equal(got[f'inputs/{c}'], [s['inputs'][c] for s in want])
    for c in samples.targets: np.testing.assert_array_equal(got[f'targets/{c}'], [s['targets'][c] for s in want])
    for k in b.depth_masks: np.testing.assert_array_equal(got[f'depth_valid_mask:{k}'], [s['depth'][k] for s in want])
    np.testing.assert_array_equal(got['item_position'], [b.start_item_positions[s['window']]+s['start'] for s in want])
    np.testing.assert_array_equal(got['sequence_id'], [b.sequence_ids[s['window']] for s in want])


@pytest.mark.parametrize('W', range(1, 7))
def test_views_and_masks_of_all_small_windows(W):
    b = blocks_of(W)
    for M, C, o, s in itertools.product(range(0, W), range(1, W+1), range(0, W), (None, 1, 2, 3, 5)):
        if o > M or C+M > W: continue
        for P in (None, 1, C):
            if o == 0 and P not in (None, C): continue
            agree(b, WindowView(C, o, s, P, objective='causal' if o else 'bert'), M)
            if o and P and s is None:
                for steps in (2, 3):
                    if W-M-C-(steps-1)*P >= 0: agree(b, WindowView(C, o, None, P, steps), M)


@pytest.mark.parametrize('W,depth', [(3, 1), (4, 2), (5, 3)])
def test_masks_of_children(W, depth):
    b = blocks_of(W, depth)
    for M, C, s in itertools.product(range(1, W), range(1, W), (None, 1, 2)):
        if C+M <= W: agree(b, WindowView(C, 1, s), M, targets=['x', 'z'])


def test_what_does_not_fit_is_refused():
    b = StoredWindows.of(blocks_of(4), 1)
    for bad in (WindowView(4), WindowView(2, 2), WindowView(2, prediction_length=2, steps=2)):
        with pytest.raises(ValueError): WindowSamples(b, bad)


def slow_targets(view, targets, trigger, valid, ids):
    out, ok = [], []
    for t, x, m in zip(targets, trigger, valid):
        C = len(t)
        if view.objective == 'final_value': out.append([t[-1]]*C); ok.append(list(m)); continue
        row, has = [], []
        for p in range(C):
            q = next((q for q in range(p, C) if m[q] and x[q] in ids), None)
            row.append(None if q is None else t[q])
            has.append(bool(m[p]) and q is not None)
        out.append(row); ok.append(has)
    return out, ok


@given(st.integers(2, 7), st.integers(0, 2**32-1))
@settings(max_examples=40, deadline=None)
def test_objectives(W, seed):
    rng = np.random.default_rng(seed)
    b = blocks_of(W, rng=rng)
    windows = StoredWindows.of(b, 1, id_maps=dict(x={str(10*i): i for i in range(3, 9)}))
    plain = WindowSamples(windows, WindowView(W-1, window_stride=1)).gather(np.arange(len(WindowSamples(windows, WindowView(W-1, window_stride=1)))))
    for view in (WindowView(W-1, window_stride=1, objective='final_value'), WindowView(W-1, window_stride=1, objective='next_occurrence', trigger=('x', [40, 70])),
                 WindowView(W-1, window_stride=1, prediction_length=1, objective='next_occurrence', trigger=('x', [40, 70]))):
        s = WindowSamples(windows, view, targets=['y'])
        got = s.gather(np.arange(len(s)))
        want, ok = slow_targets(view, plain['targets/y'], plain['targets/x'], plain['target_valid_mask'], {4, 7})
        ok = np.array(ok)
        if view.prediction_length: ok[:, :-view.prediction_length] = False
        np.testing.assert_array_equal(got['loss_mask'], ok)
        np.testing.assert_array_equal(got['target_valid_mask'], plain['target_valid_mask'])
        for g, w, m in zip(got['targets/y'], want, ok): assert [a for a, k in zip(g, m) if k] == [a for a, k in zip(w, m) if k]


@given(st.integers(1, 30), st.floats(0, 1), st.integers(1, 5), st.integers(0, 2**32-1))
@settings(max_examples=80, deadline=None)
def test_spans_hide_an_exact_share_of_rows(C, share, span, seed):
    valid = np.arange(C) >= np.arange(C+1)[:, None]
    keys = record_keys(np.arange(C+1, dtype=np.uint64), seed, 0)
    hidden = SpanMask(share, span).spans(valid, keys)
    n = valid.sum(1)
    assert not (hidden & ~valid).any()
    assert hidden.sum(1).tolist() == np.minimum(np.maximum((n*share+1e-9).astype(int), share > 0), n).tolist()


def test_what_is_hidden_does_not_depend_on_the_batch():
    windows = StoredWindows.of(blocks_of(6), 1, n_classes=dict(x=9))
    s = WindowSamples(windows, WindowView(5, 0, 1, objective='bert'), hide=SpanMask(.4, 2, .5, .3, seed=3))
    alone, other = s.gather(np.arange(len(s)), epoch=2), s.gather(np.arange(len(s)), epoch=3)
    order = np.random.default_rng(0).permutation(len(s))
    for part in np.array_split(order, 7):
        b = s.gather(part, epoch=2)
        for k in b: np.testing.assert_array_equal(b[k], alone[k][part], err_msg=k)
    assert (alone['bert_mask'] != other['bert_mask']).any()
    kept = ~alone['bert_mask']
    np.testing.assert_array_equal(alone['inputs/x'][kept], alone['targets/x'][kept])
    assert set(np.unique(alone['inputs/x'][alone['bert_mask']])) <= set(range(0, 9)) and (alone['inputs/x'][alone['bert_mask']] == 2).any()


# ---------------------------------------------------------------- formats
FORMATS = [('parquet', 'long'), ('parquet', 'wide'), ('csv', 'long'), ('arrow', 'wide'), ('bin', 'wide'), ('pt', 'wide')]


def stored(root, b, fmt, layout, pieces=1, depth=None, shuffled=False):
    "A split in a format: a file, or with more pieces a folder of shards"
    layouts = {'sub': dict(position_column='k', columns=['z'], context_length=depth, allow_gaps=True)} if depth else {}
    schema = BlockSchema.of(b, layouts)
    meta = dict(max_target_offset=1, column_data_types=schema.features, n_classes=dict(x=9), stored_window_layout_version=2, depth_layouts=layouts)
    suffix = '' if fmt == 'bin' else f'.{fmt}'
    def write(path, block):
        with block_writer(fmt, layout, path, schema) as w: w.write(block)
    if pieces == 1:
        path = root/f'd-split0{suffix}'
        write(path, b)
        (root/'configs'/'metadata_configs').mkdir(parents=True)
        (root/'configs'/'metadata_configs'/'d.json').write_text(json.dumps(dict(meta, window_lengths=[b.width])))
        # beside a folder that is not called data, configs lie one level up
        return path, dict(meta, window_lengths=[b.width])
    folder = root/'d-split0'
    folder.mkdir()
    cuts = np.linspace(0, b.n, pieces+1).astype(int)
    names = [f's{i:02d}{suffix}' for i in range(pieces)]
    for name, lo, hi in zip(names, cuts[:-1], cuts[1:]): write(folder/name, b[lo:hi])
    (folder/'metadata.json').write_text(json.dumps(dict(meta, split_index=0, window_length=b.width, batch_files=[dict(path=n) for n in names])))
    return folder, None


@pytest.mark.parametrize('pieces', [1, 5])
@pytest.mark.parametrize('fmt,layout', FORMATS)
def test_formats_give_equal_samples(fmt, layout, pieces, tmp_path):
    b = blocks_of(5)
    path, meta = stored(tmp_path, b, fmt, layout, pieces)
    want = WindowSamples(StoredWindows.of(b, 1), WindowView(3, window_stride=1))
    want = want.gather(np.arange(len(want)))
    for mmap in (True, False):
        for _ in range(2): # the second time from the cache, where there is one
            s = WindowSamples(StoredWindows(path, mmap=mmap, metadata=meta), WindowView(3, window_stride=1))
            for part in (np.arange(len(s)), np.random.default_rng(1).permutation(len(s))[:50]):
                got = s.gather(part)
                assert list(got) == list(want)
                for k in got:
                    np.testing.assert_array_equal(got[k], part if k == 'sample' else want[k][part], err_msg=k)
                    assert got[k].dtype == want[k].dtype
            again = pickle.loads(pickle.dumps(s))
            np.testing.assert_array_equal(again.gather([3, 1])['inputs/y'], s.gather([3, 1])['inputs/y'])


@pytest.mark.parametrize('pieces', [1, 3])
@pytest.mark.parametrize('fmt', ['parquet', 'arrow', 'bin', 'pt'])
def test_formats_give_equal_children(fmt, pieces, tmp_path):
    b = blocks_of(4, 2)
    path, meta = stored(tmp_path, b, fmt, 'wide', pieces, depth=2)
    want = WindowSamples(StoredWindows.of(b, 1), WindowView(2, window_stride=1))
    want = want.gather(np.arange(len(want)))
    for mmap in (True, False):
        s = WindowSamples(StoredWindows(path, mmap=mmap, metadata=meta), WindowView(2, window_stride=1))
        got = s.gather(np.arange(len(s)))
        for k in want: np.testing.assert_array_equal(got[k], want[k], err_msg=k)


@pytest.mark.parametrize('fmt', ['parquet', 'csv'])
def test_rows_of_long_files_are_put_in_order(fmt, tmp_path):
    "A long file whose windows, or whose features within a window, stand in another order"
    b = blocks_of(4)
    path, meta = stored(tmp_path, b, fmt, 'long')
    df = pl.read_parquet(path) if fmt == 'parquet' else pl.read_csv(path)
    for mixed in (df.sort('subsequenceId', 'sequenceId', descending=True, maintain_order=True), df.sort('inputCol', 'sequenceId')):
        (mixed.write_parquet if fmt == 'parquet' else mixed.write_csv)(path)
        s = WindowSamples(StoredWindows(path, mmap=False, metadata=meta), WindowView(3))
        np.testing.assert_array_equal(s.gather(np.arange(len(s)))['inputs/x'], b.features['x'][:, :3])
    mixed = df.sort('sequenceId', descending=True, maintain_order=True)
    (mixed.write_parquet if fmt == 'parquet' else mixed.write_csv)(path)
    s = WindowSamples(StoredWindows(path, metadata=meta), WindowView(3))
    np.testing.assert_array_equal(s.gather(np.arange(len(s)))['inputs/x'], b.features['x'][:, :3])


def test_a_changed_file_is_cached_anew(tmp_path):
    b = blocks_of(4)
    path, meta = stored(tmp_path, b, 'parquet', 'long')
    assert len(StoredWindows(path, metadata=meta)) == b.n
    with block_writer('parquet', 'long', path, BlockSchema.of(b)) as w: w.write(b[:7])
    assert len(StoredWindows(path, metadata=meta)) == 7
    assert len(list((path.parent/'.cache').iterdir())) == 1


def test_metadata_is_found_beside_data(tmp_path):
    rows = pl.DataFrame(dict(sequenceId=[0]*20+[1]*9, itemPosition=[*range(20), *range(9)], item=[*'abcde'*5, *'abcd']))
    r = preprocess(dict(project_root=str(tmp_path), dataset_name='d', split_ratios=[.7, .3], window_length=5, window_stride=1), rows, progress=False)
    for what in (r, r.splits[0], str(r.splits[0])):
        s = window_samples(what)
        assert len(s) == r.windows[0] and s.view.context_length == 4
    assert len(StoredWindows(r, 1)) == r.windows[1]
    with pytest.raises(ValueError, match='no split 2'): StoredWindows(r, 2)


# ---------------------------------------------------------------- what is refused
def test_older_payloads_and_files_are_refused_with_a_way_out(tmp_path):
    b = blocks_of(3)
    path, meta = stored(tmp_path, b, 'pt', 'wide')
    x = torch.load(path, weights_only=True)
    for bad in ({**x, 'version': 4}, (x['sequences'], 1), {k: v for k, v in x.items() if k != 'split_start_item_positions'}):
        torch.save(bad, path)
        for mmap in (True, False):
            with pytest.raises(ValueError, match='(?s)d-split0.pt.*(again|preprocess|save_pt_payload)'): StoredWindows(path, mmap=mmap, metadata=meta)
    torch.save({**x, 'format': 'other'}, path)
    with pytest.raises(ValueError, match='(?s)d-split0.pt.*other'): StoredWindows(path, metadata=meta)
    for layout in ('long', 'wide'):
        p, meta = stored(tmp_path/layout, b, 'parquet', layout) if (tmp_path/layout).mkdir() is None else None
        pl.read_parquet(p).drop('splitEndItemPosition').write_parquet(p)
        for mmap in (True, False):
            with pytest.raises(ValueError, match='(?s)splitEndItemPosition'): StoredWindows(p, mmap=mmap, metadata=meta)
    with pytest.raises(ValueError, match='layout version 1'): StoredWindows(path, metadata=dict(meta, stored_window_layout_version=1))
    with pytest.raises(ValueError, match='no max_target_offset'): StoredWindows(path, metadata={})


def test_another_width_than_the_metadata_says_is_refused(tmp_path):
    path, meta = stored(tmp_path, blocks_of(4), 'bin', 'wide')
    with pytest.raises(ValueError, match='windows of'): StoredWindows(path, metadata=dict(meta, window_lengths=[7]))


# ---------------------------------------------------------------- ranks, workers, resuming
def loaders(W, b=None, **kwargs):
    s = WindowSamples(StoredWindows.of(blocks_of(5) if b is None else b, 1), WindowView(3, window_stride=1))
    return [WindowLoader(s, rank=r, world_size=W, **kwargs) for r in range(W)]


@pytest.mark.parametrize('per_rank', [False, True])
@pytest.mark.parametrize('shuffle', [False, True, 'block', 'hash'])
@pytest.mark.parametrize('W', [1, 2, 3, 5])
def test_each_sample_once_over_ranks(W, shuffle, per_rank):
    for size in (1, 7, 64, 10**4):
        ranks = loaders(W, batch_size=size, shuffle=shuffle, per_rank=per_rank, block=16)
        for epoch in (0, 1):
            got = [[b['sample'].tolist() for b in r.batches(epoch)] for r in ranks]
            assert all([len(b) for b in g] == [len(b) for b in got[0]] for g in got) and len(got[0]) == len(ranks[0])
            assert sorted(s for g in got for b in g for s in b if s >= 0) == list(range(len(ranks[0].samples)))
            if size < 7: break


def test_rows_that_fill_up_count_for_nothing():
    for b in loaders(3, batch_size=64)[2].batches(0):
        fill = b['sample'] < 0
        assert (b['sample_valid_mask'] == ~fill).all() and not b['loss_mask'][fill].any() and not b['inputs/x'][fill].any()


def test_last_batch_dropped_is_the_same_count_on_all_ranks():
    for per_rank in (False, True):
        ranks = loaders(3, batch_size=51, last='drop', per_rank=per_rank)
        got = [[b for b in r.batches(0)] for r in ranks]
        assert {len(g) for g in got} == {len(ranks[0])} and all(b['sample_valid_mask'].all() for g in got for b in g)


@pytest.mark.parametrize('order,curriculum', [('plan', None), ('plan', 'c'), ('sequifier', None), ('sequifier', 'c')])
def test_resume_under_another_world_size(order, curriculum):
    b = blocks_of(5)
    b.sample_positions = dict(c=np.arange(b.n) % 3)
    kw = dict(batch_size=24, shuffle=True, order=order, curriculum=curriculum, seed=5)
    for stop in (0, 1, 4):
        a = loaders(2, b, **kw)
        its, taken = [iter(l) for l in a], []
        for _ in range(stop): taken += [s for it in its for s in next(it)['sample'].tolist()]
        state = json.loads(json.dumps(a[0].state_dict()))
        assert len(json.dumps(state)) < 2000
        rest = [s for it in its for batch in it for s in batch['sample'].tolist()]
        assert sorted(x for x in taken+rest if x >= 0) == list(range(len(a[0].samples)))
        for W in (1, 3):
            again = loaders(W, b, **kw)
            for l in again: l.load_state_dict(state)
            got = [s for l in again for batch in l for s in batch['sample'].tolist() if s >= 0]
            assert sorted(got) == sorted(x for x in rest if x >= 0)
            assert again[0].next_epoch == 1


@pytest.mark.parametrize('mmap', [True, False])
@pytest.mark.parametrize('context', ['fork', 'spawn'])
def test_workers(context, mmap, tmp_path):
    path, meta = stored(tmp_path, blocks_of(5), 'bin', 'wide')
    make = lambda n, **kw: window_dl(path, 16, True, n, context_length=3, window_stride=1, metadata=meta, mmap=mmap, multiprocessing_context=context if n else None, **kw)
    want = [{k: v.clone() for k, v in b.items()} for b in make(0)]
    assert sorted(torch.cat([b['sample'] for b in want]).tolist()) == list(range(len(make(0).dataset.samples)))
    dl = make(2, persistent_workers=True)
    for epoch in (0, 1):
        got = []
        for i, b in enumerate(dl):
            if epoch == 0: assert all(torch.equal(b[k], want[i][k]) for k in want[i])
            got.append(b['sample'].tolist())
        assert len(got) == len(dl) == len(want)
    it = iter(dl)
    for _ in range(3): next(it)
    state = dl.state_dict()
    rest = [b['sample'].tolist() for b in it]
    for n in (0, 2):
        again = make(n)
        again.load_state_dict(state)
        assert [b['sample'].tolist() for b in again] == rest


def test_a_split_without_windows(tmp_path):
    path, meta = stored(tmp_path, blocks_of(4)[:0], 'parquet', 'long')
    for mmap in (True, False):
        s = WindowSamples(StoredWindows(path, mmap=mmap, metadata=meta), WindowView(3))
        assert len(s) == 0 and list(WindowLoader(s, 4).batches(0)) == []


def test_mapped_windows_stay_on_disk(tmp_path):
    "Opening and loading a few samples reads a part of the file only"
    n, W = 200_000, 32
    z = np.zeros(n, np.int64)
    b = WindowBlock(np.arange(n), z, z, z, z, z+W, dict(x=np.ones((n, W), np.int32)))
    path, meta = stored(tmp_path, b, 'bin', 'wide')
    import resource, subprocess, sys
    code = f"""
import resource
from fastseqprep.window_data import StoredWindows
from fastseqprep.window_samples import WindowSamples, WindowView
s = WindowSamples(StoredWindows({str(path)!r}, metadata={meta!r}), WindowView(31))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for lo in range(0, 4096, 64): s.gather(range(lo, lo+64))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss-before)
"""
    grown = int(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout)
    assert grown < 12_000 # kB; all windows are 25,600
