"""The two data sets that the benchmarks run on, each made once, seeded, and kept as files.

`movielens(folder)` is MovieLens-100k ten times over: 9,430 users, 1,000,000 ratings. `bank(folder)` is invented:
10,000 customers with a million events in two sources, texts, signed amounts, dates, and the heavy tails of real
accounts. Each folder gets a `sources.json` that says which column is what, so that every package under test is told
the same, and `peer_events.parquet`/`peer_profiles.parquet`, the same rows in the only form that pragmatiq reads
(making them is not timed).
"""
import configparser, json, os
from datetime import date, datetime
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

EVAL_TIME = '2026-01-01'
SEED = 42

# ---------------------------------------------------------------- MovieLens x 10

def fastai_data():
    "The folder where fastai's `untar_data` keeps its data sets"
    home = Path(os.getenv('FASTAI_HOME', '~/.fastai')).expanduser()
    cfg = configparser.ConfigParser()
    cfg.read(home/'config.ini')
    return home/Path(cfg.get('DEFAULT', 'data', fallback='data')).expanduser()


def ml_100k(folder):
    "A folder with `u.data` and `u.user`: the real MovieLens-100k if fastai has it, else the package's look-alike"
    real = fastai_data()/'ml-100k'
    if (real/'u.data').exists() and (real/'u.user').exists(): return real, 'MovieLens-100k'
    from fastseqprep.sample import movielens_sample
    made = folder/'sample'
    if not (made/'u.data').exists(): movielens_sample(made, n_users=943, n_items=1682, n_ratings=100_000, seed=SEED)
    return made, 'a generated look-alike of MovieLens-100k'


def movielens(folder, times=10):
    "MovieLens-100k `times` over, the copies' users being other people; rows in random order as in the original"
    folder = Path(folder)
    if (folder/'sources.json').exists(): return folder
    folder.mkdir(parents=True, exist_ok=True)
    src, origin = ml_100k(folder)
    ratings = pl.read_csv(src/'u.data', separator='\t', has_header=False, new_columns=['user_id','movie_id','rating','timestamp'])
    users = pl.read_csv(src/'u.user', separator='|', has_header=False, new_columns=['user_id','age','gender','occupation','zip_code'],
        schema_overrides={'column_5': pl.String})
    n = users['user_id'].max()
    copies = lambda df: pl.concat([df.with_columns(pl.col('user_id') + n*i) for i in range(times)])
    copies(ratings).sample(fraction=1, shuffle=True, seed=SEED).write_csv(folder/'u.data', separator='\t', include_header=False)
    copies(users).write_csv(folder/'u.user', separator='|', include_header=False)
    return declare(folder, dict(name='MovieLens x %d' % times, origin=origin, entity_col='user_id', eval_time=EVAL_TIME,
        profile=dict(file='u.user', name='users', cats=['gender','zip_code'], conts=['age'], texts=['occupation'],
            csv=dict(separator='|', has_header=False, new_columns=['user_id','age','gender','occupation','zip_code'])),
        events=[dict(file='u.data', name='ratings', cats=['movie_id','rating'], time_col='timestamp',
            csv=dict(separator='\t', has_header=False, new_columns=['user_id','movie_id','rating','timestamp']))]))

# ---------------------------------------------------------------- the bank

SHOPS = ('Markt Kiosk Apotheke Bakery Cafe Tankstelle Books Garden Sports Fashion Hotel Pizzeria Grill Optik Salon Taxi '
         'Parking Cinema Museum Airlines Railway Telecom Energy Insurance Pharmacy Butcher Flowers Toys Music Motors').split()
NAMES = ('Adler Bruno Clara Delta Europa Fabel Gamma Hansa Ideal Jolly Kosmos Linden Merkur Nova Orion Prima Quartz Roma '
         'Sirius Tempo Ultra Vega Wave Xenia Yard Zenit Alpha Boreas Cargo Dorado Eden Fjord Globe Helios Iris Juno').split()
CITIES = ('Berlin Hamburg Wien Zurich Paris Lyon Milano Roma Madrid Porto London Leeds Dublin Oslo Malmo Turku Riga Vilnius '
          'Krakow Praha Brno Budapest Zagreb Sofia Athina Izmir Utrecht Gent Bern Graz').split()
PROFESSIONS = [f'{a} {b}' for a in ('junior','senior','chief','self-employed','retired') for b in
    ('nurse','teacher','driver','engineer','clerk','cook','lawyer','farmer','designer','electrician')]
DEVICES = [f'{m} {v}' for m in ('Pixel','Galaxy','iPhone','Redmi','Xperia') for v in range(6, 18)]

def zipf(n, a):
    "Weights of `n` values, the i-th falling as i**-a"
    w = np.arange(1, n+1, dtype=float)**-a
    return w/w.sum()


def draw(rng, values, n, a=1.1):
    "`n` draws from `values`, a few of them very common and most of them rare"
    return np.asarray(values)[rng.choice(len(values), n, p=zipf(len(values), a))]


def moments(rng, opened, n):
    "Whole seconds from the later of 2024 and the account's opening to the end of 2025, mostly by day"
    start = np.maximum(opened, np.datetime64('2024-01-01')).astype('datetime64[D]').astype(np.int64)
    end = np.datetime64('2026-01-01').astype('datetime64[D]').astype(np.int64)
    day = start + (rng.random(n)*(end-start)).astype(np.int64)
    hour = np.clip(rng.normal(14, 4.5, n), 0, 23.999)
    return (day*86_400 + (hour*3600).astype(np.int64)).astype('datetime64[s]').astype('datetime64[us]')


def bank(folder, n_customers=10_000, n_events=1_000_000):
    "Customers, their card payments and what they did in the app; few customers have thousands of events, most have dozens"
    folder = Path(folder)
    if (folder/'sources.json').exists(): return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    ids = np.array([f'C{i:07d}' for i in rng.choice(10**7, n_customers, replace=False)])
    opened = np.datetime64('2012-01-01') + rng.integers(0, 5000, n_customers)
    weight = rng.lognormal(0, 1.4, n_customers)
    who = np.concatenate([np.arange(n_customers), rng.choice(n_customers, n_events-n_customers, p=weight/weight.sum())])
    is_card = rng.random(n_events) < .5

    who_card, n = who[is_card], int(is_card.sum())
    n_shops = 20_000
    shop = rng.choice(n_shops, n, p=zipf(n_shops, .9))
    shop_name = np.array([f'{a} {b} {c} {d:03d}'.upper() for a, b, c, d in zip(rng.choice(NAMES, n_shops), rng.choice(SHOPS, n_shops),
        rng.choice(CITIES, n_shops), rng.integers(0, 400, n_shops))])
    text = shop_name[shop].astype(object)
    ref = rng.random(n) < .15                                       # some descriptions carry a number of their own
    text[ref] = [f'{t} REF {r:06d}' for t, r in zip(text[ref], rng.integers(0, 10**6, int(ref.sum())))]
    amount = np.round(rng.lognormal(3.2, 1.2, n), 2)*np.where(rng.random(n) < .1, 1, -1)
    amount[rng.random(n) < .005] = 0
    cards = pl.DataFrame(dict(customer_id=ids[who_card], booked_at=moments(rng, opened[who_card], n), amount=amount,
        balance=np.round(rng.lognormal(7, 1.5, n) - 400, 2), currency=draw(rng, 'EUR USD GBP CHF SEK PLN CZK HUF NOK DKK TRY JPY'.split(), n, 2),
        mcc=rng.permutation(np.arange(1000, 9999))[:300][draw(rng, np.arange(300), n_shops)[shop]], country=draw(rng, [f'{a}{b}' for a in 'ABDEFG' for b in 'ERSTZ'], n, 1.8),
        channel=draw(rng, ['contactless','online','chip','magstripe','atm'], n, 1), merchant=text))
    cards = cards.with_columns(pl.when(pl.Series(rng.random(n) >= .003)).then('amount').alias('amount'),
        pl.when(pl.Series(rng.random(n) >= .01)).then('merchant').alias('merchant'))

    who_app, n = who[~is_card], n_events-n
    app = pl.DataFrame(dict(customer_id=ids[who_app], at=moments(rng, opened[who_app], n) + rng.integers(0, 1000, n).astype('timedelta64[ms]'),
        screen=draw(rng, [f'{a}_{b}' for a in ('home','cards','loans','savings','invest','profile','help','transfer') for b in
            ('list','detail','edit','confirm','error','intro','search','filter','share','done')], n, .8),
        action=draw(rng, ['tap','open','close','scroll','swipe','back','type','login','logout','push'], n, 1),
        seconds=np.where(rng.random(n) < .1, 0, np.round(rng.lognormal(1.5, 1.1, n), 1)), device=draw(rng, DEVICES, n, .7)))
    app = app.with_columns(pl.when(pl.Series(rng.random(n) >= .02)).then('seconds').alias('seconds'))

    n = n_customers
    born = np.datetime64('1940-01-01') + rng.integers(0, 24_000, n)
    customers = pl.DataFrame(dict(customer_id=ids, segment=draw(rng, ['retail','premium','student','business','private'], n, 1),
        region=draw(rng, [f'R{i:03d}' for i in range(200)], n, .6), age=(np.datetime64('2025-12-31') - born).astype(np.int64)//365,
        income=np.round(rng.lognormal(10.3, .6, n), -2), profession=draw(rng, PROFESSIONS, n, .5), opened_on=opened,
        verified_at=(opened + rng.integers(0, 60, n)).astype('datetime64[us]') + rng.integers(0, 86_400, n).astype('timedelta64[s]')))
    customers = customers.with_columns(pl.when(pl.Series(rng.random(n) >= .08)).then('income').alias('income'),
        pl.when(pl.Series(rng.random(n) >= .3)).then('verified_at').alias('verified_at'))

    for name, df in dict(customers=customers, cards=cards.sample(fraction=1, shuffle=True, seed=1), app=app.sample(fraction=1, shuffle=True, seed=2)).items():
        df.write_parquet(folder/f'{name}.parquet')
    return declare(folder, dict(name='bank', origin='generated', entity_col='customer_id', eval_time=EVAL_TIME,
        profile=dict(file='customers.parquet', name='customers', cats=['segment','region'], conts=['age','income'], texts=['profession'],
            lifelong=['opened_on','verified_at']),
        events=[dict(file='cards.parquet', name='cards', cats=['currency','mcc','country','channel'], conts=['amount','balance'], signed_conts=['amount'],
                     texts=['merchant'], time_col='booked_at'),
                dict(file='app.parquet', name='app', cats=['screen','action'], conts=['seconds'], texts=['device'], time_col='at')]))

# ---------------------------------------------------------------- the same rows for pragmatiq

def scan(folder, src):
    "One declared source as a lazy frame"
    path = Path(folder)/src['file']
    return pl.scan_csv(path, **src['csv']) if 'csv' in src else pl.scan_parquet(path)


def roles(src):
    "The columns of a source that become tokens, in their order"
    return src.get('cats', []) + src.get('conts', []) + src.get('texts', [])


def as_map(df, cols):
    "The columns of a frame as one Arrow map column of strings per row; a null is the empty string"
    n, k = df.height, len(cols)
    vals = np.stack([df[c].cast(pl.String).fill_null('').to_numpy().astype(object) for c in cols], 1).reshape(-1)
    return pa.MapArray.from_arrays(pa.array(np.arange(0, n*k+1, k, dtype=np.int32)), pa.array(cols*n, pa.string()), pa.array(vals, pa.string()))


def seconds(df, col):
    "A time column as timestamp[us], integers being seconds"
    c = df[col]
    return (c if c.dtype.is_temporal() else pl.from_epoch(c, time_unit='s')).cast(pl.Datetime('us')).dt.replace_time_zone(None)


def for_pragmatiq(folder, d):
    "events.parquet (a map of fields per event, sorted by user and time) and profiles.parquet, as pragmatiq wants them"
    uid, out = d['entity_col'], Path(folder)/'pragmatiq'
    out.mkdir(exist_ok=True)
    parts = []
    for i, src in enumerate(d['events']):
        df = scan(folder, src).collect()
        df = df.with_columns(pl.col(uid).cast(pl.String), seconds(df, src['time_col']).alias('__ts')).sort(uid, '__ts', maintain_order=True)
        parts.append(pa.table(dict(user_id=df[uid].to_arrow().cast(pa.string()), ts=df['__ts'].to_arrow(),
            source=pa.array([['transaction','app'][i]]*df.height, pa.string()), fields=as_map(df, roles(src)))))
    ev = pa.concat_tables(parts).combine_chunks()
    order = pl.DataFrame({'u': pl.from_arrow(ev['user_id']), 't': pl.from_arrow(ev['ts'])}).with_row_index().sort('u', 't', 'index')['index'].to_numpy()
    pq.write_table(ev.take(pa.array(order)), out/'events.parquet', compression='zstd', row_group_size=65_536)
    src = d['profile']
    df = scan(folder, src).collect().with_columns(pl.col(uid).cast(pl.String)).sort(uid)
    life = [[dict(key=c, ts=t) for c, t in zip(src['lifelong'], row) if t is not None] for row in
            df.select(seconds(df, c).alias(c) for c in src['lifelong']).rows()] if src.get('lifelong') else [[]]*df.height
    as_of = datetime.combine(date.fromisoformat(d['eval_time']), datetime.min.time())
    pq.write_table(pa.table(dict(user_id=df[uid].to_arrow().cast(pa.string()), as_of=pa.array([as_of]*df.height, pa.timestamp('us')),
        attributes=as_map(df, roles(src)),
        lifelong=pa.array(life, pa.list_(pa.struct([('key', pa.string()), ('ts', pa.timestamp('us'))]))))), out/'profiles.parquet', compression='zstd')


def fixed_values(folder, d):
    "How many distinct categories the set has: pragmatiq's one vocabulary limit covers them and the BPE together"
    frames = [(src, scan(folder, src)) for src in [d['profile']] + d['events']]
    return sum(f.select(pl.col(c).n_unique()).collect().item() for src, f in frames for c in src.get('cats', []) + src.get('texts', [])
               if f.select(pl.col(c).n_unique()).collect().item() <= 100 or c in src.get('cats', []))


def declare(folder, d):
    "Count what there is, write pragmatiq's files and then `sources.json`, which makes the folder complete"
    for_pragmatiq(folder, d)
    d['n_events'] = sum(scan(folder, s).select(pl.len()).collect().item() for s in d['events'])
    d['n_entities'] = scan(folder, d['profile']).select(pl.len()).collect().item()
    d['n_fixed_values'] = fixed_values(folder, d)
    tmp = folder/'sources.json.tmp'
    tmp.write_text(json.dumps(d, indent=1))
    tmp.rename(folder/'sources.json')
    return folder
