"""A small bank-like data set for the tests of the events job as a whole: files in several layouts, the job, and digests of what it wrote."""
import hashlib
from datetime import date, datetime, timedelta
from pathlib import Path

import numpy as np, polars as pl

EVAL_TIME = '2024-01-01'


def make_frames(n=200, seed=0):
    "(customers, card, app): a profile and two event tables, with nulls, and no two events of a customer and table at the same time"
    rng = np.random.default_rng(seed)
    pick = lambda vals, k, p_null=.1: [None if rng.random() < p_null else vals[rng.integers(len(vals))] for _ in range(k)]
    some = lambda f, k, p_null=.1: [None if rng.random() < p_null else f() for _ in range(k)]
    ids = [f'c{i:04d}' for i in rng.permutation(n)]
    customers = pl.DataFrame({
        'cust': ids, 'region': pick(['north', 'south', 'é', ''], n), 'vip': pick([True, False], n), 'age': some(lambda: int(rng.integers(18, 90)), n),
        'balance': some(lambda: round(float(rng.normal(0, 500)), 2), n), 'job': pick(['baker', 'nurse', 'clerk'], n),
        'opened': some(lambda: date(2019, 1, 1) + timedelta(days=int(rng.integers(2000))), n)},
        schema_overrides={'vip': pl.Boolean, 'opened': pl.Date})
    def owners(k): return [ids[int(i)] for i in np.minimum(rng.zipf(1.4, k) - 1, n - 1)]
    k = 6 * n
    card = pl.DataFrame({
        'cust': owners(k), 'when': (1_690_000_000 + rng.permutation(4 * k)[:k] * (17_500_000 // (4 * k))).astype(np.int64), 'mcc': [int(x) for x in rng.integers(5400, 5420, k)],
        'amount': some(lambda: round(float(rng.lognormal(3, 2) * rng.choice([-1, 1])), 2), k, .05),
        'memo': some(lambda: ' '.join(rng.choice(['shop', 'café', 'rent', 'ticket', '№', 'refund'], rng.integers(1, 4))) + f' {rng.integers(40)}', k)})
    k = 3 * n
    app = pl.DataFrame({
        'cust': owners(k), 'at': [datetime(2023, 6, 1) + timedelta(microseconds=int(t) * (30_000_000_000_000 // (20 * k) + 1)) for t in rng.permutation(20 * k)[:k]],
        'screen': pick(['home', 'pay', '[MASK]', '1'], k), 'seconds': some(lambda: float(rng.integers(0, 30)) / 4, k)})
    return customers, card, app


def write_files(folder, frames, parts=1, shuffle=None):
    "The frames as Parquet files, each in `parts` pieces, rows in a seeded other order if asked: {name: glob}"
    folder, globs = Path(folder), {}
    for name, df in zip(['customers', 'card', 'app'], frames):
        (folder/name).mkdir(parents=True, exist_ok=True)
        if shuffle is not None: df = df.sample(fraction=1, shuffle=True, seed=shuffle)
        for i in range(parts): df[len(df)*i//parts:len(df)*(i+1)//parts].write_parquet(folder/name/f'part_{i}.parquet')
        globs[name] = str(folder/name/'*.parquet')
    return globs


def make_dataset(globs, out, **engine):
    from fastseqprep.source import DataSource
    from fastseqprep.events import PRAGMADataset
    customers = DataSource.from_file(globs['customers'], cats=['region', 'vip'], conts=['age', 'balance'], signed_conts=['balance'], texts=['job'], lifelong=['opened'],
                                     entity_col='cust', is_profile=True, name='customers')
    card = DataSource.from_file(globs['card'], cats=['mcc'], conts=['amount'], signed_conts=['amount'], texts=['memo'], time_col='when', entity_col='cust', name='card')
    app = DataSource.from_file(globs['app'], cats=['screen'], conts=['seconds'], time_col='at', entity_col='cust', name='app')
    return PRAGMADataset(customers, [card, app], 'cust', out, progress=False, **engine)


def run_job(globs, out, n_shards=4, num_buckets=8, cardinality_threshold=20, **engine):
    ds = make_dataset(globs, out, **engine)
    ds.fit_tokenizer(num_buckets, cardinality_threshold)
    ds.write_kv(EVAL_TIME, n_shards)
    return digests(out)


def digests(out):
    "{file name: sha256} of the shards and the tokenizer"
    files = sorted(Path(out).glob('shard_*.parquet')) + [Path(out)/'tokenizer.json']
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
