"""The tables that `table.py` runs on, each made once, seeded, and kept as files.

`rows(folder, n)` is an event log of `n` rows in order of time, so that the rows of a sequence lie scattered: sequences of
100 rows on average, three categorical columns (5,000 names of which few are common, 500 numbers, 12 words) and two real
ones. `files` has the same kind of rows in eight files that hold whole sequences, `distinct` as many different strings as rows.
"""
import json
from pathlib import Path

import numpy as np
import polars as pl

SEED = 42
MEAN_LENGTH = 100


def lengths(rng, n):
    "Rows of each sequence: between 20 and 180, 100 on average, `n` in all"
    out = rng.integers(20, 181, n//MEAN_LENGTH + 200)
    out = out[:np.searchsorted(np.cumsum(out), n)]
    return np.append(out, n - out.sum())


def common(rng, n, k, a=1.1):
    "`n` numbers below `k`, few of them common"
    w = np.arange(1, k+1, dtype=float)**-a
    return rng.choice(k, n, p=w/w.sum())


def table(n, distinct=False, seed=SEED):
    "The rows in order of sequence and position"
    rng = np.random.default_rng(seed)
    sizes = lengths(rng, n)
    ids = np.repeat(rng.permutation(10*len(sizes))[:len(sizes)], sizes)
    position = np.arange(n) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    names = pl.Series([f'item-{i:05d}' for i in rng.permutation(5000)])
    words = pl.Series('home search view cart buy return help login logout rate share wait'.split())
    df = pl.DataFrame(dict(sequenceId=ids, itemPosition=position,
        item=pl.Series([f'u{i:09d}' for i in rng.permutation(10*n)[:n]]) if distinct else names.gather(common(rng, n, 5000)),
        code=common(rng, n, 500, .6) - 50, action=words.gather(common(rng, n, 12, .8)), amount=np.round(rng.lognormal(3, 1, n), 2), level=rng.normal(size=n)))
    return df.with_columns(time=np.repeat(rng.random(len(sizes)), sizes) + position*1e-3)


def in_time(df):
    "Rows as they come in: sequences overlap, each in its own order"
    return df.sort('time', 'sequenceId').drop('time')


def make(folder, n, kind='rows'):
    "A folder with `log.parquet`, or for `files` a folder `log` of eight files; made if it is not there"
    folder = Path(folder)
    mark = folder/'made.json'
    if mark.exists(): return json.loads(mark.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    df = table(n, kind == 'distinct')
    if kind == 'files':
        (folder/'log').mkdir(exist_ok=True)
        for i in range(8): in_time(df.filter(pl.col('sequenceId') % 8 == i)).write_parquet(folder/'log'/f'{i}.parquet')
    else: in_time(df).write_parquet(folder/'log.parquet')
    facts = dict(rows=n, sequences=df['sequenceId'].n_unique(), kind=kind, input_mb=sum(f.stat().st_size for f in folder.rglob('*.parquet'))/2**20)
    mark.write_text(json.dumps(facts))
    return facts
