"""A slow, obvious way from one sequence to its windows: the table job's rules in plain Python, for tests to compare with.

Lists, loops and `numpy.linspace`; no package code. A sequence is a list of item positions (each one more than the
last) and columns of the same length; a window is a `Window`, whose values are plain lists.
"""
import hashlib, math
from dataclasses import dataclass
from datetime import datetime, timezone

import numpy as np


# ---------------------------------------------------------------- splits: a list of bounds for one sequence

def within_bounds(n, ratios):
    "The first rows to split 0, the next to split 1, ...; whole numbers are hit although shares are binary fractions"
    bounds, c = [0], 0.
    for r in ratios:
        c += r
        bounds.append(min(math.floor(n*c + n*1e-12 + 1e-9), n))
    return bounds[:-1]+[n]


def between_splits(ids, ratios, seed):
    "The split of each sequence"
    digest = {s: int(hashlib.sha256(f'{seed}:{s}'.encode()).hexdigest(), 16) for s in ids}
    cumulative = np.cumsum(ratios).tolist()
    splits = {s: min(sum(c <= (digest[s] >> 192)/2**64 for c in cumulative), len(ratios)-1) for s in ids}
    members = lambda k: [s for s in ids if splits[s]==k]
    for empty in [k for k in range(len(ratios)) if not members(k)]:
        donors = [k for k in range(len(ratios)) if len(members(k)) > 1]
        donor = max(donors, key=lambda k: (len(members(k)), ratios[k], -k))
        splits[max(members(donor), key=lambda s: (digest[s], s))] = empty
    return [splits[s] for s in ids]


def between_bounds(n, split, n_splits): return [0]*(split+1) + [n]*(n_splits-split)


def moment(v):
    "A boundary or a value of the split column as a number; microseconds for times"
    if isinstance(v, int): return v
    if isinstance(v, str): v = datetime.fromisoformat(v.replace('Z', '+00:00'))
    if not isinstance(v, datetime): v = datetime(v.year, v.month, v.day)
    since = (v if v.tzinfo else v.replace(tzinfo=timezone.utc)) - datetime(1970, 1, 1, tzinfo=timezone.utc)
    return (since.days*86_400 + since.seconds)*10**6 + since.microseconds


def cutoff_bounds(values, boundaries):
    "Rows go by the number of boundaries that they have reached"
    values, boundaries = [moment(v) for v in values], [moment(b) for b in boundaries]
    assert values==sorted(values)
    split = [sum(b <= v for b in boundaries) for v in values]
    return [sum(s < k for s in split) for k in range(len(boundaries)+2)]


# ---------------------------------------------------------------- windows of one part of one sequence

def distributed_starts(n, width, stride):
    "Starts in the padded part"
    room = max(n-width, 0)
    return sorted(set(np.linspace(0, room, math.ceil(room/stride)+1, dtype=int).tolist())) if n else []


def aligned_starts(lo, hi, width, prediction_length, steps):
    "Starts in the sequence; below 0 where there is padding"
    group = prediction_length*steps
    return [hi-width-j*group for j in reversed(range(math.ceil((hi-lo)/group)))]


@dataclass
class Window:
    "One window as it is stored"
    sequence: object
    subsequence: int
    start_item: int
    left_pad: int
    split_start: int
    split_end: int
    rows: list            # the row of the sequence in each slot, or None
    values: dict          # column -> value in each slot

    @property
    def coordinates(self): return self.sequence, self.subsequence, self.start_item, self.left_pad, self.split_start, self.split_end

    @property
    def attention(self): return [r is not None for r in self.rows]

    @property
    def target(self): return [r is not None and self.split_start <= self.start_item+p < self.split_end for p, r in enumerate(self.rows)]


def windows(sequence, positions, columns, bounds, split, width, stride=None, aligned=None, pad=0):
    "All windows of one split of one sequence, in order"
    lo, hi = bounds[split], bounds[split+1]
    if lo==hi: return []
    if aligned: context, starts = 0, aligned_starts(lo, hi, width, *aligned)
    else: context, starts = lo, [lo-max(width-(hi-lo), 0)+s for s in distributed_starts(hi-lo, width, stride or width)]
    res = []
    for k, start in enumerate(starts):
        rows = [r if r >= context else None for r in range(start, start+width)]
        left_pad = rows.count(None)
        res.append(Window(sequence, k, positions[rows[left_pad]]-left_pad, left_pad, positions[lo], positions[hi-1]+1, rows,
                          {c: [pad if r is None else v[r] for r in rows] for c, v in columns.items()}))
    return res
