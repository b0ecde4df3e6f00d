"""The documented example on the real MovieLens-100k: every number of the page, and digests of all rows recorded from the tool behind it.

A digest is the sha256 of lines `a|b|c`, one per row; `README.md` beside the cases says which columns and order.
"""
import hashlib, json, os
from pathlib import Path

import numpy as np, polars as pl, pytest

from fastseqprep.source import DataSource
from fastseqprep.events import PRAGMADataset
from fastseqprep.dataloader import PRAGMADataLoader
from get_movielens import ensure_movielens

RECORDED = json.loads((Path(__file__).parent/'cases/events/ml100k/expected-0.0.1.json').read_text())
PAGE_ROLES = dict(users=dict(cats=['gender', 'zip_code'], conts=['age'], texts=['occupation']), ratings=dict(cats=['movie_id', 'rating'], time_col='timestamp'))
RATING_COLUMNS, USER_COLUMNS = ['user_id', 'movie_id', 'rating', 'timestamp'], ['user_id', 'age', 'gender', 'occupation', 'zip_code']


@pytest.fixture(scope='module')
def movielens():
    "(users, ratings) with the columns of the page: ids and ratings as integers, times as dates, zip codes as text"
    try: folder = ensure_movielens()
    except RuntimeError as e:
        if os.environ.get('CI'): raise
        pytest.skip(str(e))
    ratings = pl.read_csv(folder/'u.data', separator='\t', has_header=False, new_columns=RATING_COLUMNS)
    users = pl.read_csv(folder/'u.user', separator='|', has_header=False, new_columns=USER_COLUMNS, schema_overrides={'column_5': pl.String})
    return users, ratings


def run(users, ratings, folder, n_shards, **tok_args):
    ds = PRAGMADataset(DataSource(users.lazy(), entity_col='user_id', is_profile=True, name='users', **PAGE_ROLES['users']),
                       [DataSource(ratings.lazy(), entity_col='user_id', name='ratings', **PAGE_ROLES['ratings'])], 'user_id', folder)
    tok = ds.fit_tokenizer(**tok_args)
    ds.write_kv('2026-01-01', n_shards=n_shards)
    return ds, tok, sorted(Path(folder).glob('shard_*.parquet'))


@pytest.fixture(scope='module')
def page(movielens, tmp_path_factory): return run(*movielens, tmp_path_factory.mktemp('page'), 5)


@pytest.fixture(scope='module')
def one_shard(movielens, tmp_path_factory): return run(*movielens, tmp_path_factory.mktemp('one'), 1)


@pytest.fixture(scope='module')
def sub(movielens, tmp_path_factory):
    "Users 1 to 30 under string ids, 10 buckets"
    rename = lambda df: df.filter(pl.col('user_id') <= 30).with_columns(pl.format('u{}', pl.col('user_id').cast(pl.String).str.zfill(3)).alias('user_id'))
    users, ratings = movielens
    return run(rename(users), rename(ratings), tmp_path_factory.mktemp('sub'), 1, num_buckets=10)


def sha(df, cols, order):
    lines = (''.join('|'.join(map(str, r)) + '\n' for r in df.sort(order, maintain_order=True).select(cols).iter_rows()))
    return hashlib.sha256(lines.encode()).hexdigest()


@pytest.mark.parametrize('entry', ['seed', 'sub'])
def test_digests(entry, request):
    _, tok, shards = request.getfixturevalue({'seed': 'one_shard', 'sub': 'sub'}[entry])
    want, df = RECORDED[entry], pl.concat([pl.read_parquet(s) for s in shards])
    profile, events = df.filter(pl.col('event_idx') < 0), df.filter(pl.col('event_idx') >= 0)
    assert (len(df), df['user_id'].n_unique(), tok.n_keys, tok.n_vals) == tuple(want[k] for k in ('n_rows', 'n_users', 'n_keys', 'n_vals'))
    assert dict(tok.key_vocab) == want['key_vocab']
    assert hashlib.sha256(''.join(f'{v}\t{i}\n' for v, i in tok.val_vocab.items()).encode()).hexdigest() == want['val_vocab_sha']
    assert list(tok.val_vocab)[:6] == want['first_vals'] and list(tok.val_vocab)[-3:] == want['last_vals']
    order = ['user_id', 'source_idx', 'event_idx', 'key', 'val_pos']
    assert sha(profile, ['user_id', 'key_id', 'val_id', 'val_pos', 'time'], order) == want['profile_sha']
    by_time = ['user_id', 'time', 'source_idx', 'event_idx', 'key', 'val_pos']
    assert sha(events, ['user_id', 'time', 'key_id', 'val_id', 'val_pos'], by_time) == want['event_tokens_sha']
    assert sha(events, ['user_id', 'event_idx'], by_time) == want['event_idx_sha']
    cal = events.with_columns(pl.col('hour', 'dow', 'dom').cast(pl.Int64))
    assert sha(cal, ['user_id', 'time', 'hour', 'dow', 'dom'], by_time) == want['calendar_sha']
    assert (events['logsec'].max(), events['logsec'].mean()) == pytest.approx((want['logsec']['max'], want['logsec']['mean']), abs=1e-6)
    assert (events['logsec'] == 0).sum() == want['logsec']['zeros']
    assert (df['val_id'] == 2).sum() == want['unk']


@pytest.mark.parametrize('entry', ['seed', 'sub'])
def test_batches(entry, request):
    _, tok, shards = request.getfixturevalue({'seed': 'one_shard', 'sub': 'sub'}[entry])
    dl = PRAGMADataLoader(shards, 'user_id', max_tokens=2000)
    got = [dict(users=len(b['uids']), events=len(b['event_user']), tokens=len(b['event_tokens']), first=b['uids'][0], last=b['uids'][-1]) for b in dl]
    assert len(dl) == len(got) == RECORDED[entry]['n_batches']
    assert got[:len(RECORDED[entry]['batches'])] == RECORDED[entry]['batches']


# ---------------------------------------------------------------- the page, number by number
def test_summary(page):
    df = page[0].show_summary()
    assert df.shape == (2, 14)
    assert df.columns == 'i name kind rows entities entity_col time_col cats conts signed_conts texts lifelong min_time max_time'.split()
    assert df.rows() == [(0, 'users', 'profile', 943, 943, 'user_id', None, 2, 1, 0, 1, 0, None, None),
                         (1, 'ratings', 'event', 100000, 943, 'user_id', 'timestamp', 2, 0, 0, 0, 0, 874724710, 893286638)]


def test_the_fit_says_what_it_found(movielens, tmp_path, capsys):
    users, ratings = movielens
    ds = PRAGMADataset(DataSource(users.lazy(), entity_col='user_id', is_profile=True, name='users', **PAGE_ROLES['users']),
                       [DataSource(ratings.lazy(), entity_col='user_id', name='ratings', **PAGE_ROLES['ratings'])], 'user_id', tmp_path)
    ds.fit_tokenizer()
    assert 'Keys: 11, Vals: 2604, BPE: none' in capsys.readouterr().out
    assert (tmp_path/'tokenizer.json').exists()


def test_files_columns_and_dtypes(page):
    _, _, shards = page
    assert [s.name for s in shards] == [f'shard_{i}.parquet' for i in range(5)]
    assert (shards[0].parent/'tokenizer.json').exists() and (shards[0].parent/'manifest.json').exists()
    frames = [pl.read_parquet(s) for s in shards]
    assert sum(map(len, frames)) == 203_772
    want = dict(user_id=pl.Int64, key=pl.String, key_id=pl.Int64, value=pl.String, val_id=pl.Int64, val_pos=pl.Int64, vtype=pl.String, time=pl.Int64, logsec=pl.Float64,
                source_idx=pl.Int32, event_idx=pl.Int64, hour=pl.Float32, dow=pl.Float32, dom=pl.Float32, shard_id=pl.UInt64)
    for df in frames: assert list(df.schema.items()) == list(want.items())
    assert sum(df['user_id'].n_unique() for df in frames) == 943
    assert all(len(df) > 20_000 for df in frames), 'five shares of about 40,000 rows'


def test_user_3(page):
    df = pl.concat([pl.read_parquet(s) for s in page[2]]).filter(pl.col('user_id') == 3)
    assert len(df) == 112
    profile = {r['key']: (r['value'], r['key_id'], r['val_id'], r['vtype'], r['time'], r['event_idx'], r['source_idx']) for r in df.filter(pl.col('event_idx') < 0).to_dicts()}
    assert profile == dict(age=('23', 5, 2501, 'num', 0, -1, -1), gender=('M', 6, 2469, 'cat', 0, -1, -1),
                           occupation=('writer', 8, 2603, 'text', 0, -1, -1), zip_code=('32067', 10, 1203, 'cat', 0, -1, -1))
    first = df.filter(pl.col('event_idx') == 0).row(0, named=True)
    assert (first['key'], first['value'], first['key_id'], first['val_id'], first['time']) == ('movie_id', '300', 7, 1162, 889236939)
    assert round(first['logsec'], 6) == 33.858346 and (first['hour'], first['dow'], first['dom']) == (2, 6, 7)
    last = df.filter(pl.col('event_idx') == 53)
    assert df['event_idx'].max() == 53
    assert [(r['key'], r['value'], r['val_id']) for r in last.to_dicts()] == [('movie_id', '181', 932), ('rating', '4', 1329)]
    assert (last['logsec'] == 0).all()


def test_a_batch_has_the_fields_of_the_page(page):
    _, _, shards = page
    b = next(iter(PRAGMADataLoader.from_path(shards[0].parent, entity_col='user_id', max_tokens=2000)))
    want = ['profile', 'profile_mask', 'profile_time', 'lifelong', 'lifelong_mask', 'lifelong_time', 'event_tokens', 'event_offsets', 'event_user', 'event_time', 'cal',
            'history_offsets', 'uids', 'event_labels', 'mlm_mask']
    assert set(b) >= set(want)
    B, E, T = len(b['uids']), len(b['event_user']), len(b['event_tokens'])
    assert {k: tuple(b[k].shape) for k in want if k != 'uids'} == dict(
        profile=(B, 4, 3), profile_mask=(B, 4), profile_time=(B, 4), lifelong=(B, 0, 3), lifelong_mask=(B, 0), lifelong_time=(B, 0), event_tokens=(T, 3),
        event_offsets=(E + 1,), event_user=(E,), event_time=(E,), cal=(E, 3), history_offsets=(B + 1,), event_labels=(T,), mlm_mask=(T,))
    assert T == 2 * E and T + 4 * B <= 2000


def test_the_masked_share_is_the_expected_one(page):
    "0.95·(1 − 0.85·0.9·0.9) of all event tokens are targets"
    masks = [b['mlm_mask'].float().mean().item() for b in PRAGMADataLoader.from_path(page[2][0].parent, entity_col='user_id', max_tokens=50_000)]
    assert np.mean(masks) == pytest.approx(.2959, abs=.03)
