"""The whole table job in slow, plain Python: rows in lists, exact fractions, one window at a time.

    result = run(config, root)          # config: the keys of a preprocess.yaml; root: the folder that it runs in
    result.windows[0]                   # windows of the first split, as dicts, by sequence and number
    result.metadata                     # what the metadata JSON must hold
    result.splits[0]                    # what the first split's own metadata must hold, but for its files

Polars only opens files. Nothing here is shared with the package, so that where both agree, both are likely right.
"""
import datetime as dt, hashlib, json, math, os
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np, polars as pl

RESERVED = {'[unknown]': 0, '[other]': 1, '[mask]': 2}
FLOATS = {'Float16': np.float16, 'Float32': np.float32, 'Float64': np.float64}
INTS = [f'{u}Int{b}' for b in (8, 16, 32, 64) for u in ('', 'U')]
DEFAULTS = dict(
    project_root='.', read_format='csv', write_format='parquet', merge_output=True, selected_columns=None, categorical_columns=None, real_columns=None,
    cardinality_config=None, column_data_types=None, normalize_real_columns=True, normalize_on_all_data=False, split_method='within_sequence', split_ratios=None,
    split_column=None, split_values=None, window_length=None, window_lengths=None, max_target_offset=1, window_stride=None, prediction_aligned_splits=(),
    prediction_alignment_steps=1, prediction_length=None, target_offset=None, max_rows=None, seed=1010, metadata_config_path=None, mask_column=None,
    curriculum_column=None, use_precomputed_maps=None)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


class Refused(ValueError): "What the job must refuse"


@dataclass
class Result:
    windows: list   # per split: list of dicts
    metadata: dict
    splits: list    # per split: dict
    features: list  # feature names in order
    fitted_rows: int = 0
    dropped: dict = field(default_factory=dict)


# ---------------------------------------------------------------- reading
def files_of(path, suffix):
    "The file itself, or of a folder: its files by name, then its folders by name, each likewise"
    if path.is_file(): return [path]
    entries = sorted(os.scandir(path), key=lambda e: e.name)
    found = [Path(e.path) for e in entries if e.is_file() and e.name.endswith(suffix)]
    for e in entries:
        if e.is_dir(): found += files_of(Path(e.path), suffix)
    return found


def read(cfg, root):
    "All rows as lists by column, and the columns' types"
    path = root/cfg['preprocessing_data_path']
    files = files_of(path, cfg['read_format'])
    if not files: raise Refused('no file')
    frames = [pl.read_csv(f, infer_schema_length=None) if cfg['read_format'] == 'csv' else pl.read_parquet(f) for f in files]
    frames = [f for f in frames if f.height] or frames[:1]
    wide = {c: pl.Int64 for c in curriculum(cfg)} # not a feature: any integer type, in any file
    frames = [f.cast({c: t for c, t in wide.items() if f.schema[c].is_integer()}) for f in frames]
    left = cfg['max_rows'] or sum(f.height for f in frames)
    parts = []
    for f in frames:
        parts.append(f.head(left))
        left -= parts[-1].height
        if left <= 0: break
    df = pl.concat(parts, how='vertical')
    wanted = cfg['selected_columns']
    curr = curriculum(cfg)
    if wanted is not None:
        wanted = [c for c in dict.fromkeys(wanted) if c not in ('sequenceId', 'itemPosition')]
        extra = [c for c in [*curr, cfg['mask_column'], cfg['split_column']] if c and c not in wanted]
        df = df.select('sequenceId', 'itemPosition', *wanted, *extra)
    return df, [c for c in (wanted if wanted is not None else df.columns)
                if c not in ('sequenceId', 'itemPosition', cfg['mask_column'], *curr)]


def curriculum(cfg):
    c = cfg['curriculum_column']
    return [] if c is None else [c] if isinstance(c, str) else list(c)


def kind_of(dtype):
    if dtype in (pl.String, pl.Categorical, pl.Enum): return 'text'
    if dtype == pl.Boolean: return 'bool'
    if dtype.is_integer(): return 'int'
    if dtype.is_float() or dtype.is_decimal(): return 'float'
    if dtype.is_temporal(): return 'time'
    raise Refused(f'type {dtype}')


# ---------------------------------------------------------------- splits
def cut(n, ratios):
    "Bounds of the parts of n rows: exact but for a billionth, the last one at n"
    out, c = [0], Fraction(0)
    for r in ratios:
        c += Fraction(r)
        out.append(min(n, math.floor(n*c + Fraction(n, 10**12) + Fraction(1, 10**9))))
    out[-1] = n
    return out


def between(ids, ratios, seed):
    "Split of each sequence by the SHA-256 of seed and id; empty splits then take one from the fullest"
    digest = {i: int.from_bytes(hashlib.sha256(f'{seed}:{i}'.encode()).digest(), 'big') for i in ids}
    if len(ids) < len(ratios): raise Refused('fewer sequences than splits')
    cum = np.cumsum(ratios)
    of = {i: min(sum(bool(c <= (digest[i] >> 192)/2**64) for c in cum), len(ratios)-1) for i in ids}
    for empty in [k for k in range(len(ratios)) if k not in of.values()]:
        count = lambda k: sum(v == k for v in of.values())
        donor = min((k for k in range(len(ratios)) if count(k) > 1), key=lambda k: (-count(k), -ratios[k], k))
        of[max((i for i in ids if of[i] == donor), key=lambda i: (digest[i], i))] = empty
    return of


def micros(x):
    "Microseconds since 1970 in UTC; no zone means UTC"
    if isinstance(x, str): x = dt.datetime.fromisoformat(x)
    if not isinstance(x, dt.datetime): x = dt.datetime(x.year, x.month, x.day)
    if x.tzinfo is None: x = x.replace(tzinfo=dt.timezone.utc)
    d = x - EPOCH
    return (d.days*86400 + d.seconds)*10**6 + d.microseconds


def instants(s):
    "Microseconds of a temporal or text column, floored"
    if s.dtype == pl.String: return [micros(x) for x in s.to_list()]
    if s.dtype == pl.Date: return [x*86400*10**6 for x in s.to_physical().to_list()]
    num, den = {'ns': (1, 1000), 'us': (1, 1), 'ms': (1000, 1)}[s.dtype.time_unit]
    return [x*num//den for x in s.to_physical().to_list()]


# ---------------------------------------------------------------- fitting
def moments(values):
    "Mean and sample standard deviation, from exact sums"
    xs = [Fraction(float(v)) for v in values]
    n = len(xs)
    mean = sum(xs)/n
    var = sum((x-mean)**2 for x in xs)/(n-1) if n > 1 else Fraction(0)
    return float(mean), root(var)


def root(q):
    "The square root of a fraction as a float, whatever its size"
    if q == 0: return 0.
    e = (q.numerator.bit_length() - q.denominator.bit_length())//2
    return math.ldexp(math.sqrt(q/Fraction(2)**(2*e)), e)


def fnv(value, seed):
    data = b'b:'+(b'1' if value else b'0') if isinstance(value, bool) else f'i:{value}'.encode() if isinstance(value, int) else b's:'+value.encode()
    h = 14695981039346656037 ^ (seed % 2**64)
    for b in data: h = ((h ^ b)*1099511628211) % 2**64
    return h


def canonical(rule):
    "A cardinality rule under its chief names"
    names = dict(k='top_k', max_categories='top_k', min_count='min_freq')
    out = {names.get(k, k): v for k, v in rule.items() if v is not None}
    if 'hashing' in out:
        h = {('num_buckets' if k == 'buckets' else k): v for k, v in out['hashing'].items() if v is not None}
        out['hashing'] = dict(num_buckets=h['num_buckets'], seed=h.get('seed', 0))
    return out


@dataclass
class Map:
    "Ids of one categorical column"
    kind: str
    ids: dict            # value → id, as written to the metadata
    rule: dict = None

    def __call__(self, v):
        if self.kind == 'bool' and not (self.rule or {}).get('hashing'): v = int(v)
        if self.kind == 'text' and v in ('[unknown]', '[other]'): return RESERVED[v]
        key = int(v) if self.kind == 'bool' else v
        if key in self.ids and not (self.kind != 'text' and isinstance(key, str)): return self.ids[key]
        h = (self.rule or {}).get('hashing')
        if not h: return 1
        v = bool(v) if self.kind == 'bool' else v
        return self.ids['[hash_bucket:0]'] + fnv(v, h['seed']) % h['num_buckets']

    @property
    def n_classes(self): return max(3, max(self.ids.values(), default=0) + 1)

    @staticmethod
    def restore(kind, ids, rule=None):
        def back(k): return k if kind == 'text' or k in RESERVED or k.startswith('[hash_bucket:') else int(k)
        return Map(kind, {back(k): v for k, v in ids.items()}, rule)


def fit_map(values, kind, rule):
    "Ids for the distinct values of the fitted rows, in the values' order"
    if kind == 'bool': values = [int(v) for v in values]
    if kind == 'text' and '[mask]' in values: raise Refused('[mask]')
    counts = {}
    for v in values:
        if not (kind == 'text' and v in RESERVED): counts[v] = counts.get(v, 0) + 1
    kept = set(counts)
    rule = rule or {}
    if 'top_k' in rule: kept = set(sorted(counts, key=lambda v: (-counts[v], v))[:rule['top_k']])
    elif 'min_freq' in rule: kept = {v for v in counts if counts[v] >= rule['min_freq']}
    elif 'hashing' in rule: kept = set()
    if rule and ('top_k' in rule or 'min_freq' in rule) and not counts: raise Refused('nothing to count')
    ids = {v: 3+i for i, v in enumerate(sorted(kept))}
    if kind == 'text' or 'hashing' in rule or not kept: ids |= {'[unknown]': 0, '[other]': 1}
    if 'hashing' in rule: ids |= {f'[hash_bucket:{b}]': 3+len(kept)+b for b in range(rule['hashing']['num_buckets'])}
    return Map(kind, ids, rule)


def standardise(x, mean, std, name):
    "In the column's own precision; without spread all is 0"
    F = FLOATS[name]
    if std == 0: return F(0)
    return F((F(x) - F(mean))/F(std + 1e-9))


# ---------------------------------------------------------------- windows
def distributed(L, W, stride):
    "Starts within a part of L rows that was padded on the left to at least W"
    pad = max(0, W-L)
    T = L+pad-W
    n = -(-T//stride) + 1
    if n == 1: return [0], pad
    starts = [math.floor(k*(T/(n-1))) for k in range(n)]
    starts[-1] = T
    return sorted(set(starts)), pad


def aligned(lo, hi, W, g):
    n = -(-(hi-lo)//g)
    return [hi-W-j*g for j in range(n-1, -1, -1)]


# ---------------------------------------------------------------- the job
def load(path, root):
    "A preprocess.yaml with the files that it names, as one dict"
    import yaml
    cfg = yaml.safe_load((root/path).read_text(encoding='utf-8'))
    extra = cfg.pop('additional_config_paths', None) or []
    def merge(a, b):
        for k, v in b.items():
            if k in a: merge(a[k], v)
            else: a[k] = v
        return a
    out = {}
    for p in [extra] if isinstance(extra, str) else extra: merge(out, yaml.safe_load((root/cfg['project_root']/p).read_text(encoding='utf-8')))
    return merge(out, cfg)


def run(config, root='.'):
    "The whole job on the files under `root`"
    root = Path(root)
    cfg = {**DEFAULTS, **config}
    home = root/cfg['project_root']
    old = json.loads((home/cfg['metadata_config_path']).read_text(encoding='utf-8')) if cfg['metadata_config_path'] else None
    df, features = read(cfg, root)
    cols = df.columns
    K = len(cfg['split_ratios'] or cfg['split_values'] + [None])
    widths = list(cfg['window_lengths'] or [cfg['window_length']]*K)
    stride = cfg['window_stride'] or widths[0]
    curr = curriculum(cfg)
    if cfg['curriculum_column'] is not None and cfg['write_format'] == 'pt' and (cfg['selected_columns'] is None or cfg['read_format'] == 'csv'):
        curr = [c for c in cols if c in curr]
    types = dict(cfg['column_data_types'] or {}) or (dict(old.get('column_data_types') or old['column_types']) if old else {})
    types = {k: next((t for t in [*INTS, *FLOATS] if t.lower() == v.lower()), v) for k, v in types.items()}

    # sequences, sorted
    rows = {}
    for r in df.iter_rows(named=True): rows.setdefault(r['sequenceId'], []).append(r)
    n_rows = df.height
    for i, seq in rows.items():
        seq.sort(key=lambda r: r['itemPosition'])
        at = [r['itemPosition'] for r in seq]
        if any(b-a != 1 for a, b in zip(at, at[1:])): raise Refused(f'positions of {i}')
    ids = sorted(rows)
    numbers = {i: k if not all(isinstance(j, int) and -2**63 <= j < 2**63 for j in ids) else i for k, i in enumerate(ids)}

    # roles
    kinds = {c: kind_of(df.schema[c]) for c in features}
    split_col = cfg['split_column']
    features = [c for c in features if c != split_col or cfg['selected_columns'] is None or c in cfg['selected_columns']]
    carried = [c for c in features if c == split_col and (kinds[c] == 'time' or kinds[c] == 'text')]
    real = [c for c in features if c not in carried and (kinds[c] == 'float' and types.get(c, 'Float64') in FLOATS or c in (cfg['real_columns'] or [])
                                                         or types.get(c) in FLOATS and kinds[c] == 'int')]
    cats = [c for c in features if c not in carried and c not in real]
    if any(kinds[c] == 'time' for c in cats): raise Refused('a time as a feature')
    def precision(c): # of the computation
        if types.get(c) in FLOATS: return types[c]
        return str(df.schema[c]) if str(df.schema[c]) in FLOATS else 'Float64'
    def value(c, x): return math.trunc(x) if c in cats and kinds[c] == 'float' else FLOATS[precision(c)](x) if c in real else x
    for seq in rows.values():
        for r in seq:
            for c in features:
                if r[c] is None: raise Refused(f'null in {c}')
                if isinstance(r[c], float) and not math.isfinite(r[c]): raise Refused(f'{r[c]} in {c}')
                r[c] = value(c, r[c])
    for c in cats:
        if kinds[c] == 'float': kinds[c] = 'int'

    # bounds
    if cfg['split_method'] == 'within_sequence': bounds = {i: cut(len(rows[i]), cfg['split_ratios']) for i in ids}
    elif cfg['split_method'] == 'between_sequence':
        of = between(ids, cfg['split_ratios'], cfg['seed'])
        bounds = {i: [0]*(of[i]+1) + [len(rows[i])]*(K-of[i]) for i in ids}
    else:
        edges = cfg['split_values']
        marks = df[split_col]
        if kind_of(marks.dtype) in ('time', 'text'): edges, marks = [micros(e) for e in edges], instants(marks)
        else: marks = marks.to_list()
        key = {(r['sequenceId'], r['itemPosition']): m for r, m in zip(df.iter_rows(named=True), marks)}
        bounds = {}
        for i in ids:
            ms = [key[i, r['itemPosition']] for r in rows[i]]
            if sorted(ms) != ms: raise Refused(f'{split_col} decreases')
            bounds[i] = [0] + [sum(m < e for m in ms) for e in edges] + [len(ms)]

    # fit
    fitted = [r for i in ids for r in (rows[i] if cfg['normalize_on_all_data'] else rows[i][:bounds[i][1]])]
    rules = {c: canonical(r) for c, r in (old['cardinality_config'] if old else cfg['cardinality_config'] or {}).items()}
    maps, stats = {}, {}
    folder = home/'configs'/'id_maps'
    for c in cats:
        given = folder/f'{c}.json'
        if old: maps[c] = Map.restore(kinds[c], old['id_maps'][c], rules.get(c))
        elif given.exists(): maps[c] = Map.restore(kinds[c], json.loads(given.read_text(encoding='utf-8')))
        else:
            if not fitted: raise Refused('nothing to fit on')
            maps[c] = fit_map([r[c] for r in fitted], kinds[c], rules.get(c))
    for c in real:
        if old: stats[c] = tuple(old['selected_columns_statistics'][c][k] for k in ('mean', 'std'))
        else:
            if not fitted: raise Refused('nothing to fit on')
            stats[c] = moments([r[c] for r in fitted])

    # encode
    out_types = {}
    for c in features:
        src = str(df.schema[c])
        if c in types: out_types[c] = types[c]
        elif c in carried: out_types[c] = {'Date': 'Date', 'String': "Datetime(time_unit='us', time_zone='UTC')"}.get(src, repr(df.schema[c]))
        elif c in cats: out_types[c] = 'Int64'
        else: out_types[c] = src if src in FLOATS else 'Float64'
    physical = {c: iter(instants(df[c]) if df[c].dtype == pl.String else df[c].to_physical().to_list()) for c in carried}
    phys = {c: {(s, p): next(physical[c]) for s, p in zip(df['sequenceId'].to_list(), df['itemPosition'].to_list())} for c in carried}
    coded = {}
    for i in ids:
        coded[i] = []
        for r in rows[i]:
            masked = cfg['mask_column'] is not None and bool(r[cfg['mask_column']])
            item = {}
            for c in features:
                if c in carried: v = phys[c][i, r['itemPosition']]
                elif c in cats: v = 2 if masked else maps[c](r[c])
                elif masked: v = 0.
                else: v = standardise(r[c], *stats[c], precision(c)) if cfg['normalize_real_columns'] else r[c]
                item[c] = FLOATS[out_types[c]](v) if out_types[c] in FLOATS else v
            coded[i].append(item)

    # windows
    windows = []
    for k in range(K):
        W, out = widths[k], []
        for i in ids:
            lo, hi = bounds[i][k], bounds[i][k+1]
            if lo == hi: continue
            first = rows[i][0]['itemPosition']
            if k in cfg['prediction_aligned_splits']:
                spans = [(s, max(0, -s)) for s in aligned(lo, hi, W, cfg['prediction_alignment_steps']*cfg['prediction_length'])]
            else:
                starts, pad = distributed(hi-lo, W, stride)
                spans = [(lo-pad+s, pad) for s in starts]
            for n, (s, pad) in enumerate(spans):
                real_rows = range(s+pad, s+W)
                w = dict(sequenceId=numbers[i], subsequenceId=n, startItemPosition=first+s, leftPadLength=pad, splitStartItemPosition=first+lo, splitEndItemPosition=first+hi)
                for c in curr:
                    seen = {rows[i][p][c] for p in real_rows}
                    if len(seen) > 1: raise Refused(f'{c} changes in a window of {i}')
                    w[f'__sequifier_curriculum_value__{c}'] = seen.pop()
                w['features'] = {c: [0]*pad + [coded[i][p][c] for p in real_rows] for c in features}
                out.append(w)
        windows.append(out)

    # metadata
    id_maps = {c: {str(k): v for k, v in m.ids.items()} for c, m in maps.items()}
    if old: id_maps = old['id_maps']
    n_classes = old['n_classes'] if old else {c: m.n_classes for c, m in maps.items()}
    statistics = old['selected_columns_statistics'] if old else {c: dict(mean=m, std=s) for c, (m, s) in stats.items()}
    if old: out_types = {**(old.get('column_data_types') or old['column_types']), **(types if cfg['column_data_types'] else {})}
    layout = dict(depth_layouts={}, tensor_payload_version=1, window_length=widths[0], window_lengths=widths, prediction_alignment_steps=cfg['prediction_alignment_steps'],
                  max_target_offset=cfg['max_target_offset'], stored_window_layout_version=2, prediction_aligned_splits=sorted(cfg['prediction_aligned_splits']),
                  prediction_length=cfg['prediction_length'], target_offset=cfg['target_offset'])
    name = Path(cfg['preprocessing_data_path'].rstrip('/')).stem
    ext = f".{cfg['write_format']}" if cfg['merge_output'] else ''
    iso = lambda v: v if isinstance(v, (int, str)) else v.isoformat()
    meta = dict(n_classes=n_classes, id_maps=id_maps, cardinality_config=rules, special_token_ids=RESERVED,
                split_paths=[f"{cfg['project_root']}/data/{name}-split{k}{ext}" for k in range(K)], column_data_types=out_types, selected_columns_statistics=statistics,
                normalize_real_columns=cfg['normalize_real_columns'], normalize_on_all_data=old.get('normalize_on_all_data', True) if old else cfg['normalize_on_all_data'],
                window_stride=stride, split_ratios=cfg['split_ratios'], split_method=cfg['split_method'], split_column=split_col,
                split_values=None if cfg['split_values'] is None else [iso(v) for v in cfg['split_values']], **layout)
    splits = []
    for k in range(K):
        s = dict(split_index=k, n_classes=n_classes, column_data_types=out_types, id_maps=id_maps, selected_columns_statistics=statistics,
                 normalize_real_columns=cfg['normalize_real_columns'], total_samples=len(windows[k]), **{**layout, 'window_length': widths[k]})
        if cfg['curriculum_column'] is not None: s['curriculum_column'] = cfg['curriculum_column']
        s['left_pad_length_histogram'] = histogram(w['leftPadLength'] for w in windows[k])
        s['target_valid_from_histogram'] = histogram(max(w['leftPadLength'], w['splitStartItemPosition']-w['startItemPosition']) for w in windows[k])
        splits.append(s)
    return Result(windows, meta, splits, features, len(fitted))


def histogram(xs):
    h = {}
    for x in xs: h[x] = h.get(x, 0) + 1
    return h
