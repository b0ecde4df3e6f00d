"""Views of stored windows: the recorded batches of sequifier 3.1.1.0, all small cases against a slow oracle, formats, ranks, workers, resuming."""
import itertools, json, pickle, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np, polars as pl, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st

from fastseqprep.blockfiles import block_writer, read_block
from fastseqprep.blocks import BlockSchema, WindowBlock
from fastseqprep.files import StoreError
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
        for mmap in (True, False):
            s = WindowSamples(StoredWindows(path, mmap=mmap, metadata=meta), WindowView(3))
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


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='reads /proc')
def test_mapped_windows_stay_on_disk(tmp_path):
    "Opening and loading a few samples reads a part of the file only; in memory, it is all there"
    import subprocess, sys
    n, W = 200_000, 128
    z = np.zeros(n, np.int64)
    b = WindowBlock(np.arange(n), z, z, z, z, z+W, dict(x=np.ones((n, W), np.int32)))
    path, meta = stored(tmp_path, b, 'bin', 'wide')
    code = f"""
import re, sys
from fastseqprep.window_data import StoredWindows
from fastseqprep.window_samples import WindowSamples, WindowView
peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) # ru_maxrss would be that of the process which started this one
before = peak()
s = WindowSamples(StoredWindows({str(path)!r}, mmap=sys.argv[1] == 'mapped', metadata={meta!r}), WindowView(127))
for lo in range(0, 4096, 64): s.gather(range(lo, lo+64))
print(peak()-before)
"""
    mapped, eager = (int(subprocess.run([sys.executable, '-c', code, how], capture_output=True, text=True, check=True).stdout) for how in ('mapped', 'eager'))
    whole = n*W*4/1024 # kB
    assert eager > whole > 3*mapped


# ---------------------------------------------------------------- what is read is checked
PAYLOADS = Path(__file__).parent/'cases'/'payload'
BY_VALUE = {'bad-class-id', 'bad-gap', 'bad-mask-on-padding', 'bad-nan-masked', 'bad-negative-id'} # found by reading all values


def lay_payload(root, name, fmt='pt'):
    "A recorded example as the folder of a split"
    from test_payload import as_payload, recorded_batch, tensors
    b, d = recorded_batch(PAYLOADS/f'{name}.json')
    folder = root/'d-split0'
    folder.mkdir()
    if fmt == 'pt': torch.save(tensors(as_payload(b)), folder/'0.pt')
    else:
        block = WindowBlock.from_batch(b)
        layouts = {k: s for k, s in (d['layouts'] or {}).items() if k in block.depth_masks}
        schema = BlockSchema.of(block, layouts)
        with block_writer(fmt, 'wide', folder/f'0.{fmt}', schema) as w: w.write(block)
    (folder/'metadata.json').write_text(json.dumps(dict(split_index=0, stored_window_layout_version=2, max_target_offset=0, depth_layouts=d['layouts'] or {}, n_classes=d['n_classes'] or {}, batch_files=[dict(path=f'0.{fmt}')])))
    return folder


@pytest.mark.parametrize('name', sorted(p.stem for p in PAYLOADS.glob('*.json')))
def test_recorded_payloads_as_a_split(name, tmp_path):
    "In memory all are refused that the recorded verdict refuses; left on disk, all but those that only the values tell"
    folder = lay_payload(tmp_path, name)
    for mmap in (False, True):
        if name.startswith('ok') or mmap and name in BY_VALUE: assert len(StoredWindows(folder, mmap=mmap))
        else:
            with pytest.raises(ValueError, match='0.pt'): StoredWindows(folder, mmap=mmap)


@pytest.mark.parametrize('fmt', ['arrow', 'bin', 'parquet'])
@pytest.mark.parametrize('name', sorted(BY_VALUE | {'bad-bounds', 'bad-pad-negative', 'ok-two-layouts'}))
def test_other_formats_are_checked_alike(name, fmt, tmp_path):
    try: folder = lay_payload(tmp_path, name, fmt)
    except ValueError: pytest.skip('cannot be written')
    for mmap in (False, True):
        if name.startswith('ok') or mmap and name in BY_VALUE and fmt != 'parquet': assert len(StoredWindows(folder, mmap=mmap)) # Parquet is looked at when it is copied
        else:
            with pytest.raises(ValueError, match=f'0.{fmt}'): StoredWindows(folder, mmap=mmap)


def flip(path, what):
    raw = bytearray(path.read_bytes())
    raw[raw.index(what)] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize('fmt,merge', [('pt', False), ('bin', False), ('arrow', True), ('parquet', True), ('csv', True)])
def test_a_flipped_bit_is_found_in_memory(fmt, merge, tmp_path):
    "By the check sums of a PT file, by the manifest in other formats: an id that is still one of the vocabulary"
    rows = pl.DataFrame(dict(sequenceId=[0]*400, itemPosition=range(400), item=[f'{i*i % 97:02d}' for i in range(400)]))
    r = preprocess(dict(project_root=str(tmp_path), dataset_name='d', split_ratios=[1.], window_length=8, window_stride=4, write_format=fmt, merge_output=merge), rows, progress=False)
    StoredWindows(r, mmap=False)
    path = Path(r.splits[0])
    file = next(path.glob('*.pt')) if fmt == 'pt' else next(path.rglob('*item*')) if fmt == 'bin' else path
    want = StoredWindows(r).blocks[0].features['item']
    raw = bytearray(file.read_bytes())
    raw[len(raw)//2 if fmt in ('parquet', 'csv') else raw.index(want[3].tobytes())] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ValueError, match='check sum|manifest'): StoredWindows(r, mmap=False)


def test_long_files_are_checked_when_they_are_read(tmp_path):
    for fmt in ('parquet', 'csv'):
        for bad in (9, -1):
            b = blocks_of(4)
            b.features['x'] = b.features['x'].copy()
            b.features['x'][-1, -1] = bad
            (tmp_path/f'{fmt}{bad}').mkdir()
            path, meta = stored(tmp_path/f'{fmt}{bad}', b, fmt, 'long')
            for mmap in (True, False):
                with pytest.raises(ValueError, match=f"d-split0.{fmt}.*'x' has ids"): StoredWindows(path, mmap=mmap, metadata=meta)


def test_a_folder_that_lists_nothing_is_called_so(tmp_path):
    path, meta = stored(tmp_path, blocks_of(4), 'pt', 'wide', 3)
    (path/'metadata.json').unlink()
    with pytest.raises(FileNotFoundError, match='folder without metadata.json'): StoredWindows(path, metadata=dict(max_target_offset=1))


def test_metadata_without_a_layout_version_is_old(tmp_path):
    path, _ = stored(tmp_path, blocks_of(4), 'pt', 'wide', 3)
    meta = json.loads((path/'metadata.json').read_text())
    del meta['stored_window_layout_version']
    (path/'metadata.json').write_text(json.dumps(meta))
    with pytest.raises(ValueError, match='no stored_window_layout_version.*preprocess the data again'): StoredWindows(path)
    assert len(StoredWindows(path, metadata=meta)) # given by hand: who gives it knows


# ---------------------------------------------------------------- caches and pickles
def test_a_broken_cache_is_made_anew(tmp_path):
    b = blocks_of(4)
    path, meta = stored(tmp_path, b, 'parquet', 'long')
    for harm in (lambda c: next(c.glob('*x.bin')).write_bytes(b'123'), lambda c: (c/'files.json').unlink(), lambda c: (c/'files.json').write_text('[1'), lambda c: next(c.glob('*y.bin')).unlink()):
        StoredWindows(path, metadata=meta)
        [cache] = (tmp_path/'.cache').iterdir()
        harm(cache)
        np.testing.assert_array_equal(StoredWindows(path, metadata=meta).block(np.arange(b.n)).features['x'], b.features['x'])
        assert [p.name for p in (tmp_path/'.cache').iterdir()] == [cache.name]


def test_projects_share_a_folder_of_caches(tmp_path):
    paths = []
    for i in (4, 5):
        (tmp_path/str(i)).mkdir()
        path, meta = stored(tmp_path/str(i), blocks_of(i), 'parquet', 'long')
        paths.append((path, meta, StoredWindows(path, metadata=meta, cache_dir=tmp_path/'caches')))
    assert len(list((tmp_path/'caches').iterdir())) == 2
    times = [p.stat().st_mtime_ns for p in sorted((tmp_path/'caches').iterdir())]
    for path, meta, w in paths: assert len(StoredWindows(path, metadata=meta, cache_dir=tmp_path/'caches')) == len(w)
    assert times == [p.stat().st_mtime_ns for p in sorted((tmp_path/'caches').iterdir())] # nothing was made again


@pytest.mark.parametrize('fmt', ['parquet', 'bin', 'arrow', 'pt'])
def test_a_pickle_of_other_windows_is_refused(fmt, tmp_path):
    b = blocks_of(4)
    path, meta = stored(tmp_path, b, fmt, 'wide')
    old = pickle.dumps(StoredWindows(path, metadata=meta))
    assert len(pickle.loads(old)) == b.n
    with block_writer(fmt, 'wide', path, BlockSchema.of(b)) as w: w.write(b[::-1])
    with pytest.raises(ValueError, match='has changed since'): pickle.loads(old)


# ---------------------------------------------------------------- what is in a batch
@pytest.mark.parametrize('mmap', [True, False])
@pytest.mark.parametrize('objective', ['causal', 'bert', 'final_value', 'next_occurrence'])
def test_inputs_may_be_changed_in_place(objective, mmap, tmp_path):
    "No two entries of a batch share memory"
    b = blocks_of(5, 2)
    b.features = {k: v.astype(np.int64 if v.dtype.kind == 'i' else np.float64) for k, v in b.features.items()}
    path, meta = stored(tmp_path, b, 'bin', 'wide', depth=2)
    w = StoredWindows(path, mmap=mmap, metadata=dict(meta, id_maps=dict(x={str(i): i for i in range(3, 9)})))
    for stride in (None, 1):
        view = WindowView(3, 0 if objective == 'bert' else 1, stride, objective=objective, trigger=('x', ['4']) if objective == 'next_occurrence' else None)
        s = WindowSamples(w, view, targets=['x', 'y', 'z'])
        assert {'targets/z', 'target_depth_valid_mask:sub'} <= set(s.gather([0, 1]))
        for batch in ([s.gather(np.arange(9))], list(WindowLoader(s, 4, rank=0, world_size=1).batches(0))[:2]):
            for g in batch:
                g = {k: np.asarray(v) for k, v in g.items()}
                for k, j in itertools.combinations(g, 2): assert not np.shares_memory(g[k], g[j]), (k, j)
                want = {k: v.copy() for k, v in g.items()}
                for k, v in g.items():
                    if k.startswith('inputs/'): v[:] = 0
                for k, v in g.items():
                    if not k.startswith('inputs/'): np.testing.assert_array_equal(v, want[k], err_msg=k)


@pytest.mark.parametrize('mmap', [True, False])
@pytest.mark.parametrize('shards', [1, 3])
@pytest.mark.parametrize('narrow', [True, False])
def test_memory_that_is_used_again_is_not_in_use(narrow, shards, mmap, tmp_path):
    "Batches keep their values while others are made, and are what plain numpy says, from one file and from several"
    rows = pl.DataFrame(dict(sequenceId=np.repeat(np.arange(40), 30), itemPosition=np.tile(np.arange(30), 40), item=np.random.default_rng(0).integers(0, 99, 1200).astype(str), amount=np.random.default_rng(1).normal(size=1200)))
    run = preprocess(dict(project_root=str(tmp_path), dataset_name='d', split_ratios=[1.], window_length=9, window_stride=3, write_format='pt', merge_output=False, batches_per_file=10_000 if shards==1 else 3,
                          **(dict(dtypes='compact') if narrow else {})), rows, progress=False)
    w = StoredWindows(run, mmap=mmap)
    assert (len(w.blocks) > 1)==(mmap and shards > 1) and (w.blocks[0].features['item'].dtype.itemsize < 8)==narrow
    s, whole = window_samples(w), w.block(np.arange(len(w)))
    first = list(WindowLoader(s, 16, shuffle=True, rank=0, world_size=1).batches(0))
    kept = [{k: v.clone() for k, v in b.items()} for b in first]
    for e in range(1, 4):
        for b in WindowLoader(s, 16, shuffle=True, rank=0, world_size=1).batches(e): pass
    for b, was in zip(first, kept):
        for k in b: assert torch.equal(b[k], was[k]), k
        at = b['sample'].numpy()
        for c in ('item', 'amount'):
            np.testing.assert_array_equal(b[f'inputs/{c}'], whole.features[c][at, :8])
            np.testing.assert_array_equal(b[f'targets/{c}'], whole.features[c][at, 1:])
        np.testing.assert_array_equal(b['attention_valid_mask'], np.arange(8) >= whole.left_pad_lengths[at][:, None])
        np.testing.assert_array_equal(b['item_position'], whole.start_item_positions[at])


def test_what_is_no_window_and_no_sample_is_refused():
    w = StoredWindows.of(blocks_of(4), 1)
    s = WindowSamples(w, WindowView(3))
    for bad in (0, slice(0, 2), [1.5], np.ones(4, bool), [[0, 1]]):
        with pytest.raises(TypeError, match='expected a list of numbers of samples'): s.gather(bad)
    assert len(s.gather([])['sample'])==0 and s.gather(np.array([1, -1], np.int32))['sample_valid_mask'].tolist()==[True, False]
    with pytest.raises(TypeError, match='expected StoredWindows'): WindowSamples('here.parquet', WindowView(3))
    with pytest.raises(TypeError, match='expected a WindowView'): WindowSamples(w, 3)
    with pytest.raises(IndexError, match='no window 99'): s.draw(99)
    with pytest.raises(ValueError, match="no feature 'q'"): s.draw(0, 'q')


@pytest.mark.parametrize('mmap', [True, False])
def test_values_that_do_not_fit_their_dtype_are_refused(mmap, tmp_path):
    "A long file beside the metadata of another run"
    run = preprocess(dict(project_root=str(tmp_path), dataset_name='d', split_ratios=[1.], window_length=4), pl.DataFrame(dict(sequenceId=[1]*9, itemPosition=range(9), item=[*'abcdefghi'])), progress=False)
    meta = json.loads(Path(run.metadata_path).read_text())
    meta['column_data_types']['item'] = 'Int8'
    assert len(StoredWindows(run.splits[0], mmap=mmap, metadata=meta))
    path = Path(run.splits[0])
    f = pl.read_parquet(path).with_columns(pl.col('^[0-9]+$')+pl.lit(200, pl.Int64))
    for manifest in path.parent.glob('*manifest.json'): manifest.unlink()
    f.write_parquet(path)
    with pytest.raises(StoreError, match="'item': 2.. does not fit int8.*metadata of its run"): StoredWindows(path, mmap=mmap, metadata=meta)


@pytest.mark.parametrize('objective', ['causal', 'bert', 'final_value', 'next_occurrence'])
def test_positions_and_children_of_targets(objective):
    "A feature that is its position, and children that tell whose they are, go the way of the targets"
    b = blocks_of(6, 3)
    at = b.start_item_positions[:, None]+np.arange(6)
    b.features['y'] = at.astype(float)
    b.features['z'] = np.where(b.depth_masks['sub'], at[:, :, None]+100, 0)
    w = StoredWindows.of(b, 1, id_maps=dict(x={str(i): i for i in range(3, 9)}))
    view = WindowView(4, 0 if objective == 'bert' else 1, 1, objective=objective, trigger=('x', ['4', '7']) if objective == 'next_occurrence' else None)
    s = WindowSamples(w, view, targets=['y', 'z'])
    g = s.gather([*range(len(s)), -1])
    m, real = g['loss_mask'], g['sample_valid_mask']
    at = s.target_positions(g)
    assert ('target_position' in g)==(objective in ('final_value','next_occurrence')) and not g.get('target_position', m)[-1].any()
    assert m.any() and not m[-1].any() and not g['target_depth_valid_mask:sub'][-1].any()
    np.testing.assert_array_equal(at[m], g['targets/y'][m])
    there = g['target_depth_valid_mask:sub']
    assert there[real].any()
    np.testing.assert_array_equal(there[real], g['targets/z'][real] > 0)
    np.testing.assert_array_equal(g['targets/z'][there], np.broadcast_to(at[:, :, None]+100, there.shape)[there])
    assert 'target_depth_valid_mask:sub' not in WindowSamples(w, view, targets=['y']).gather([0])
    for n in (0, 2): # windows or none, the same entries
        empty = WindowSamples(StoredWindows.of(b[:0], 1, id_maps=w.facts['id_maps']), view, targets=['y', 'z']).gather([-1]*n)
        assert {k: (v.dtype, v.shape[1:]) for k, v in empty.items()} == {k: (v.dtype, v.shape[1:]) for k, v in g.items()}


def test_children_that_are_asked_for_are_counted():
    b = blocks_of(5, 3)
    s = WindowSamples(StoredWindows.of(b, 1), WindowView(4), targets=['x', 'z'])
    g = s.gather(np.arange(len(s)))
    want = np.zeros(9, int)
    for i, p, d in np.argwhere(b.depth_masks['sub'][:, 1:]):
        if g['loss_mask'][i, p]: want[b.features['z'][i, p+1, d]] += 1
    assert s.counts('z').tolist() == want.tolist() and want[3:].all() and not want[:3].any()


def test_a_trigger_is_a_column_of_items_and_values():
    w = StoredWindows.of(blocks_of(4, 2), 1, id_maps=dict(x={'a': 3}, z={'a': 3}))
    with pytest.raises(ValueError, match="'z' is of children"): WindowSamples(w, WindowView(3, objective='next_occurrence', trigger=('z', 'a')))
    for bad in ('item', ('item',), ('item', []), ('item', ()), 3, (3, 'a'), ('a', 'b', 'c')):
        with pytest.raises(ValueError, match='a column and one or more of its values'): WindowView(3, objective='next_occurrence', trigger=bad)


def test_masks_take_little_memory():
    "A long context has no table of all its masks"
    import tracemalloc
    from fastseqprep.window_samples import view_edges, view_masks
    C = 20_000
    tracemalloc.start()
    a, t = view_masks(*view_edges(np.array([2, C]), np.array([5, 0]), np.array([C, 7]), 0, WindowView(C)), C)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100*C and a.sum(1).tolist() == [C-2, 0] and t[0].sum() == C-5


def test_hidden_children():
    "Slots without a child stay empty, and each child has a random value of its own"
    b = blocks_of(6, 3)
    b.features['p'] = np.where(b.depth_masks['sub'], 7., 0.)
    w = StoredWindows.of(b, 1, n_classes=dict(x=9, z=1000))
    for masked, random in ((1., 0.), (0., 1.), (.5, .5)):
        s = WindowSamples(w, WindowView(5, 0, 1, objective='bert'), hide=SpanMask(.9, masked=masked, random=random), targets=['x'])
        g = s.gather(np.arange(len(s)))
        m, h = g['depth_valid_mask:sub'], g['bert_mask'][:, :, None]
        assert not g['inputs/z'][~m].any() and not g['inputs/p'][~m].any()
        assert (g['inputs/z'][m & h] >= 2).all() and (g['inputs/z'][m & ~h] < 9).all()
        if masked == 1: assert (g['inputs/z'][m & h] == 2).all() and not g['inputs/p'][m & h].any()
        if random == 1:
            both = (m.sum(2) == 3) & g['bert_mask']
            z, p = g['inputs/z'][both], g['inputs/p'][both]
            assert len(z) > 20 and np.mean(z[:, 0] == z[:, 1]) < .1 and np.mean(z[:, 1] == z[:, 2]) < .1 and (p[:, 0] != p[:, 1]).all()


def test_naming_the_length_of_the_cut_changes_nothing(tmp_path):
    rows = pl.DataFrame(dict(sequenceId=[0]*60, itemPosition=range(60), item=[*'abcdef'*10]))
    r = preprocess(dict(project_root=str(tmp_path), dataset_name='d', split_ratios=[.6, .4], window_lengths=[8, 9], max_target_offset=1, prediction_aligned_splits=[1], prediction_length=2, prediction_alignment_steps=2, target_offset=1), rows, progress=False)
    asked = lambda **k: sorted((s := window_samples(r, split=1, **k)).target_positions(g := s.gather(np.arange(len(s))))[g['loss_mask']].tolist())
    assert asked() == asked(prediction_length=2) == asked(steps=2) == list(range(36, 60))
    with pytest.raises(ValueError, match='steps='): window_samples(r, split=1, prediction_length=1)
    assert len(asked(prediction_length=1, steps=1)) == window_samples(r, split=1, prediction_length=1, steps=1).n


def test_a_state_names_what_is_other():
    "Inputs that were changed are not called other data"
    w = StoredWindows.of(blocks_of(5), 1)
    make = lambda **k: WindowLoader(WindowSamples(w, WindowView(3), **k), 8, True, rank=0, world_size=1)
    state = make().state_dict()
    with pytest.raises(ValueError, match="inputs='x,y'"): make(inputs='x', targets='x').load_state_dict(state)
    with pytest.raises(ValueError, match="targets='x,y'"): make(targets='x').load_state_dict(state)
    other = blocks_of(5)
    other.features['x'] = other.features['x']+1
    with pytest.raises(ValueError, match='other data'): WindowLoader(WindowSamples(StoredWindows.of(other, 1), WindowView(3)), 8, True, rank=0, world_size=1).load_state_dict(state)


@pytest.mark.parametrize('mmap', [False, True])
@pytest.mark.parametrize('keys', [dict(write_format='csv', merge_output=True), dict(write_format='parquet', merge_output=True), dict(write_format='bin', merge_output=False), dict(write_format='arrow', merge_output=False)])
def test_files_of_another_size_are_refused(tmp_path, keys, mmap):
    "What is longer or shorter than the manifest lists is damaged, also where all values could be right"
    rows = pl.DataFrame(dict(sequenceId=[0]*40, itemPosition=range(40), item=[*'abcdefgh'*5]))
    r = preprocess(dict(project_root=str(tmp_path), dataset_name='d', split_ratios=[.5, .5], window_length=4, **keys), rows, progress=False)
    StoredWindows(r.splits[0], mmap=mmap)
    for f in sorted(o for o in tmp_path.rglob('*') if o.is_file() and 'split1' in str(o) and o.name not in ('metadata.json', 'manifest.json')):
        was = f.read_bytes()
        for data in (was+b'\n', was[:-1]):
            f.write_bytes(data)
            with pytest.raises(StoreError, match='not what the manifest lists'): StoredWindows(r.splits[1], mmap=mmap)
        f.write_bytes(was)


def test_caches_are_not_made_of_damaged_files(tmp_path):
    rows = pl.DataFrame(dict(sequenceId=[0]*40, itemPosition=range(40), item=[*'abcdefgh'*5]))
    r = preprocess(dict(project_root=str(tmp_path), dataset_name='d', split_ratios=[1.], window_length=4, write_format='csv'), rows, progress=False)
    f = Path(r.splits[0])
    text = f.read_text()
    at = text.rindex(',')+1
    f.write_text(text[:at]+str(3 if text[at] != '3' else 4)+text[at+1:])
    with pytest.raises(StoreError, match='not what the manifest lists'): StoredWindows(f)
    assert not (f.parent/'.cache').exists() or not any((f.parent/'.cache').iterdir())


def test_no_sample_again_and_again(tmp_path):
    w = StoredWindows.of(blocks_of(6, 3), 1)
    s = WindowSamples(w, WindowView(4))
    for _ in range(3):
        assert len(s.gather([0])['sample']) == 1
        assert len(s.gather([])['sample']) == 0


# ---------------------------------------------------------------- memory that is used again
@pytest.fixture(scope='module')
def in_shards(tmp_path_factory):
    rng, root = np.random.default_rng(0), tmp_path_factory.mktemp('shards')
    n = 600
    rows = pl.DataFrame(dict(sequenceId=np.repeat(np.arange(20), 30), itemPosition=np.tile(np.arange(30), 20), place=rng.integers(0, 9, n).astype(str), paid=rng.normal(size=n)))
    return preprocess(dict(project_root=str(root), dataset_name='w', selected_columns=['place', 'paid'], split_ratios=[1.], window_length=12, window_stride=5,
                           write_format='pt', merge_output=False, batches_per_file=7), rows, progress=False)


@pytest.mark.parametrize('mmap', [True, False])
def test_an_index_that_is_written_to_again(in_shards, mmap):
    "Neither are the windows of before given, nor is the batch of before changed"
    want = window_samples(StoredWindows(in_shards, mmap=False)).gather(np.arange(40))
    s, i = window_samples(StoredWindows(in_shards, mmap=mmap)), np.arange(8)
    first = s.gather(i)
    i += 20
    second = s.gather(i)
    for k, v in want.items():
        assert np.array_equal(first[k], v[:8]) and np.array_equal(second[k], v[20:28]), k
    first['sample'][:] = 0
    assert i.tolist() == list(range(20, 28))


@pytest.mark.parametrize('mmap', [True, False])
def test_threads_that_read_the_same_windows(in_shards, mmap):
    s = window_samples(StoredWindows(in_shards, mmap=mmap))
    want, wrong, until, was = window_samples(StoredWindows(in_shards, mmap=False)).gather(np.arange(s.n)), [], time.monotonic()+3, sys.getswitchinterval()
    def read(seed):
        rng = np.random.default_rng(seed)
        while time.monotonic() < until:
            i = rng.integers(0, s.n, 64)
            b = s.gather(i)
            time.sleep(0)
            wrong.extend(k for k in want if not np.array_equal(want[k][i], b[k]))
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool: list(pool.map(read, range(2)))
    finally: sys.setswitchinterval(was)
    assert not wrong
