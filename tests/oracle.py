"""A slow, obvious events job: the rules of the events job in plain Python, for tests to compare with.

Dicts, loops, `math.log` and `numpy.percentile`; no data frames and no package code. A source is a `Source`
whose rows are plain dicts, so whatever reads a file stays outside. Nothing here is meant to be fast or general:
times are numbers, digit strings, dates or datetimes (in any zone), and vocabularies have the default options.
"""
import math, re
from collections import Counter
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

KEY_SPECIALS = ['[PAD]', '[MASK]', '[UNK]', '[USR]', '[EVT]']
VAL_SPECIALS = ['[PAD]', '[MASK]', '[UNK]']
PAD, MASK, UNK = range(3)
BPE_SPECIALS = ['[UNK]', '[PAD]', '[MASK]']
COLUMNS = ['key', 'key_id', 'value', 'val_id', 'val_pos', 'vtype', 'time', 'logsec', 'source_idx', 'event_idx', 'hour', 'dow', 'dom']
LIMITS = dict(max_profile_toks=200, max_lifelong_toks=64, max_events=6500, max_event_toks=24)
EPOCH = datetime(1970, 1, 1)


@dataclass
class Source:
    "One declared table: its rows as dicts, and which columns play which role"
    rows: list
    cats: list = field(default_factory=list)
    conts: list = field(default_factory=list)
    signed_conts: list = field(default_factory=list)
    texts: list = field(default_factory=list)
    lifelong: list = field(default_factory=list)
    time_col: str = None
    name: str = 'source'
    time_zone: str = 'UTC'
    ambiguous: str = 'earliest' # of two local times in autumn
    bad_time: str = 'error'
    null_time: str = 'error'

    def fields(self):
        "Every declared field with its kind, in declared order"
        return ([(c, 'cat') for c in self.cats] + [(c, 'num') for c in self.conts] + [(c, 'text') for c in self.texts])

    def instant(self, v): return instant(v, self.time_zone, self.ambiguous == 'latest')

    def seconds(self, v): return seconds(v, self.time_zone, self.ambiguous == 'latest')

    def bad(self, v):
        "Is there a time that cannot be read?"
        return isinstance(v, str) and v != '' and not NUMBER.fullmatch(v)

    def when(self, row):
        "Instant of the event in microseconds; None for what has no time"
        v = row[self.time_col]
        return None if v in (None, '') or self.bad(v) else self.instant(v)

    def part(self, row):
        "'profile', 'event', 'static' for a fact of an event source, or why the row is dropped"
        if self.time_col is None: return 'profile'
        if self.when(row) is not None: return 'event'
        if self.bad(row[self.time_col]): return 'unreadable time'
        return 'static' if self.null_time == 'profile' else 'no time'


# ---------------------------------------------------------------- values
def value_string(v):
    "The text of one cell, each column by its own type"
    if v is None: return ''
    if isinstance(v, bool): return 'true' if v else 'false'
    if isinstance(v, datetime): return v.strftime('%Y-%m-%d %H:%M:%S.%f')
    if isinstance(v, date): return v.isoformat()
    if isinstance(v, float): return 'NaN' if math.isnan(v) else repr(v)
    return str(v)


def category(v):
    "The text of a cell of a category or text column: a number that is not finite is missing"
    return '' if isinstance(v, float) and not math.isfinite(v) else value_string(v)


NUMBER = re.compile(r'[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?')


def number(v):
    "A finite float, or None for what is no number: null, NaN, an infinity, a bool, a date, other text"
    if v is None or isinstance(v, (bool, date)): return None
    if isinstance(v, str):
        if not NUMBER.fullmatch(v): return None
    f = float(v)
    return f if math.isfinite(f) else None


def sign_word(v):
    "negative, zero, positive, or unknown where there is no number"
    x = number(v)
    if x is None: return 'unknown'
    return 'zero' if x == 0 else 'negative' if x < 0 else 'positive'


def magnitude(v):
    "The cell of a signed column without its sign; None where there is no number"
    if number(v) is None: return None
    return abs(v) if not isinstance(v, str) else abs(float(v))


def data_word(s):
    "How a data string stands in the stored vocabulary: one backslash before what could be read as a special token"
    return '\\' + s if re.fullmatch(r'\\*(\[(PAD|MASK|UNK|NULL|USR|EVT)\]|<bucket_\d+>)', s) else s


# ---------------------------------------------------------------- time
def instant(v, zone='UTC', later=False):
    "Microseconds since 1970 (UTC) of one time cell, for the order; numbers are seconds. Of a local time that comes twice, `later` takes the second"
    if v is None: return None
    if isinstance(v, datetime):
        if v.tzinfo is None: v = v.replace(tzinfo=ZoneInfo(zone), fold=int(later))
        return (v.astimezone(timezone.utc).replace(tzinfo=None) - EPOCH) // timedelta(microseconds=1)
    if isinstance(v, date): return instant(datetime(v.year, v.month, v.day), zone)
    return math.floor(float(v) * 1_000_000) if isinstance(v, float) else int(v) * 1_000_000


def seconds(v, zone='UTC', later=False):
    "Whole seconds since 1970: dates and datetimes rounded down, numbers cut toward zero"
    if v is None: return None
    if isinstance(v, (int, float, str)): return int(v)
    us = instant(v, zone, later)
    return None if us is None else us // 1_000_000


def calendar(s, zone='UTC'):
    "(hour, weekday with Monday 1, day of month) of epoch seconds on the clocks of a zone"
    t = (EPOCH + timedelta(seconds=s)).replace(tzinfo=timezone.utc).astimezone(ZoneInfo(zone))
    return float(t.hour), float(t.isoweekday()), float(t.day)


def logsec(delta): return 8 * math.log(1 + max(delta, 0) / 8)


def eval_instant(v):
    "The evaluation time in microseconds since 1970"
    return instant(datetime.fromisoformat(v) if isinstance(v, str) else v)


# ---------------------------------------------------------------- byte-pair encoding
def byte_words(text):
    "The pieces of a text that merges never cross, each a list of byte symbols"
    return [list(w) for w, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(text)]


class BPE:
    "Byte-pair encoding learned and applied by the book: count all pairs, merge the most frequent, again"
    def __init__(self, texts, size=28_000, min_count=2):
        words = Counter(tuple(w) for t in texts for w in byte_words(t))
        self.ids = {s: i for i, s in enumerate(BPE_SPECIALS)}
        for s in sorted({s for w in words for s in w}): self.ids[s] = len(self.ids)
        self.merges = []
        while len(self.ids) < size:
            pairs = Counter()
            for w, n in words.items():
                for p in zip(w, w[1:]): pairs[p] += n
            if not pairs: break
            best = min(pairs, key=lambda p: (-pairs[p], self.ids[p[0]], self.ids[p[1]]))
            if pairs[best] < min_count: break
            self.merges.append(best)
            self.ids.setdefault(best[0] + best[1], len(self.ids))
            merged = Counter()
            for w, n in words.items(): merged[tuple(merge(list(w), best))] += n
            words = merged

    def encode(self, text):
        out = []
        for w in byte_words(text):
            for pair in self.merges: w = merge(w, pair)
            out += [self.ids.get(s, 0) for s in w]
        return out


def merge(word, pair):
    "`word` with every `pair` of neighbours joined, from the left"
    out, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i+1]) == pair: out.append(word[i] + word[i+1]); i += 2
        else: out.append(word[i]); i += 1
    return out


# ---------------------------------------------------------------- vocabulary
class Fit:
    "All that is learned from the sources, or from their rows of some entities: keys, values, bucket bounds, which texts are short lists, byte pairs. Dropped events do not count"
    def __init__(self, sources, num_buckets=100, cardinality_threshold=100, bpe_vocab_size=28_000, entity_col=None, only=None):
        self.num_buckets, self.cardinality_threshold = num_buckets, cardinality_threshold
        keys, words = set(), set()
        numbers, texts = {}, {}
        for src in sources:
            rows = [r for r in src.rows if src.part(r) in ('profile', 'event', 'static') and (only is None or r[entity_col] in only)]
            for col, kind in src.fields():
                keys.add(col)
                cells = [r[col] for r in rows]
                if kind == 'cat': words |= {category(v) for v in cells}
                if kind == 'text': texts.setdefault(col, []).extend(category(v) for v in cells)
                if kind == 'num':
                    if col in src.signed_conts:
                        keys.add(col + '_sign')
                        words |= {sign_word(v) for v in cells}
                        cells = [magnitude(v) for v in cells]
                    numbers.setdefault(col, []).extend(x for v in cells if (x := number(v)) not in (None, 0))
            for col in src.lifelong:
                keys.add('lifelong'); words.add(col)
        self.key_vocab = {k: i for i, k in enumerate(KEY_SPECIALS + sorted(keys))}
        self.num_bounds = {k: bounds(xs, num_buckets) for k, xs in sorted(numbers.items()) if xs}
        short = {k for k, ss in texts.items() if len(set(ss)) <= cardinality_threshold}
        self.lowcard_text_keys = sorted(short)
        n = len(VAL_SPECIALS)
        self.word_id = {w: n + i for i, w in enumerate(sorted(words))}
        n += len(words)
        self.bucket_id = [n + i for i in range(num_buckets + 1)]
        n += num_buckets + 1
        for w in sorted({s for k in short for s in texts[k]} - words):
            self.word_id[w] = n; n += 1
        self.bpe_offset = n
        long = [s for k, ss in texts.items() if k not in short for s in ss if s]
        self.bpe = BPE(long, bpe_vocab_size) if len(short) < len(texts) else None

    @property
    def val_vocab(self):
        "The value vocabulary as it is stored: text to id, in id order"
        pairs = [(w, i) for i, w in enumerate(VAL_SPECIALS)] + [(data_word(w), i) for w, i in self.word_id.items()]
        pairs += [(f'<bucket_{b}>', i) for b, i in enumerate(self.bucket_id)]
        return dict(sorted(pairs, key=lambda p: p[1]))

    @property
    def n_vals(self): return self.bpe_offset + (len(self.bpe.ids) if self.bpe else 0)

    def bucket(self, key, v):
        "The value id of a number: zero is bucket 0, others 1 + the number of bounds below"
        x, bs = number(v), self.num_bounds.get(key)
        if x is None or bs is None: return UNK
        return self.bucket_id[0] if x == 0 else self.bucket_id[1 + sum(b < x for b in bs)]

    def text_ids(self, key, s):
        if key in self.lowcard_text_keys: return [self.word_id.get(s, UNK) if s else UNK]
        if not s: return [self.bpe_offset]
        return [self.bpe_offset + i for i in self.bpe.encode(s)]

    def tokens(self, src, row):
        "(key, key_id, value, val_id, val_pos, vtype) of every declared field of one row"
        out = []
        def add(key, vtype, value, ids):
            for pos, i in enumerate(ids): out.append((key, self.key_vocab.get(key, UNK), value, i, pos, vtype))
        for col, kind in src.fields():
            v = row[col]
            if kind == 'cat': add(col, kind, category(v), [self.word_id.get(category(v), UNK)])
            elif kind == 'text': add(col, kind, category(v) or '[UNK]', self.text_ids(col, category(v)))
            elif col in src.signed_conts:
                word = sign_word(v)
                add(col, kind, value_string(magnitude(v)), [self.bucket(col, magnitude(v))])
                add(col + '_sign', 'cat', word, [self.word_id.get(word, UNK)])
            else: add(col, kind, value_string(v), [self.bucket(col, v)])
        return out


def bounds(xs, num_buckets):
    "The inner percentiles that split the numbers into `num_buckets` equal shares"
    return [float(b) for b in np.percentile(np.array(xs, float), [100 * i / num_buckets for i in range(1, num_buckets)])]


# ---------------------------------------------------------------- rows
def token_rows(fit, profiles, events, entity_col, eval_time, after_eval='drop', points=None):
    """All token rows in total order, and the ledger {source name: {reason: rows}} of what was left out.

    `points` are (entity, time) pairs: a record for each. Without them every entity has one record, at `eval_time`.
    """
    profiles = [profiles] if isinstance(profiles, Source) else list(profiles or [])
    sources, end, ledger = profiles + list(events), eval_time if points is None else None, {}
    tables = []  # (source, its index in the shards, kind, rows with their number): the rows without a time are a table of their own
    for i, src in enumerate(sources):
        note = ledger.setdefault(src.name, Counter(read=len(src.rows)))
        for kind in 'profile', 'event', 'static':
            rows = [(n, r) for n, r in enumerate(src.rows) if src.part(r) == kind]
            if rows: tables.append((src, i - len(profiles), kind, rows))
        note.update(Counter(p for r in src.rows if (p := src.part(r)) in ('no time', 'unreadable time')))
        note['unreadable milestones'] = sum(src.bad(r[c]) for r in src.rows for c in src.lifelong)
    entities = {r[entity_col] for *_, rows in tables for _, r in rows}
    times = {e: sorted((t for p, t in points if p == e), key=eval_instant) if points is not None else [end] for e in entities}
    cut = lambda e, k: math.inf if after_eval == 'keep' or times[e][k] is None else eval_instant(times[e][k])
    records = [(e, k) for e in sorted(entities) for k in range(len(times[e]))]
    asked = {e for e, _ in records}
    def known(src, kind, row, col):
        "From when on a milestone is known; None if there is none"
        v = row[col]
        if v is None or v == '' or src.bad(v): return None
        return max(src.instant(v), src.instant(row[src.time_col])) if kind == 'event' else src.instant(v)

    for src, _, kind, rows in tables:
        note, latest = ledger[src.name], lambda e: max(cut(e, k) for k in range(len(times[e])))
        for _, r in rows:
            e = r[entity_col]
            if e not in asked: note['no evaluation point'] += 1
            elif kind == 'event' and src.instant(r[src.time_col]) > latest(e): note['after the evaluation time'] += 1
            elif src.fields() or any((t := known(src, kind, r, c)) is not None and t <= latest(e) for c in src.lifelong): note['kept'] += 1
            else: note['no token'] += 1

    out, used = [], 0
    whole = lambda v: seconds(datetime.fromisoformat(v) if isinstance(v, str) else v)
    for e, k in records:
        before = len(out)
        still, moving, newest, at = [], [], None, whole(times[e][k])  # rows with what decides their place
        for t, (src, s, kind, rows) in enumerate(tables):
            mine = [(n, r) for n, r in rows if r[entity_col] == e]
            if kind == 'event':
                seen = sorted(((src.instant(r[src.time_col]), n, r) for n, r in mine if src.instant(r[src.time_col]) <= cut(e, k)), key=lambda x: x[:2])
                if src.fields() and seen: newest = max(newest if newest is not None else -math.inf, *(src.seconds(r[src.time_col]) for *_, r in seen))
                moving += [(src, s, number, src.seconds(r[src.time_col]), r) for number, (_, _, r) in enumerate(seen)]
            else:
                for n, r in mine: still += [((tok[0], t, n, 0, tok[4]), (*tok, 0, 0.)) for tok in fit.tokens(src, r)]
            cells = {}  # (column, second) → from when on it is known; the same milestone in several rows counts once
            for _, r in mine:
                for c, col in enumerate(src.lifelong):
                    if (when := known(src, kind, r, col)) is not None:
                        where = c, src.seconds(r[col])
                        cells[where] = min(when, cells.get(where, when))
            for (c, second), when in cells.items():
                if when > cut(e, k): ledger[src.name]['lifelong after eval_time'] += 1
                else: still.append((('lifelong', second, t, c, 0), ('lifelong', fit.key_vocab['lifelong'], src.lifelong[c], fit.word_id[src.lifelong[c]], 0, 'cat',
                                                                     second, logsec(at - second) if second > 0 else 0.)))
        more = {} if points is None else dict(record_idx=k, eval_time=at)
        for _, row in sorted(still, key=lambda x: x[0]): out.append({**dict(zip([entity_col] + COLUMNS, (e, *row, -1, -1, 0., 0., 0.))), **more})
        for src, s, number, second, r in moving:
            for tok in sorted(fit.tokens(src, r), key=lambda tok: (tok[0], tok[4])):
                out.append({**dict(zip([entity_col] + COLUMNS, (e, *tok, second, logsec(newest - second), s, number, *calendar(second, src.time_zone)))), **more})
        used += len(out) > before
    if points is not None: ledger['evaluation points'] = Counter(read=len(points), kept=used) + Counter({'entity without rows': len(points) - len(records), 'no events before it': len(records) - used})
    return out, ledger


def row_order(r, entity_col):
    "The order of recorded rows, where milestones of one time stand by name; in a shard they stand as declared"
    return r[entity_col], r['source_idx'], r['event_idx'], r['key'], r['val_pos'], r['time'], r['value']


# ---------------------------------------------------------------- records and batches
def records(rows, entity_col, **limits):
    "One record per entity (and evaluation point), in id order, cut to the limits"
    lim = {**LIMITS, **limits}
    by_entity = {}
    for r in rows: by_entity.setdefault((r[entity_col], r.get('record_idx', 0)), []).append(r)
    out = []
    for e in sorted(by_entity):
        tok = lambda r: [r['key_id'], r['val_id'], r['val_pos']]
        still = [r for r in by_entity[e] if r['event_idx'] < 0]
        prof = [r for r in still if r['key'] != 'lifelong'][:lim['max_profile_toks']]
        life = sorted((r for r in still if r['key'] == 'lifelong'), key=lambda r: r['time'])
        life = life[max(0, len(life) - lim['max_lifelong_toks']):]
        evs = {}
        for r in by_entity[e]:
            if r['event_idx'] >= 0: evs.setdefault((r['time'], r['source_idx'], r['event_idx']), []).append(r)
        evs = [evs[k] for k in sorted(evs)]
        evs = evs[max(0, len(evs) - lim['max_events']):]
        events = [[tok(r) for r in ev[:lim['max_event_toks']]] for ev in evs]
        out.append(dict(uid=e[0], n_toks=len(prof) + len(life) + sum(map(len, events)),
                        profile=[tok(r) for r in prof], profile_time=[0.] * len(prof),
                        lifelong=[tok(r) for r in life], lifelong_time=[r['logsec'] for r in life],
                        events=events, event_time=[ev[0]['logsec'] for ev in evs],
                        cal=[[ev[0]['hour'], ev[0]['dow'], ev[0]['dom']] for ev in evs]))
    return out


def greedy(recs, max_tokens):
    "Records in order, a new batch whenever the next record would not fit into a batch that holds something"
    out, cost = [], 0
    for r in recs:
        if not out or cost + r['n_toks'] > max_tokens: out.append([]); cost = 0
        out[-1].append(r); cost += r['n_toks']
    return out


def padded(seqs, fill):
    width = max(map(len, seqs))
    return [list(s) + [fill] * (width - len(s)) for s in seqs]


def pack(recs):
    "One batch as nested lists"
    b = {}
    for part in 'profile', 'lifelong':
        b[part] = padded([r[part] for r in recs], [0, 0, 0])
        b[part + '_mask'] = padded([[True] * len(r[part]) for r in recs], False)
        b[part + '_time'] = padded([r[part + '_time'] for r in recs], 0.)
    b['event_tokens'], b['event_offsets'], b['event_user'], b['history_offsets'] = [], [0], [], [0]
    b['event_time'], b['cal'] = [], []
    for u, r in enumerate(recs):
        for ev, t, c in zip(r['events'], r['event_time'], r['cal']):
            b['event_tokens'] += ev
            b['event_offsets'].append(len(b['event_tokens']))
            b['event_user'].append(u); b['event_time'].append(t); b['cal'].append(c)
        b['history_offsets'].append(b['history_offsets'][-1] + len(r['events']) + 1)
    b['uids'] = [r['uid'] for r in recs]
    return b


def batches(recs, max_tokens): return [pack(b) for b in greedy(recs, max_tokens)]


def shapes(b):
    "Shape of each field, also where a dimension is 0"
    B, Lp, Ll = len(b['uids']), len(b['profile'][0]), len(b['lifelong'][0])
    T, E = len(b['event_tokens']), len(b['event_user'])
    return dict(profile=(B, Lp, 3), profile_mask=(B, Lp), profile_time=(B, Lp), lifelong=(B, Ll, 3), lifelong_mask=(B, Ll),
                lifelong_time=(B, Ll), event_tokens=(T, 3), event_offsets=(E + 1,), event_user=(E,), event_time=(E,),
                cal=(E, 3), history_offsets=(B + 1,))
