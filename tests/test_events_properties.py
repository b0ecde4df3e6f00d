"""Random tables: the package against the plain-Python oracle, the ledger, decoding, and equal bytes for every layout of the same input."""
import json, math, os, random, subprocess, sys
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np, polars as pl, pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import oracle
from events_tables import make_frames, run_job, write_files
from fastseqprep.hashing import shard_of, split_position
from fastseqprep.source import DataSource
from fastseqprep.tokenizer import Tokenizer
from fastseqprep.events import PRAGMADataset
from fastseqprep.dataloader import PRAGMADataLoader

HERE = Path(__file__).parent
quick = settings(max_examples=int(os.environ.get('FSP_EXAMPLES', 20)), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# ---------------------------------------------------------------- random tables
WORDS = ['a', 'b', 'B', 'é', '', '1', '1.0', '[MASK]', '[UNK]', '\\[UNK]', '<bucket_1>', 'positive', 'x|y', ' ', 'true', '日本']
TEXTS = ['', '[UNK]', '[MASK] it', 'red', 'blue fish', 'one two  two', 'ünï', '1.0', 'a', "it's", '\n', '日本']
NUMBERS = [0., -0., 1., -1., 2.5, -2.5, 3., 1e6, .125, math.nan, math.inf, -math.inf]
NUMERALS = ['1', '2.5', '-7', '1e3', 'abc', ' 2', '', '.5', 'nan', 'inf', '1_0', '0']
IDS = {pl.Int64: [3, 1, -7, 10, 2**40], pl.String: ['b', 'a', 'B', 'é', '10', '9']}
COLUMNS = { # name: (polars type, cells, role)
    'word': (pl.String, WORDS, 'cats'), 'int': (pl.Int64, range(-3, 4), 'cats'), 'flag': (pl.Boolean, [True, False], 'cats'),
    'day': (pl.Date, [date(1960, 1, 1), date(2020, 2, 29), date(1970, 1, 1)], 'cats'), 'score': (pl.Float64, [1., 2.5, math.nan, math.inf, -math.inf], 'cats'),
    'stamp': (pl.Datetime('us'), [datetime(2020, 1, 1), datetime(2020, 1, 1, 1, 2, 3, 456), datetime(1969, 12, 31, 23, 59, 59)], 'cats'),
    'amount': (pl.Float64, NUMBERS, 'conts'), 'count': (pl.Int64, range(-4, 20), 'conts'), 'numeral': (pl.String, NUMERALS, 'conts'), 'on': (pl.Boolean, [True, False], 'conts'),
    'net': (pl.Float64, NUMBERS, 'signed'), 'delta': (pl.Int64, range(-2, 3), 'signed'), 'note': (pl.String, TEXTS, 'texts'), 'memo': (pl.String, TEXTS, 'texts')}
AUTUMN = datetime(2021, 10, 30, 23) # in the night that follows, clocks are put back in Warsaw; a week later in New York
NIGHT = [AUTUMN + timedelta(seconds=1800 * k + f) for k in range(-4, 14) for f in (0, .25)] + [datetime(2021, 11, 7, 0, 30) + timedelta(minutes=30 * k) for k in range(6)]
BASE = int((AUTUMN - oracle.EPOCH).total_seconds())
AGES = { # times and milestones of two ages: around 1970, where seconds are few, and around an autumn night in which an hour comes twice
    '1970': dict(eval_times=[100, 10, 3, -1], zones=['UTC'],
        instants=[(pl.Int64, range(-9, 14)), (pl.Datetime('us'), [oracle.EPOCH + timedelta(seconds=s/4) for s in range(-9, 50)]), (pl.Float64, [s/4 for s in range(-9, 50)]),
                  (pl.Date, [date(1970, 1, 1) + timedelta(days=d) for d in range(-2, 2)]), (pl.String, [str(s) for s in range(-9, 14)])],
        milestones={'born': (pl.Date, [date(1970, 1, 1) + timedelta(days=d) for d in (-400, -1, 0, 1)]),
                    'joined': (pl.Datetime('us'), [oracle.EPOCH + timedelta(seconds=s) for s in (-1, -.5, 0, .5, 3, 9, 10, 10.5, 11, 90)]),
                    'left': (pl.Datetime('us'), [oracle.EPOCH + timedelta(seconds=s) for s in (-7, 0, 2, 3, 10, 12)])}),
    'autumn': dict(eval_times=[BASE + 10**6, BASE + 4000, BASE, BASE - 9000], zones=['UTC', 'Europe/Warsaw', 'America/New_York', 'Asia/Kathmandu'],
        instants=[(pl.Datetime('us'), NIGHT), (pl.Datetime('ms'), NIGHT), (pl.Datetime('us', 'Europe/Warsaw'), [t.replace(tzinfo=timezone.utc) for t in NIGHT]),
                  (pl.Int64, [BASE + 1000 * k for k in range(-9, 20)]), (pl.Date, [date(2021, 10, 30) + timedelta(days=d) for d in range(3)])],
        milestones={'joined': (pl.Datetime('us'), NIGHT), 'born': (pl.Date, [date(2021, 10, 30), date(2021, 10, 31), date(1980, 1, 1)])})}
sometimes = lambda draw, yes=1, no=1: draw(st.sampled_from([False] * no + [True] * yes)) # simplest first


@st.composite
def tables(draw):
    "(profiles, events, fit, write, load, fit_on, seed): `(frame, roles)` for each source, and arguments. Hypothesis draws the layout, a seeded generator fills the cells"
    rng, id_type = random.Random(draw(st.integers(0, 2**32))), draw(st.sampled_from(list(IDS)))
    age, some = AGES[draw(st.sampled_from(list(AGES)))], lambda yes=1, no=1: sometimes(draw, yes, no)
    def columns(k, least=1): return draw(st.lists(st.sampled_from(list(COLUMNS)), min_size=least, max_size=k, unique=True))
    def frame(owners, cols, more):
        data, p_null = {'id': owners}, rng.choice([0, .2, 1 if len(owners) == 1 else .6])
        for c, (_, cells) in ({c: COLUMNS[c][:2] for c in cols} | more).items():
            data[c] = [None if c != 'when' and rng.random() < p_null else rng.choice(cells) for _ in owners]
        return pl.DataFrame(data, schema={'id': id_type} | {c: COLUMNS[c][0] for c in cols} | {c: t for c, (t, _) in more.items()}, strict=False)
    def roles(cols, **kw):
        r = {role: [c for c in cols if COLUMNS[c][2] == role] for role in ('cats', 'conts', 'texts')}
        signed = [c for c in cols if COLUMNS[c][2] == 'signed']
        return {**r, 'conts': r['conts'] + signed, 'signed_conts': signed, **kw}
    def clock(bad):
        "Zone and policy of a source, and the milestones that it may have"
        return (dict(time_zone=draw(st.sampled_from(age['zones'])), ambiguous=draw(st.sampled_from(['earliest', 'latest'])), **(dict(bad_time='null') if bad else {})),
                age['milestones'] | ({'moved': (pl.String, [str(age['eval_times'][1] + k) for k in (-9, 0, 1)] + ['soon', ''])} if bad else {}))
    profiles, events, ids = [], [], IDS[id_type]
    for _ in range(draw(st.integers(0, 2))):
        (rule, milestones), owners = clock(some()), rng.sample(ids, draw(st.integers(1, len(ids))))
        life = draw(st.lists(st.sampled_from(list(milestones)), unique=True))
        cols = columns(5, least=not life)
        profiles.append((frame(owners, cols, {c: milestones[c] for c in life}), roles(cols, lifelong=life, **rule)))
    for _ in range(draw(st.integers(0 if profiles else 1, 3))):
        bad = some()
        (rule, milestones), owners, when = clock(bad), rng.choices(ids, k=draw(st.integers(1, 25))), draw(st.sampled_from(age['instants']))
        life = draw(st.lists(st.sampled_from(list(milestones)), unique=True, max_size=1))
        df, policy = frame(owners, cols := columns(4, least=not life), {'when': when} | {c: milestones[c] for c in life}), {}
        if bad or some(): # some events have no time, or one that cannot be read
            df = df.with_columns(pl.when(pl.Series([rng.random() > .3 for _ in owners])).then('when').alias('when'))
            policy = dict(null_time=draw(st.sampled_from(['drop', 'profile'])))
        if bad and when[0] == pl.String: df = df.with_columns(pl.when(pl.Series([rng.random() > .2 for _ in owners])).then('when').otherwise(pl.lit(rng.choice(['soon', '']))).alias('when'))
        events.append((df, roles(cols, time_col='when', lifelong=life, **rule, **policy)))
    fit = dict(num_buckets=draw(st.sampled_from([2, 3, 10])), cardinality_threshold=draw(st.sampled_from([1, 3, 4, 5, 100])))
    limits = draw(st.fixed_dictionaries({}, optional=dict(max_profile_toks=st.integers(0, 4), max_lifelong_toks=st.integers(0, 2), max_events=st.integers(0, 4),
                                                          max_event_toks=st.integers(0, 4))))
    points = draw(st.lists(st.tuples(st.sampled_from(ids), st.sampled_from(age['eval_times'] + [age['eval_times'][2] + f for f in (7, .25, .5)])), min_size=1, max_size=8, unique=True)) if some() else None
    never = draw(st.booleans()) and not any(r['lifelong'] for _, r in profiles + events)
    write = dict(eval_time=None if never else draw(st.sampled_from(age['eval_times'] + [age['eval_times'][1] - .5])), points=points, n_shards=draw(st.integers(1, 3)), after_eval=draw(st.sampled_from(['drop', 'drop', 'keep'])))
    return profiles, events, fit, write, dict(max_tokens=draw(st.integers(1, 40)), **limits), draw(st.sampled_from(['all', 'train', 'ids'])), draw(st.integers(0, 50))


def make_sources(profiles, events):
    "The sources for the package"
    return ([DataSource(df, entity_col='id', is_profile=True, name=f'profile{i}', **roles) for i, (df, roles) in enumerate(profiles)],
            [DataSource(df, entity_col='id', name=f'events{i}', **roles) for i, (df, roles) in enumerate(events)])


def package_run(profiles, events, fit, write, out, **who):
    "Fit and write with the package: (tokenizer, sources)"
    ps, es = make_sources(profiles, events)
    ds = PRAGMADataset(ps, es, 'id', out, progress=False)
    tok = ds.fit_tokenizer(**fit, **who)
    points = write['points'] and pl.DataFrame(write['points'], schema={'id': (profiles + events)[0][0]['id'].dtype, 't': pl.Float64}, orient='row')
    ds.write_kv(points if points is not None else write['eval_time'], write['n_shards'], after_eval=write['after_eval'])
    return tok, ps + es


def oracle_sources(profiles, events):
    return ([oracle.Source(df.to_dicts(), name=f'profile{i}', **roles) for i, (df, roles) in enumerate(profiles)],
            [oracle.Source(df.to_dicts(), name=f'events{i}', **roles) for i, (df, roles) in enumerate(events)])


def oracle_run(profiles, events, fit, write, only=None):
    ps, es = oracle_sources(profiles, events)
    f = oracle.Fit(ps + es, **fit, entity_col='id', only=only)
    return f, *oracle.token_rows(f, ps, es, 'id', write['eval_time'], write['after_eval'], write['points'])


def training(profiles, events, fit_on, seed):
    "Whom to fit on: arguments of `fit_tokenizer`, and the ids. Everybody where nobody else would be left"
    ps, es = oracle_sources(profiles, events)
    there = sorted({r['id'] for src in ps + es for r in src.rows if src.part(r) in ('profile', 'event', 'static')})
    if fit_on == 'train' and there:
        only = {e for e, at in zip(there, split_position(there, seed)) if at >= .5}
        if only: return dict(fit_on='train', valid_pct=.5, seed=seed), only
    if fit_on == 'ids' and there:
        only = random.Random(seed).sample(there, 1 + seed % len(there))
        return dict(fit_on=only + only[:1]), set(only)
    return {}, None


def shard_rows(out):
    return [r for i in range(len(list(Path(out).glob('shard_*.parquet')))) for r in pl.read_parquet(Path(out)/f'shard_{i}.parquet').to_dicts()]


def near(got, want, rel):
    "Equal nested lists, floats within a tolerance"
    if isinstance(want, (list, tuple)): return len(got) == len(want) and all(near(g, w, rel) for g, w in zip(got, want))
    if isinstance(want, dict): return set(got) == set(want) and all(near(got[k], want[k], rel) for k in want)
    if isinstance(want, float): return math.isclose(got, want, rel_tol=rel, abs_tol=rel)
    return got == want


@quick
@given(tables())
def test_the_job_equals_the_oracle(t):
    "Vocabulary, rows and batches; every row in is a row out or in the ledger; tokens decode to the values they came from"
    profiles, events, fit, write, load, fit_on, seed = t
    who, only = training(profiles, events, fit_on, seed)
    f, want, counts = oracle_run(profiles, events, fit, write, only)
    with TemporaryDirectory() as out:
        tok, sources = package_run(profiles, events, fit, write, out, **who)
        got = shard_rows(out)
        check_vocabulary(tok, f)
        assert tok.hash == Tokenizer.load(out).hash
        if only is None: assert Tokenizer(**fit).fit(sources).hash == tok.hash
        check_rows(got, want, write['n_shards'])
        check_ledger(json.loads((Path(out)/'manifest.json').read_text()), counts)
        check_decoding(Tokenizer.load(out), got)
        check_batches(out, write['n_shards'], want, load)


def check_vocabulary(tok, f):
    assert dict(tok.key_vocab) == f.key_vocab and list(tok.val_vocab.items()) == list(f.val_vocab.items())
    assert tok.n_vals == f.n_vals and tok.bpe_offset == f.bpe_offset
    assert near({k: list(b) for k, b in tok.num_bounds.items()}, f.num_bounds, 1e-9)


def check_rows(got, want, n_shards):
    "The same rows, each in the shard of its entity, in order"
    homes = shard_of([r['id'] for r in got], n_shards) if got else []
    assert [r['shard_id'] for r in got] == list(homes)
    order = [(r['shard_id'], r['id'], r.get('record_idx'), r['source_idx'], r['event_idx'], r['key']) for r in got] # the oracle knows the order of equal keys
    assert order == sorted(order)
    got = sorted(({k: v for k, v in r.items() if k != 'shard_id'} for r in got), key=lambda r: r['id'])
    assert len(got) == len(want)
    for g, w in zip(got, want): assert near(g, w, 1e-9), f'{g}\n{w}'


COUNTS = {'lifelong after eval_time': 'milestones after the evaluation time', 'unreadable milestones': 'unreadable milestones'}


def check_ledger(manifest, counts):
    "Rows read = rows kept + rows dropped, source by source and reason by reason, as many as the oracle counts"
    assert set(manifest['ledger']) == set(counts)
    for name, c in counts.items():
        entry = manifest['ledger'][name]
        assert entry['read'] == c['read'] == entry['kept'] + sum(entry['dropped'].values())
        assert entry['kept'] == c['kept']
        assert entry['dropped'] == {k: n for k, n in c.items() if n and k not in ('read', 'kept', *COUNTS)}, name
        assert entry['counts'] == {COUNTS[k]: c[k] for k in COUNTS if c[k]}


def check_decoding(tok, rows):
    "decode(encode(x)) == x, or the bucket of x; what is unknown stays so"
    fields = []
    for r in rows:
        if r['val_pos'] == 0: fields.append((r, []))
        fields[-1][1].append(r['val_id'])
    for r, ids in fields:
        assert tok.key_name(r['key_id']) == r['key']
        if ids == [2] or tok.bpe_offset in ids: continue # a value, or a byte of a text, that was never seen
        if r['vtype'] == 'num': check_bucket(tok, r, ids[0])
        else: assert tok.decode(r['key_id'], ids) == r['value'], (r, ids)


def check_batches(out, n_shards, rows, load):
    "Records in the order of shards and ids, packed greedily"
    limits = {k: v for k, v in load.items() if k != 'max_tokens'}
    recs = oracle.records(rows, 'id', **limits)
    homes = dict(zip([r['uid'] for r in recs], shard_of([r['uid'] for r in recs], n_shards))) if recs else {}
    want = oracle.batches(sorted(recs, key=lambda r: homes[r['uid']]), load['max_tokens'])
    dl = PRAGMADataLoader(out, 'id', **load)
    got = list(dl)
    assert len(dl) == len(got) == len(want)
    for g, w in zip(got, want):
        for k, shape in oracle.shapes(w).items(): assert tuple(g[k].shape) == shape, k
        for k, v in w.items(): assert near(g[k] if k == 'uids' else np.asarray(g[k]).tolist(), v, 1e-6), f'{k}: {g[k]} {v}'


def check_bucket(tok, r, val_id):
    "The bucket of a number: 0 for zero, otherwise the range (low, high] that holds it"
    b, x = val_id - tok.val_vocab['<bucket_0>'], float(r['value'])
    bounds = list(tok.num_bounds[r['key']])
    assert (b == 0) == (x == 0)
    if b: assert (b == 1 or bounds[b-2] < x) and (b - 1 == len(bounds) or x <= bounds[b-1])


# ---------------------------------------------------------------- the same bytes for the same input
@pytest.fixture(scope='module')
def frames(): return make_frames()


@pytest.fixture(scope='module')
def reference(frames, tmp_path_factory):
    folder = tmp_path_factory.mktemp('reference')
    return run_job(write_files(folder/'in', frames), folder/'out')


@pytest.mark.parametrize('layout', [dict(shuffle=1), dict(parts=4), dict(parts=7, shuffle=2)])
def test_bytes_do_not_depend_on_the_layout_of_the_input(layout, frames, reference, tmp_path):
    assert run_job(write_files(tmp_path/'in', frames, **layout), tmp_path/'out') == reference


@pytest.mark.parametrize('threads,workers', [(1, 0), (2, 0), (1, 2)])
def test_bytes_do_not_depend_on_threads_or_processes(threads, workers, frames, reference, tmp_path):
    globs = write_files(tmp_path/'in', frames, parts=2)
    code = f'''
import sys, json
sys.path.insert(0, {str(HERE)!r})
if __name__ == '__main__':
    from events_tables import run_job
    got = run_job({globs!r}, {str(tmp_path/"out")!r}, n_workers={workers})
    print('DIGESTS' + json.dumps(got))
'''
    (tmp_path/'job.py').write_text(code)
    env = {**os.environ, 'POLARS_MAX_THREADS': str(threads), 'PYTHONHASHSEED': str(threads + workers)}
    p = subprocess.run([sys.executable, str(tmp_path/'job.py')], capture_output=True, text=True, env=env, timeout=300)
    assert p.returncode == 0, p.stderr[-3000:]
    assert json.loads(p.stdout.split('DIGESTS')[1]) == reference
