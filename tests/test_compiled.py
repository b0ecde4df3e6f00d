"""Compiled records against a slow, obvious reading of the same shards; and the cache: built once, whole or not there, mended when damaged."""
import json, multiprocessing as mp, os, pickle, random, shutil, signal, subprocess, sys, time, warnings
from collections import defaultdict
from pathlib import Path

import numpy as np, polars as pl, pyarrow as pa, pyarrow.parquet as pq, pytest
from hypothesis import given, settings, strategies as st

from fastseqprep import ragged
from fastseqprep.compiled import CacheError, compile_records, largest_id, open_records, read_shard, workers_for
from fastseqprep.records import Limits, RecordArrays, compile_table
from fastseqprep.store import Manifest, OutputFile, StoreError, write_manifest

CASES = Path(__file__).parent/'cases'/'events'
NAMES = sorted(p.parent.parent.name for p in CASES.glob('*/expected-0.0.1/records.json'))
COLUMNS = 'user key key_id value val_id val_pos vtype time logsec source_idx event_idx hour dow dom shard_id'.split()
TYPES = dict(user=pa.int64(), key=pa.string(), key_id=pa.int64(), value=pa.string(), val_id=pa.int64(), val_pos=pa.int64(), vtype=pa.string(), time=pa.int64(),
             logsec=pa.float64(), source_idx=pa.int32(), event_idx=pa.int64(), hour=pa.float32(), dow=pa.float32(), dom=pa.float32(), shard_id=pa.uint64())


# ---------------------------------------------------------------- the slow reading
def slow_records(rows, limits):
    "Records of token rows (dicts), by the book; and how many tokens and events the limits cut"
    recs, lost, lost_events = [], 0, 0
    for uid in dict.fromkeys(r['user'] for r in rows):
        mine = [r for r in rows if r['user'] == uid]
        tok = lambda r: [r['key_id'], r['val_id'], r['val_pos']]
        static = [r for r in mine if r['event_idx'] < 0]
        profile = [r for r in static if r['key'] != 'lifelong']
        life = sorted((r for r in static if r['key'] == 'lifelong'), key=lambda r: r['time'])
        events = defaultdict(list)
        for r in mine:
            if r['event_idx'] >= 0: events[r['source_idx'], r['event_idx']].append(r)
        order = sorted(events, key=lambda k: (events[k][0]['time'], *k))
        kept = order[max(len(order)-limits.max_events, 0):]
        p, l = profile[:limits.max_profile_toks], life[max(len(life)-limits.max_lifelong_toks, 0):]
        e = [events[k][:limits.max_event_toks] for k in kept]
        lost += len(mine)-len(p)-len(l)-sum(map(len, e))
        lost_events += len(order)-len(kept)
        heads = [events[k][0] for k in kept]
        f32 = lambda xs: [float(np.float32(x)) for x in xs]
        recs.append(dict(uid=uid, profile=[tok(r) for r in p], profile_time=[0.]*len(p), lifelong=[tok(r) for r in l], lifelong_time=f32(r['logsec'] for r in l),
                         events=[[tok(r) for r in x] for x in e], event_time=f32(h['logsec'] for h in heads), cal=[[h['hour'], h['dow'], h['dom']] for h in heads]))
    return recs, lost, lost_events


def slow_batch(recs):
    "Records side by side, by the book"
    def padded(part, fill):
        width = max(len(r[part]) for r in recs)
        return [r[part] + [fill]*(width-len(r[part])) for r in recs]
    b = {}
    for part in 'profile', 'lifelong':
        width = max(len(r[part]) for r in recs)
        b[part] = padded(part, [0, 0, 0])
        b[f'{part}_mask'] = [[i < len(r[part]) for i in range(width)] for r in recs]
        b[f'{part}_time'] = padded(f'{part}_time', 0.)
    events = [e for r in recs for e in r['events']]
    b['event_tokens'] = [t for e in events for t in e]
    b['event_offsets'] = [sum(map(len, events[:i])) for i in range(len(events)+1)]
    b['event_user'] = [i for i, r in enumerate(recs) for _ in r['events']]
    b['event_time'] = [t for r in recs for t in r['event_time']]
    b['cal'] = [c for r in recs for c in r['cal']]
    b['history_offsets'] = [sum(len(r['events'])+1 for r in recs[:i]) for i in range(len(recs)+1)]
    b['uids'] = [r['uid'] for r in recs]
    return b


DTYPES = dict(profile='int64', profile_mask='bool', profile_time='float32', lifelong='int64', lifelong_mask='bool', lifelong_time='float32', event_tokens='int64',
              event_offsets='int64', event_user='int64', event_time='float32', cal='float32', history_offsets='int64')


def check_batch(got, want):
    assert list(got) == [*DTYPES, 'uids']
    for k, dtype in DTYPES.items():
        assert got[k].dtype == dtype and got[k].flags.c_contiguous and got[k].flags.writeable, k
        assert got[k].tolist() == want[k], k
    assert got['profile'].ndim == got['lifelong'].ndim == 3 and got['profile'].shape[2] == 3
    assert got['event_tokens'].shape[1:] == got['cal'].shape[1:] == (3,)
    assert got['uids'] == want['uids'] and {type(u) for u in got['uids']} <= {int, str, bytes}


# ---------------------------------------------------------------- made-up shards
def made_up(seed, uids, big=False):
    "Token rows of some entities, sorted as in a shard: ties in time, several sources, milestones also in event sources, long texts"
    rng, rows = random.Random(seed), []
    top = 100_000 if big else 300
    def row(uid, key, pos, time, src, idx, cal=(0, 0, 0)):
        rows.append(dict(user=uid, key=key, key_id=5+hash_of(key) % 50, value='v', val_id=rng.randrange(top), val_pos=pos, vtype='cat', time=time,
                         logsec=rng.random()*100, source_idx=src, event_idx=idx, hour=float(cal[0]), dow=float(cal[1]), dom=float(cal[2]), shard_id=0))
    for uid in uids:
        static = sorted([(k, 0) for k in rng.sample('age city plan zip'.split(), rng.randrange(4))] + [('lifelong', rng.randrange(-5, 50)) for _ in range(rng.randrange(3))])
        for key, time in static: row(uid, key, 0, time, -1, -1)
        for src in range(rng.randrange(4)):
            for _ in range(rng.randrange(2)): row(uid, 'lifelong', 0, rng.randrange(50), src, -1)
            n = rng.randrange(5)
            for idx, time in enumerate(sorted(rng.randrange(12) for _ in range(n))):
                cal = rng.randrange(24), rng.randrange(1, 8), rng.randrange(1, 32)
                for key in sorted(rng.sample('a lifelongish mcc shop'.split(), rng.randrange(1, 4))):
                    for pos in range(rng.choice([1, 1, 3])): row(uid, key, pos, time, src, idx, cal)
        if not any(r['user'] == uid for r in rows): row(uid, 'age', 0, 0, -1, -1)
    return rows


def hash_of(key): return sum(map(ord, key))


def as_table(rows, user=pa.int64()):
    return pa.table({c: pa.array([r[c] for r in rows], user if c == 'user' else TYPES[c]) for c in COLUMNS})


def write_shards(folder, shards, user=pa.int64(), **kw):
    "Rows per shard → files; returns the folder"
    folder.mkdir(parents=True, exist_ok=True)
    for i, rows in enumerate(shards): pq.write_table(as_table(rows, user), folder/f'shard_{i}.parquet', **kw)
    return folder


@pytest.fixture
def shard_dir(tmp_path):
    "Twelve shards, so that the order of numbers is not that of names; the middle one is empty"
    users = iter(range(100))
    shards = [made_up(i, [next(users) for _ in range(0 if i == 6 else 3)]) for i in range(12)]
    return write_shards(tmp_path/'shards', shards), [r for rows in shards for r in rows]


# ---------------------------------------------------------------- what is read
limits_ = st.builds(Limits, st.integers(0, 4), st.integers(0, 3), st.integers(0, 6), st.integers(0, 4))


@given(st.integers(0, 10**6), st.integers(1, 6), st.one_of(st.just(Limits()), limits_), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_like_the_slow_reading(seed, n, limits, big, blocks):
    rows = made_up(seed, range(n), big)
    recs, lost, lost_events = slow_records(rows, limits)
    arrays, facts = compile_table(as_table(rows), 'user', limits)
    ra = RecordArrays(arrays, facts)
    before = ragged._long_range
    try:
        ragged._long_range = 0 if blocks else 10**9
        idx = random.Random(seed).choices(range(n), k=random.Random(seed).randrange(1, 8))
        check_batch(ra.gather(idx), slow_batch([recs[i] for i in idx]))
        for i in range(n):
            got = ra.record(i)
            assert {k: [e.tolist() for e in v] if isinstance(v, list) else getattr(v, 'tolist', lambda: v)() for k, v in got.items()} == recs[i]
    finally: ragged._long_range = before
    n_toks = [len(r['profile'])+len(r['lifelong'])+sum(map(len, r['events'])) for r in recs]
    assert ra.ntoks.tolist() == n_toks
    assert facts['cuts']['events'] == lost_events
    assert sum(v for k, v in facts['cuts'].items() if k != 'events') == lost == len(rows)-sum(n_toks)
    assert ra.tokens.dtype == (np.uint32 if max([r['val_id'] for r in rows]) >= 2**16 else np.uint16)


@pytest.mark.parametrize('case', NAMES)
def test_recorded_records_and_batches(case):
    "The figures of the tool whose format this is; it takes a milestone at the epoch for a profile token, which ours doesn't"
    read = lambda name: json.loads((CASES/case/name).read_text(encoding='utf-8'))
    spec, rec = read('spec.json'), read('expected-0.0.1/rows.json')
    number = lambda v: float(v) if isinstance(v, str) else v
    cols = {c: [number(v) for v in vals] if rec['columns'][c].startswith('Float') else vals for c, vals in rec['rows'].items()}
    table = pl.DataFrame(cols, schema={c: getattr(pl, t) for c, t in rec['columns'].items()}).to_arrow()
    ra = RecordArrays(*compile_table(table, spec['entity_col'], Limits(**spec['limits'])))
    uids = ra.uid_list(range(len(ra)))
    for want in read('expected-0.0.1/batches.json'):
        if case == '10_lifelong': # user 5: one token moves from the profile to the milestones
            for k, pad in dict(profile=[0, 0, 0], profile_mask=False, profile_time=0.).items(): want[k]['data'] = [row[:1] for row in want[k]['data']]
            for k, first in dict(lifelong=[7, 5, 0], lifelong_mask=True, lifelong_time=0.).items(): want[k]['data'][4] = [first, want[k]['data'][4][0]]
        got = ra.gather([uids.index(u) for u in want['uids']])
        assert list(got) == list(want) and got['uids'] == want['uids']
        for k in DTYPES:
            assert got[k].dtype == want[k]['dtype']
            np.testing.assert_array_equal(got[k], np.array(want[k]['data'], want[k]['dtype']).reshape(got[k].shape), err_msg=k)
    assert NAMES


@pytest.mark.parametrize('user,ids', [(pa.int32(), [-5, 0, 7]), (pa.uint64(), [1, 2**63, 2**64-1]), (pa.string(), ['zoë', '', 'a']), (pa.large_string(), ['1', '01', '1.0']),
                                      (pa.binary(), [b'\0', b'x', b''])])
def test_ids_keep_type_and_value(tmp_path, user, ids):
    ra = compile_records(write_shards(tmp_path, [made_up(1, ids[:2]), made_up(2, ids[2:])], user))
    assert ra.uid_list(range(3)) == ids and ra.gather([2, 0])['uids'] == [ids[2], ids[0]]
    assert pickle.loads(pickle.dumps(ra)).uid_list([1]) == [ids[1]]
    from fastseqprep.hashing import stable_hash
    if user != pa.binary(): assert ra.record_hash.tolist() == stable_hash(ids).tolist()
    assert len(set(ra.record_hash.tolist())) == 3


def test_categorical_ids_from_polars(tmp_path):
    df = pl.from_arrow(as_table(made_up(3, ['b', 'a']), pa.string())).with_columns(pl.col('user').cast(pl.Categorical), pl.col('key').cast(pl.Categorical))
    df.write_parquet(tmp_path/'shard_0.parquet')
    assert compile_records(tmp_path).uid_list([0, 1]) == ['b', 'a']


def test_shards_in_order(shard_dir):
    folder, rows = shard_dir
    ra = compile_records(folder)
    assert ra.uids.tolist() == list(dict.fromkeys(r['user'] for r in rows))
    assert [s['records'] for s in ra.info['shards']] == [3]*6+[0]+[3]*5
    files = [folder/f'shard_{i}.parquet' for i in (10, 2)]
    assert compile_records(files).uids.tolist() == [27, 28, 29, 6, 7, 8]
    recs, *_ = slow_records(rows, Limits())
    idx = random.Random(0).sample(range(33), 20)
    check_batch(ra.gather(idx), slow_batch([recs[i] for i in idx]))


def test_row_groups_and_missing_statistics(tmp_path):
    rows = made_up(5, range(20), big=True)
    a = compile_records(write_shards(tmp_path/'a', [rows], row_group_size=7, write_statistics=False))
    b = compile_records(write_shards(tmp_path/'b', [rows]))
    assert a.tokens == b.tokens and a.profile == b.profile and a.events == b.events


def test_several_records_of_an_entity(tmp_path):
    one, two = made_up(1, [7]), made_up(2, [7, 8])
    table = as_table(one+two).append_column('record_idx', pa.array([0]*len(one) + [int(r['user'] == 7) for r in two]))
    table = table.append_column('eval_time', pa.array([100]*len(one) + [200]*len(two)))
    pq.write_table(table, tmp_path/'shard_0.parquet')
    ra = compile_records(tmp_path)
    assert ra.uid_list([0, 1, 2]) == [7, 7, 8] and ra.arrays['eval_time'].tolist() == [100, 200, 200]
    assert len(set(ra.record_hash.tolist())) == 3
    recs = slow_records(one, Limits())[0] + slow_records(two, Limits())[0]
    check_batch(ra.gather([2, 1, 0]), slow_batch(recs[::-1]))


def test_other_tools_folders(tmp_path):
    "Without a manifest; in the layout with a folder for each shard; extra columns are of no interest"
    for i in range(2):
        (tmp_path/f'shard_id={i}').mkdir()
        pq.write_table(as_table(made_up(i, [i])).append_column('extra', pa.nulls(len(made_up(i, [i])))), tmp_path/f'shard_id={i}'/'00000000.parquet')
    ra = compile_records(tmp_path)
    assert ra.uid_list([0, 1]) == [0, 1] and ra.info['shards'][1]['name'] == 'shard_id=1/00000000.parquet'


# ---------------------------------------------------------------- what is refused
def refuses(f, *words, error=ValueError):
    with pytest.raises(error) as e: f()
    assert all(w in str(e.value) for w in words), str(e.value)


def test_wrong_shards(tmp_path):
    rows = made_up(11, [1, 2])
    one = [i for i, r in enumerate(rows) if r['user'] == 1]
    write_shards(tmp_path/'split', [rows[1:]+rows[:1]])
    assert len(one) > 1
    refuses(lambda: compile_records(tmp_path/'split'), 'shard_0.parquet', 'entity 1', 'not together')
    write_shards(tmp_path/'a', [made_up(0, [1])])
    pq.write_table(as_table(made_up(0, ['x']), pa.string()), tmp_path/'a'/'shard_1.parquet')
    refuses(lambda: compile_records(tmp_path/'a'), 'shard_1.parquet', 'large_string', 'int64', error=TypeError)
    refuses(lambda: compile_records(tmp_path/'a', entity_col='customer'), "'customer'", "'user'")
    (tmp_path/'b').mkdir()
    pq.write_table(as_table(rows).drop(['logsec', 'event_idx']), tmp_path/'b'/'shard_0.parquet')
    refuses(lambda: compile_records(tmp_path/'b'), 'shard_0.parquet', "'logsec', 'event_idx'")
    (tmp_path/'c').mkdir()
    pq.write_table(as_table(rows).set_column(4, 'val_id', pa.array([-1]*len(rows))), tmp_path/'c'/'shard_0.parquet')
    refuses(lambda: compile_records(tmp_path/'c'), 'val_id', '-1')
    (tmp_path/'d').mkdir(); (tmp_path/'d'/'shard_0.parquet').write_bytes(b'not parquet')
    refuses(lambda: compile_records(tmp_path/'d'), 'shard_0.parquet', 'not a Parquet file')
    (tmp_path/'e').mkdir()
    refuses(lambda: compile_records(tmp_path/'e'), error=FileNotFoundError)
    whole = write_shards(tmp_path/'f', [made_up(0, range(50))], compression='zstd')/'shard_0.parquet'
    data = whole.read_bytes()
    for bad in data[:len(data)//2], data[:-1], data[:100]+bytes(len(data)//2)+data[100+len(data)//2:]:
        whole.write_bytes(bad)
        refuses(lambda: compile_records(tmp_path/'f'), 'shard_0.parquet is damaged')
    for folder in 'abcdf': assert not [p for p in (tmp_path/folder/'.cache').iterdir() if p.suffix != '.lock'] # nothing half done


def test_stale_shards_without_manifest(tmp_path):
    write_shards(tmp_path, [made_up(0, [1, 2]), made_up(1, [3]), made_up(2, [2])])
    refuses(lambda: compile_records(tmp_path), 'entity 2', 'shard_0.parquet', 'shard_2.parquet')


# ---------------------------------------------------------------- the manifest
def add_manifest(folder, n, **kw):
    m = Manifest(job='events', outputs=[OutputFile.of(folder, f'shard_{i}.parquet') for i in range(n)], entity_col='user', **kw)
    write_manifest(folder, m)


def test_only_what_the_manifest_lists(tmp_path):
    write_shards(tmp_path, [made_up(0, [1, 2]), made_up(1, [3]), made_up(2, [2])]) # the last is of an earlier run
    add_manifest(tmp_path, 2)
    assert compile_records(tmp_path).uid_list(range(3)) == [1, 2, 3]
    assert compile_records([tmp_path/'shard_1.parquet']).uid_list([0]) == [3]
    refuses(lambda: compile_records([tmp_path/'shard_1.parquet', tmp_path/'shard_2.parquet']), 'shard_2.parquet', 'manifest')
    (tmp_path/'shard_1.parquet').write_bytes(b'')
    refuses(lambda: compile_records(tmp_path), 'shard_1.parquet', error=StoreError) # though there is a cache


def test_two_folders_each_with_its_manifest(tmp_path):
    "One entity in both is two records: what each manifest lists is meant"
    for name, uids in dict(jan=[1, 2], feb=[2, 3]).items(): add_manifest(write_shards(tmp_path/name, [made_up(0, uids), made_up(1, [uids[0]+10])]), 1)
    files = [tmp_path/name/'shard_0.parquet' for name in ('feb', 'jan')]
    assert compile_records(files).uid_list(range(4)) == [2, 3, 1, 2]
    refuses(lambda: compile_records([*files, tmp_path/'jan'/'shard_1.parquet']), 'jan/shard_1.parquet', 'manifest')


def test_cache_follows_the_manifest_not_the_clock(tmp_path):
    write_shards(tmp_path/'a', [made_up(0, [1, 2])])
    add_manifest(tmp_path/'a', 1)
    first = compile_records(tmp_path/'a')
    shutil.move(tmp_path/'a', tmp_path/'b') # moved and touched: the same data
    os.utime(tmp_path/'b'/'shard_0.parquet')
    assert Path(compile_records(tmp_path/'b').folder).name == Path(first.folder).name
    write_shards(tmp_path/'b', [made_up(0, [1, 4])])
    add_manifest(tmp_path/'b', 1)
    assert compile_records(tmp_path/'b').uid_list([0, 1]) == [1, 4]


def test_changed_file_without_manifest(tmp_path):
    write_shards(tmp_path, [made_up(0, [1, 2])])
    compile_records(tmp_path)
    write_shards(tmp_path, [made_up(0, [1, 4])])
    os.utime(tmp_path/'shard_0.parquet', ns=(0, 12345))
    assert compile_records(tmp_path).uid_list([0, 1]) == [1, 4]


def flip(path, at, keep_time=False):
    s = os.stat(path)
    data = bytearray(path.read_bytes())
    data[at] ^= 255
    with open(path, 'r+b') as f: f.write(data)
    if keep_time: os.utime(path, ns=(s.st_atime_ns, s.st_mtime_ns))


@pytest.mark.parametrize('n_workers', [0, 2])
def test_a_shard_with_a_flipped_byte_is_not_compiled(tmp_path, n_workers):
    "Wherever the byte is: the manifest knows the content"
    write_shards(tmp_path, [made_up(0, range(20)), made_up(1, range(20, 40))], compression='none')
    add_manifest(tmp_path, 2)
    path = tmp_path/'shard_1.parquet'
    size = path.stat().st_size
    for at in (0, 5, *np.linspace(10, size-1, 4 if n_workers else 25).astype(int)):
        flip(path, at)
        for shards in tmp_path, [path]: refuses(lambda: compile_records(shards, n_workers=n_workers), str(path), 'is damaged', 'manifest', 'write the shards again', error=StoreError)
        flip(path, at)
    assert len(compile_records(tmp_path, n_workers=n_workers)) == 40


def test_damage_that_nobody_vouches_for_names_the_file(tmp_path):
    "Without a manifest a damaged shard may be read, but what Arrow says of it is one error with the file's name"
    rng, path = random.Random(3), write_shards(tmp_path, [made_up(0, range(30))], compression='none')/'shard_0.parquet'
    data, said = path.read_bytes(), []
    start = len(data)-8-int.from_bytes(data[-8:-4], 'little')           # of the footer
    for at in [rng.randrange(start, len(data)) for _ in range(60)] + [rng.randrange(4, start) for _ in range(40)]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 255]) + data[at+1:])
        try: read_shard(path, 'user'), largest_id(path)
        except MemoryError: pass
        except Exception as e:
            assert type(e) in (ValueError, TypeError) and 'shard_0.parquet' in str(e), (at, repr(e))
            said.append(str(e))
    assert len(said) > 20


def test_the_manifest_is_known_afterwards(tmp_path):
    for name in 'ab': add_manifest(write_shards(tmp_path/name, [made_up(0, [1, 2])]), 1, facts=dict(name=name))
    write_shards(tmp_path/'c', [made_up(0, [1, 2])])
    a, b, c = (compile_records(tmp_path/n).info for n in 'abc')
    assert a['full_sums'] == b['full_sums'] == c['full_sums'] and a['manifest'] != b['manifest'] and c['manifest'] is None


# ---------------------------------------------------------------- the cache
def large_store(folder):
    "Token rows whose cache has a file of more than a megabyte"
    rows = as_table(made_up(0, range(40)))
    copies = [rows.set_column(0, 'user', pa.array(rows['user'].to_numpy()+40*i)) for i in range(-(-400_000//len(rows)))]
    folder.mkdir()
    pq.write_table(pa.concat_tables(copies), folder/'shard_0.parquet')
    return folder


@pytest.mark.parametrize('keep_time', [False, True])
def test_damage_in_the_middle_of_a_large_file_is_mended(tmp_path, keep_time):
    folder = large_store(tmp_path/'s')
    ra = compile_records(folder)
    path, want = Path(ra.folder)/'tokens.bin', ra.tokens.values.copy()
    size = path.stat().st_size
    assert size > 1_000_000
    for part in .37, .61:
        flip(path, int(size*part), keep_time)
        if os.name == 'nt' and keep_time: continue                      # no time of change that cannot be set
        refuses(lambda: open_records(ra.folder), str(path), 'is damaged', 'remove', error=CacheError)
        refuses(lambda: pickle.loads(pickle.dumps(ra)), 'tokens.bin is damaged', error=CacheError)
        with pytest.warns(UserWarning, match='tokens.bin is damaged.*built again'): again = compile_records(folder)
        assert np.array_equal(again.tokens.values, want)
    flip(Path(ra.folder)/'header.json', 40)
    with pytest.warns(UserWarning, match='header.json'): compile_records(folder)


def test_files_are_read_again_only_after_a_change(tmp_path, monkeypatch):
    from fastseqprep import compiled
    folder, read, real = write_shards(tmp_path/'s', [made_up(0, range(5))]), [], compiled.full_sum
    monkeypatch.setattr(compiled, 'full_sum', lambda p: read.append(Path(p).name) or real(p))
    ra = compile_records(folder)
    n, built = len(read), sorted(read)
    assert built == sorted(f'{k}.bin' for k in ra.arrays if k != 'x')   # each once, when it was written
    for _ in range(3): compile_records(folder)
    assert len(read) == n
    os.utime(Path(ra.folder)/'tokens.bin')
    for _ in range(3): open_records(ra.folder)
    assert read[n:] == ['tokens.bin']
    shutil.copytree(ra.folder, tmp_path/'copy')                        # other files: all of them
    open_records(tmp_path/'copy')
    assert sorted(read[n+1:]) == built
    note = Path(ra.folder)/'checked.json'
    for text in '', '[1]', '{}', '{"tokens.bin": 3}':
        note.write_text(text)
        m = len(read)
        open_records(ra.folder)
        assert sorted(read[m:]) == built
    def fails(*a): raise PermissionError(13, 'no')
    note.unlink()
    monkeypatch.setattr(compiled.os, 'replace', fails)                 # a folder that cannot be written: remembered in the process
    m = len(read)
    for _ in range(2): open_records(ra.folder)
    assert sorted(read[m:]) == built


def test_every_damage_is_mended(shard_dir):
    folder, rows = shard_dir
    good = compile_records(folder)
    want, names = good.gather(range(33)), sorted(os.listdir(good.folder))
    assert 'header.json' in names
    def cut(p): p.write_bytes(p.read_bytes()[:-1])
    def more(p): p.write_bytes(p.read_bytes()+b'x')
    damages = [(n, f) for n in names for f in (cut, more, Path.unlink)]
    damages += [('header.json', lambda p, t=t: p.write_text(t)) for t in ('', '{}', '[]', '{"format": 1}', good_header(good, version=99), good_header(good, key='other'))]
    damages += [('tokens.bin', lambda p: p.write_bytes(bytes(p.stat().st_size))), ('record_hash.bin', lambda p: p.write_bytes(p.read_bytes()[:-1]+b'?'))]
    damages += [('token_offsets.bin', lambda p: p.write_bytes(bytes(p.stat().st_size))), ('event_offsets.bin', lambda p: p.write_bytes(p.read_bytes()[::-1]))]
    for name, damage in damages:
        path = Path(good.folder)/name
        if damage is cut and not path.stat().st_size: continue
        damage(path)
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            again = compile_records(folder)
        got = again.gather(range(33))
        assert all(np.array_equal(got[k], want[k]) for k in want), name
        assert sorted(os.listdir(good.folder)) == names
        open_records(good.folder)


def good_header(ra, **changes): return json.dumps({**json.loads((Path(ra.folder)/'header.json').read_text()), **changes})


def test_deleting_is_safe(shard_dir):
    folder, rows = shard_dir
    ra = compile_records(folder)
    want = ra.gather([0, 1])['event_tokens']
    shutil.rmtree(folder/'.cache')
    if os.name != 'nt': assert np.array_equal(ra.gather([0, 1])['event_tokens'], want) # what is mapped stays
    with pytest.raises(CacheError): pickle.loads(pickle.dumps(ra))
    assert np.array_equal(compile_records(folder).gather([0, 1])['event_tokens'], want)


def test_limits_have_caches_of_their_own(shard_dir):
    folder, rows = shard_dir
    for n in (1, 3): assert compile_records(folder, max_events=n).lengths()['events'].max() == n
    assert len([p for p in (folder/'.cache').iterdir() if p.is_dir()]) == 2


def test_one_build_for_many_processes(tmp_path):
    "Four processes at once: one cache, the same for all, nothing left over"
    write_shards(tmp_path, [made_up(i, range(i*40, i*40+40)) for i in range(4)])
    code = ("import sys, fastseqprep.compiled as c\nbuilt = []\nreal = c.compile_shards\n"
            "def counted(*a): built.append(1); return real(*a)\nc.compile_shards = counted\n"
            "ra = c.compile_records(sys.argv[1])\nprint(len(built), len(ra), ra.folder)")
    procs = [subprocess.Popen([sys.executable, '-c', code, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outs = [p.communicate(timeout=120)[0].split() for p in procs]
    assert {(n, f) for _, n, f in outs} == {('160', outs[0][2])}
    assert sum(int(b) for b, _, _ in outs) == 1
    assert sorted(p.suffix for p in (tmp_path/'.cache').iterdir()) == ['', '.lock']


def test_any_number_of_workers_gives_the_same_bytes(tmp_path):
    "Processes or none, shards of unequal size, one of them with an id type of its own"
    write_shards(tmp_path/'s', [made_up(i, range(i*40, i*40+n)) for i, n in enumerate((40, 1, 17, 3))])
    made = {n: compile_records(tmp_path/'s', cache_dir=tmp_path/f'cache{n}', n_workers=n, max_events=5) for n in (0, 2, None)}
    files = {n: {f.name: f.read_bytes() for f in Path(ra.folder).iterdir() if f.name != 'checked.json'} for n, ra in made.items()}
    assert files[0] == files[2] == files[None] and 'header.json' in files[0]
    assert made[0].info['cuts']['events'] > 0
    for n in 0, 2: assert sorted(p.suffix for p in (tmp_path/f'cache{n}').iterdir()) == ['', '.lock']
    pq.write_table(as_table(made_up(9, ['a']), pa.string()), tmp_path/'s'/'shard_4.parquet')
    refuses(lambda: compile_records(tmp_path/'s', n_workers=2), 'shard_4.parquet', 'string', 'int64', error=TypeError)
    (tmp_path/'s'/'shard_4.parquet').unlink()
    bad = as_table(made_up(9, range(900, 903))[::-1])                  # a worker's error is the error
    pq.write_table(bad, tmp_path/'s'/'shard_4.parquet')
    said = []
    for n in 0, 2:
        with pytest.raises(ValueError) as e: compile_records(tmp_path/'s', n_workers=n)
        said.append(str(e.value))
    assert said[0] == said[1] and 'shard_4.parquet' in said[0]
    assert [p.suffix for p in (tmp_path/'s'/'.cache').iterdir()] == ['.lock']*len(list((tmp_path/'s'/'.cache').iterdir())) # nothing half done


def test_processes_start_where_they_pay(tmp_path):
    folder = write_shards(tmp_path, [made_up(i, range(i*40, i*40+40)) for i in range(3)])
    files = sorted(folder.glob('*.parquet'))
    rows = sum(pq.read_metadata(f).num_rows for f in files)
    assert workers_for(files) == 0 == workers_for(files, rows) == workers_for(files[:1], 1)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    if cpus > 1: assert workers_for(files, rows//2) == 2 and workers_for(files, 1) == min(3, cpus)


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc')
def test_memory_of_compiling_is_that_of_a_shard(tmp_path):
    "Eight shards take hardly more than two: peaks in processes of their own"
    rows = made_up(0, range(3000))
    table = as_table(rows)
    ids = table['user'].to_numpy()
    for i in range(8): pq.write_table(table.set_column(0, 'user', pa.array(ids+i*3000)), tmp_path/f'shard_{i}.parquet')
    code = ("import sys, numpy as np\nfrom fastseqprep.compiled import compile_records\nfrom fastseqprep.hashing import stable_hash\nstable_hash([1])\n"
            "compile_records(sys.argv[4:5], cache_dir=sys.argv[1]+'/w')\nopen('/proc/self/clear_refs', 'w').write('5')\n"
            "anon = lambda k: next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith(k))\nbase = anon('VmRSS')\n"
            "ra = compile_records(sys.argv[3:], cache_dir=sys.argv[1]+'/c'+sys.argv[2], n_workers=0)\nprint(len(ra), anon('VmHWM')-base)")
    def peak(n):
        out = subprocess.run([sys.executable, '-c', code, str(tmp_path), str(n), *map(str, sorted(tmp_path.glob('*.parquet'))[:n])], capture_output=True, text=True, check=True).stdout.split()
        assert int(out[0]) == 3000*n
        return int(out[1])
    one = sum(a.nbytes for a in compile_records(tmp_path/'shard_0.parquet').arrays.values())//1024
    assert peak(8) < peak(2) + 3*one + 10_000


@pytest.mark.skipif(os.name == 'nt', reason='needs SIGKILL')
def test_killed_while_building(tmp_path):
    write_shards(tmp_path, [made_up(i, range(i*5, i*5+5)) for i in range(3)])
    code = ("import os, signal, sys, fastseqprep.compiled as c\nreal, n = c.compile_table, []\n"
            "def dies(*a):\n    n.append(1)\n    if len(n)==3: os.kill(os.getpid(), signal.SIGKILL)\n    return real(*a)\n"
            "c.compile_table = dies\nc.compile_records(sys.argv[1])")
    assert subprocess.run([sys.executable, '-c', code, str(tmp_path)]).returncode == -signal.SIGKILL
    assert [p.suffix for p in (tmp_path/'.cache').iterdir() if p.is_dir()] == ['.tmp'] # half of it, under no final name
    assert len(compile_records(tmp_path)) == 15
    assert sorted(p.suffix for p in (tmp_path/'.cache').iterdir()) == ['', '.lock']


@pytest.mark.skipif(os.name == 'nt' or os.geteuid() == 0, reason='permissions bind neither root nor Windows')
def test_read_only_folder(shard_dir):
    folder, rows = shard_dir
    compile_records(folder)
    for p in folder, folder/'.cache': p.chmod(0o555)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            assert len(compile_records(folder)) == 33 # what is there can be opened
        with pytest.warns(UserWarning, match='cannot be written'): assert len(compile_records(folder, max_events=1)) == 33
    finally:
        for p in folder, folder/'.cache': p.chmod(0o755)


def test_folder_that_cannot_be_written(shard_dir, tmp_path):
    folder, rows = shard_dir
    (folder/'.cache').write_text('in the way')
    with pytest.warns(UserWarning, match='pass cache_dir'): ra = compile_records(folder)
    home, want = Path(ra.folder).parent, ra.gather([1])['event_tokens']
    assert pickle.loads(pickle.dumps(ra)).uid_list([1]) == [1] # other processes find it
    ra = ra.shorten(max_events=1)
    assert home.exists() and pickle.loads(pickle.dumps(ra)).ntoks.tolist() == ra.ntoks.tolist() # also when only shortened ones are kept
    del ra
    assert not home.exists()
    kept = compile_records(folder, cache_dir=tmp_path/'kept')
    assert np.array_equal(kept.gather([1])['event_tokens'], want) and Path(kept.folder).parent == tmp_path/'kept'
    refuses(lambda: compile_records(folder, cache_dir=folder/'.cache'), error=OSError)


def test_remote_shards(tmp_path):
    import fsspec
    fs = fsspec.filesystem('memory')
    write_shards(tmp_path/'local', [made_up(0, [1, 2]), made_up(1, [3])])
    for f in (tmp_path/'local').glob('*.parquet'): fs.pipe_file(f'/compiled-test/{f.name}', f.read_bytes())
    for shards in 'memory://compiled-test', [f'memory://compiled-test/shard_{i}.parquet' for i in range(2)]:
        ra = compile_records(shards, cache_dir=tmp_path/'cache')
        assert ra.uid_list(range(3)) == [1, 2, 3]
    with pytest.warns(UserWarning, match='not on this machine'): assert len(compile_records('memory://compiled-test')) == 3


# ---------------------------------------------------------------- worker processes
def gather_in_worker(ra, q): q.put((ra.gather([2, 0])['event_tokens'], ra.gather([1])['uids']))


@pytest.mark.parametrize('method', [m for m in ('fork', 'forkserver', 'spawn') if m in mp.get_all_start_methods()])
def test_workers_of_any_kind(tmp_path, method):
    "Also a forked one after polars has been used here"
    ra = compile_records(write_shards(tmp_path, [made_up(0, ['a', 'b', 'c'])], pa.string()))
    pl.DataFrame(dict(a=range(10_000))).group_by('a').len()
    ctx = mp.get_context(method)
    q = ctx.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter('ignore') # newer Pythons warn of forking with threads
        p = ctx.Process(target=gather_in_worker, args=(ra, q))
        p.start()
    toks, uids = q.get(timeout=120)
    p.join(30)
    assert p.exitcode == 0 and np.array_equal(toks, ra.gather([2, 0])['event_tokens']) and uids == ['b']


def lengths_in_worker(ra, q): q.put((ra.ntoks.tolist(), ra.lengths()['events'].tolist(), ra.gather(range(len(ra)))['event_tokens'].tolist()))


@pytest.mark.parametrize('in_memory', [False, True])
@pytest.mark.parametrize('method', [m for m in ('fork', 'forkserver', 'spawn') if m in mp.get_all_start_methods()])
def test_records_that_were_shortened_arrive_short(tmp_path, method, in_memory):
    ra = compile_records(write_shards(tmp_path, [made_up(i, [i, i+10, i+20]) for i in range(4)]))
    if in_memory: ra = RecordArrays(ra.arrays, ra.info)
    n, fixed = ra.lengths()['events'], (ra.profile.lengths + ra.lifelong.lengths).max()
    for kw in dict(max_events=int(np.median(n))), dict(max_tokens=int(max(fixed, np.median(ra.ntoks)))), dict(max_tokens=10**9):
        short = ra.shorten(**kw)
        assert ('max_events' not in kw) or (short.ntoks < ra.ntoks).any()
        ctx = mp.get_context(method)
        q = ctx.Queue()
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            p = ctx.Process(target=lengths_in_worker, args=(short, q))
            p.start()
        got = q.get(timeout=120)
        p.join(30)
        assert got == (short.ntoks.tolist(), short.lengths()['events'].tolist(), short.gather(range(len(ra)))['event_tokens'].tolist())
        again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(short))))
        assert (again.skip == short.skip).all() and again.ntoks.tolist() == short.ntoks.tolist()


def test_opening_needs_no_polars(shard_dir):
    ra = compile_records(shard_dir[0])
    code = ("import pickle, sys\nra = pickle.loads(bytes.fromhex(sys.argv[1]))\nra.gather([0, 5]); ra.ntoks; ra.record_hash\n"
            "print([m for m in ('polars', 'torch', 'pandas', 'pydantic') if m in sys.modules])")
    out = subprocess.run([sys.executable, '-c', code, pickle.dumps(ra).hex()], capture_output=True, text=True, check=True).stdout
    assert out.strip() == '[]'


def test_memory_stays_flat(tmp_path):
    "Gathering a hundred times leaves nothing behind"
    import tracemalloc
    ra = compile_records(write_shards(tmp_path, [made_up(0, range(200))]))
    idx = np.arange(200)
    for _ in range(3): ra.gather(idx)
    tracemalloc.start()
    for _ in range(100): ra.gather(idx)
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert left < 100_000


@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc')
def test_workers_stay_as_small_as_they_are(tmp_path):
    "Four workers over five epochs of 30,000 records: what is theirs alone does not grow, once two plans are there (the benchmark's curve, in small)"
    code = ("import json, sys\nsys.path.insert(0, sys.argv[2])\nimport fastseqprep_memory as m, torch\ntorch.set_num_threads(1)\n"
            "print(json.dumps(m.curve(m.write_store(sys.argv[1], 30_000, 4), epochs=5, max_tokens=3000, timeout=100)))")
    out = subprocess.run([sys.executable, '-c', code, str(tmp_path/'s'), str(Path(__file__).parents[1]/'benchmarks'/'peers')], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    points = json.loads(out.stdout)
    assert [p['epoch'] for p in points] == [e for e in range(5) for _ in range(8)] and all(p['own'] > 0 for p in points)
    ends = [p['own'] for p in points if p['done'] == 1]
    assert len(ends) == 5 and ends[4] < ends[2] + 8 and ends[4] < ends[0] + 60, ends         # MB of all four together
