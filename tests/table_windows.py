"""Windows as they lie on disk, read without the package, and what differs between two sets of them."""
import json, math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np, polars as pl

COORDS = dict(sequenceId='sequence_ids', subsequenceId='subsequence_ids', startItemPosition='start_item_positions', leftPadLength='left_pad_lengths',
              splitStartItemPosition='split_start_item_positions', splitEndItemPosition='split_end_item_positions')
CURRICULUM = '__sequifier_curriculum_value__'
PT_KEYS = {'format', 'version', 'sequences', 'metadata', *COORDS.values()}
NEAR = {np.dtype('float16'): 2e-3, np.dtype('float32'): 2e-6}


@dataclass
class Part:
    "The windows of one file"
    file: str
    coords: dict                 # name → (n,) int64, the curriculum's after the six coordinates
    features: dict               # name → (n, W)
    schema: dict = field(default_factory=dict) # long files: column → type, in order
    rows: list = None            # long files: the features' names, row by row

    def __len__(self): return len(self.coords['sequenceId'])


def from_long(file, df):
    "One row per window and feature: every feature must have the same windows in the same order"
    named = [c for c in df.columns if c in COORDS or c.startswith(CURRICULUM)]
    slots = [c for c in df.columns if c.isdigit()]
    assert df.columns == [*list(COORDS), *named[len(COORDS):], 'inputCol', *[str(i) for i in range(len(slots)-1, -1, -1)]], f'{file}: columns {df.columns}'
    coords, features = {c: np.zeros(0, np.int64) for c in named}, {}
    for name in df['inputCol'].unique(maintain_order=True):
        mine = df.filter(pl.col('inputCol') == name)
        features[name] = mine.select(slots).to_numpy()
        at = {c: mine[c].to_numpy() for c in named}
        if len(features) == 1: coords = at
        for c in named: assert np.array_equal(at[c], coords[c]), f'{file}: the rows of {name} belong to other windows than those of the first feature ({c})'
    return Part(file, coords, features, {c: str(t) for c, t in df.schema.items()}, df['inputCol'].to_list())


def from_wide(file, df):
    "One row per window, one list per feature"
    named = [c for c in df.columns if c in COORDS or c.startswith(CURRICULUM)]
    def table(s): return s.to_numpy() if isinstance(s.dtype, pl.Array) else np.array(s.to_list(), s.explode().to_numpy().dtype).reshape(len(s), -1)
    features = {c: table(df[c]) for c in df.columns if isinstance(df[c].dtype, (pl.Array, pl.List))}
    return Part(file, {c: df[c].to_numpy() for c in named}, features)


def from_arrays(file, arrays, features, curriculum):
    "The tensors of a PT file"
    coords = {c: arrays[k] for c, k in COORDS.items()}
    where = arrays.get('sample_positions')
    if where is not None: coords |= {CURRICULUM+c: (where if where.ndim == 2 else where[:, None])[:, i] for i, c in enumerate(curriculum)}
    return Part(file, coords, {c: arrays[f'sequences/{c}'] for c in features})


def from_pt(path):
    import torch
    batch = torch.load(path, weights_only=True)
    assert set(batch) == PT_KEYS and (batch['format'], batch['version']) == ('sequifier_tensor_batch', 5), f'{path}: {sorted(batch)}, {batch.get("format")}, {batch.get("version")}'
    assert set(batch['metadata']) == {'depth_valid_masks', 'sample_positions', 'curriculum_columns'} and batch['metadata']['depth_valid_masks'] == {}, f'{path}: {batch["metadata"]}'
    arrays = {f'sequences/{k}': v.numpy() for k, v in batch['sequences'].items()} | {k: batch[k].numpy() for k in COORDS.values()}
    for k in COORDS.values(): assert arrays[k].dtype == np.int64, f'{path}: {k} is {arrays[k].dtype}'
    if batch['metadata']['sample_positions'] is not None: arrays['sample_positions'] = batch['metadata']['sample_positions'].numpy()
    return from_arrays(Path(path).name, arrays, list(batch['sequences']), list(batch['metadata']['curriculum_columns']))


def read(path):
    "The windows in one file of any format"
    path = Path(path)
    if path.suffix == '.pt': return from_pt(path)
    df = pl.read_csv(path, infer_schema_length=None) if path.suffix == '.csv' else pl.read_ipc(path) if path.suffix in ('.arrow', '.ipc', '.feather') else pl.read_parquet(path)
    return from_long(path.name, df) if 'inputCol' in df.columns else from_wide(path.name, df)


@dataclass
class Output:
    "All that a run left: windows of each split, its own metadata if it has a folder, and the metadata of data sets"
    splits: dict    # (data set, split) → list of Part
    own: dict       # (data set, split) → the split folder's metadata.json
    metadata: dict  # data set → metadata JSON


def which(name):
    "Data set and number of a split's file or folder"
    stem = name if '.' not in name else name.rsplit('.', 1)[0]
    dataset, number = stem.rsplit('-split', 1)
    return dataset, int(number)


def stored(project):
    "What lies in a project after a run. In split folders, only files that their metadata lists count"
    data, out = Path(project)/'data', Output({}, {}, {})
    for p in sorted(data.iterdir()) if data.exists() else []:
        if '-split' not in p.name: continue
        if p.is_file(): out.splits[which(p.name)] = [read(p)]
        else:
            key = which(p.name)
            out.own[key] = json.loads((p/'metadata.json').read_text(encoding='utf-8'))
            out.splits[key] = [read(p/f['path']) for f in out.own[key]['batch_files']]
            listed = {f['path'] for f in out.own[key]['batch_files']} | {'metadata.json', 'manifest.json'}
            assert {f.name for f in p.iterdir()} <= listed, f'{p.name} holds {sorted(f.name for f in p.iterdir())}, but lists {sorted(listed)}'
    for f in sorted((Path(project)/'configs'/'metadata_configs').glob('*.json')): out.metadata[f.stem] = json.loads(f.read_text(encoding='utf-8'))
    return out


def recorded(expected):
    "The same from the JSON of a recorded case"
    out = Output({}, {}, {Path(k).stem: v for k, v in expected['metadata'].items()})
    for name, d in expected['data'].items():
        top, _, file = name.partition('/')
        key = which(top)
        if file == 'metadata.json':
            out.own[key] = d
            out.splits.setdefault(key, [])
            continue
        if 'arrays' in d: part = from_arrays(file, {k: np.array(a['values'], a['dtype'].lower()).reshape(a['shape']) for k, a in d['arrays'].items()}, d['features'], d['curriculum_columns'])
        else: part = from_long(file or top, pl.DataFrame([pl.Series(c, v['values'], dtype=getattr(pl, v['dtype'])) for c, v in d['columns'].items()]))
        out.splits.setdefault(key, []).append(part)
    return out


def together(parts):
    "The windows of several files as one"
    parts = [p for p in parts if len(p)] or parts[:1]
    if not parts: return None
    join = lambda ds: {k: np.concatenate([d[k] for d in ds]) for k in ds[0]}
    return Part('', join([p.coords for p in parts]), join([p.features for p in parts]))


def in_order(part):
    "By sequence, number, start"
    order = np.lexsort([part.coords[c] for c in ('splitStartItemPosition', 'startItemPosition', 'subsequenceId', 'sequenceId')])
    return Part(part.file, {k: v[order] for k, v in part.coords.items()}, {k: v[order] for k, v in part.features.items()})


def array_difference(want, got, where):
    "In words, or nothing"
    if want.shape != got.shape: return [f'{where}: shape {got.shape}, expected {want.shape}']
    if 'f' in (want.dtype.kind, got.dtype.kind):
        tol = max(NEAR.get(want.dtype, 1e-7), NEAR.get(got.dtype, 1e-7))
        bad = ~np.isclose(got.astype(float), want.astype(float), rtol=tol, atol=tol, equal_nan=True)
    else: bad = want != got
    if not bad.any(): return []
    i = tuple(int(k) for k in np.argwhere(bad)[0])
    return [f'{where}: {int(bad.sum())} of {bad.size} values differ; at {list(i)} {got[i]}, expected {want[i]}']


def window_differences(want, got, where):
    "Between two sets of windows, each a list of parts"
    want, got = together(want), together(got)
    n, m = (0 if p is None else len(p) for p in (want, got))
    if n != m: return [f'{where}: {m} windows, expected {n}']
    if n == 0: return []
    res = []
    if list(want.coords) != list(got.coords): res.append(f'{where}: coordinates {list(got.coords)}, expected {list(want.coords)}')
    if set(want.features) != set(got.features): res.append(f'{where}: features {sorted(got.features)}, expected {sorted(want.features)}')
    if res: return res
    want, got = in_order(want), in_order(got)
    for c in want.coords: res += array_difference(want.coords[c], got.coords[c], f'{where} {c}')
    for c in want.features: res += array_difference(want.features[c], got.features[c], f'{where} feature {c}')
    return res


def json_differences(want, got, where, only=False):
    "Between two JSON objects; keys that only `got` has count with `only`"
    res = [f'{where}: {k} is missing' for k in want if k not in got]
    if only: res += [f'{where}: {k} should not be there' for k in got if k not in want]
    for k in [k for k in want if k in got]:
        a, b, here = want[k], got[k], f'{where} {k}'
        if k == 'split_paths': a, b = ([str(Path(p).as_posix()) for p in v] for v in (a, b))
        if isinstance(a, dict) and isinstance(b, dict): res += json_differences(a, b, here, only=True)
        elif isinstance(a, float) or isinstance(b, float):
            if not (isinstance(a, (int, float)) and isinstance(b, (int, float)) and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)): res.append(f'{here}: {b!r}, expected {a!r}')
        elif a != b or type(a) != type(b): res.append(f'{here}: {b!r}, expected {a!r}')
    return res


def totals(own):
    "The histograms of a split folder, over its files"
    res = {}
    for h in 'left_pad_length_histogram', 'target_valid_from_histogram':
        res[h] = {}
        for f in own['batch_files']:
            for k, v in f[h].items(): res[h][int(k)] = res[h].get(int(k), 0) + v
    return res


def differences(want, got, strict=False, extra_keys=()):
    """All differences between two outputs. `strict` looks at files, order of rows, types and columns, and at the keys of
    the metadata too, which may hold `extra_keys` that the expected one lacks"""
    res = []
    for key in sorted({*want.splits, *got.splits}):
        where = f'{key[0]}-split{key[1]}'
        if key not in got.splits: res.append(f'{where} was not written'); continue
        if key not in want.splits: res.append(f'{where} should not be there'); continue
        a, b = want.splits[key], got.splits[key]
        if strict:
            if [p.file for p in a] != [p.file for p in b]: res.append(f'{where}: files {[p.file for p in b]}, expected {[p.file for p in a]}')
            else:
                for p, q in zip(a, b): res += file_differences(p, q)
        else: res += window_differences(a, b, where)
        if (key in want.own) != (key in got.own): res.append(f'{where}: its metadata.json is {"missing" if key in want.own else "unexpected"}')
        elif key in want.own:
            x, y = want.own[key], got.own[key]
            bare = lambda d: {k: v for k, v in d.items() if k != 'batch_files'}
            known = {k: v for k, v in bare(y).items() if k not in extra_keys}
            res += json_differences(bare(x), known, f'{where}/metadata.json', strict)
            for h, n in totals(x).items():
                if n != totals(y)[h]: res.append(f'{where}/metadata.json {h}: {totals(y)[h]}, expected {n}')
            if sum(f['samples'] for f in y['batch_files']) != y['total_samples']: res.append(f'{where}/metadata.json: the samples of its files do not add up to total_samples')
            if strict and x['batch_files'] != y['batch_files']: res.append(f'{where}/metadata.json batch_files: {y["batch_files"]}, expected {x["batch_files"]}')
    for name, x in want.metadata.items():
        if name not in got.metadata: res.append(f'metadata_configs/{name}.json was not written'); continue
        y = {k: v for k, v in got.metadata[name].items() if k not in extra_keys}
        res += json_differences(x, y, f'metadata_configs/{name}.json', strict)
    return res


def file_differences(want, got):
    "Between two files of one name: order and types count"
    res = []
    if want.schema != got.schema: res.append(f'{want.file}: schema {got.schema}, expected {want.schema}')
    if want.rows != got.rows: res.append(f'{want.file}: the order of rows differs: {got.rows and got.rows[:12]}, expected {want.rows and want.rows[:12]}')
    if list(want.coords) != list(got.coords): return [*res, f'{want.file}: coordinates {list(got.coords)}, expected {list(want.coords)}']
    if list(want.features) != list(got.features): return [*res, f'{want.file}: features {list(got.features)}, expected {list(want.features)}']
    for k, a in [*want.coords.items(), *want.features.items()]:
        b = got.coords[k] if k in want.coords else got.features[k]
        if a.dtype != b.dtype: res.append(f'{want.file} {k}: type {b.dtype}, expected {a.dtype}')
        res += array_difference(a, b, f'{want.file} {k}')
    return res


def from_oracle(result, cfg, dataset):
    "What the plain-Python job says must be there, in the same shape; files are not its concern"
    out = Output({}, {}, {dataset: result.metadata})
    for k, ws in enumerate(result.windows):
        names = [c for c in (ws[0] if ws else {}) if c != 'features'] or list(COORDS)
        types = result.metadata['column_data_types']
        def array(c): # ids and times of any width stay integers
            t = types.get(c, 'Int64')
            return np.array([w['features'][c] for w in ws], dtype=t.lower() if t.startswith('Float') else np.int64)
        out.splits[dataset, k] = [Part('', {c: np.array([w[c] for w in ws], np.int64) for c in names}, {c: array(c) for c in result.features} if ws else {})]
        if not cfg.get('merge_output', True):
            own = dict(result.splits[k])
            hists = {h: {str(i): n for i, n in own.pop(h).items()} for h in ('left_pad_length_histogram', 'target_valid_from_histogram')}
            out.own[dataset, k] = {**own, 'batch_files': [dict(path='', samples=len(ws), **hists)]}
    return out
