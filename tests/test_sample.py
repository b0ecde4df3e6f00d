"The generated sample and the real MovieLens data, read by the same two declarations"
import subprocess, sys
from pathlib import Path

import polars as pl
import pytest

from fastseqprep.sample import movielens_sample, movielens_sources
from get_movielens import ensure_movielens


def ratings(folder):
    return pl.read_csv(folder/'u.data', separator='\t', has_header=False, new_columns=['user', 'movie', 'rating', 'time'])


@pytest.mark.parametrize('sizes', [(1, 1, 0), (1, 1, 1), (1, 50, 50), (50, 1, 50), (3, 4, 12), (30, 40, 600), (943, 1682, 100_000)])
def test_sizes_come_out_exactly(sizes, tmp_path):
    n_users,n_items,n_ratings = sizes
    folder = movielens_sample(tmp_path/'ml', *sizes, seed=3)
    assert len((folder/'u.user').read_text().splitlines())==n_users
    if n_ratings==0: return
    r = ratings(folder)
    assert len(r)==n_ratings==r.select('user', 'movie').n_unique()  # nobody rates a movie twice
    assert r['user'].is_between(1, n_users).all() and r['movie'].is_between(1, n_items).all()
    assert r['rating'].is_between(1, 5).all() and r['time'].is_between(874724710, 893286638).all()


def test_ratings_have_the_shape_of_the_real_ones(tmp_path):
    "Long tails, tied seconds, all stars used: within a factor of two of the real data"
    made,real = ratings(movielens_sample(tmp_path, 943, 1682, 100_000)),ratings(ensure_movielens())
    def figures(r):
        per_user,per_movie = (r[c].value_counts()['count'] for c in ('user', 'movie'))
        tied = 1 - r.select('user', 'time').n_unique()/len(r)
        return dict(median_user=per_user.median(), most_user=per_user.max(), most_movie=per_movie.max(), spread=r['rating'].std(), mean=r['rating'].mean(), tied=tied)
    made,real = figures(made),figures(real)
    for k in real: assert .5 < made[k]/real[k] < 2, (k, made, real)


def test_files_are_the_same_everywhere(tmp_path):
    "Made in a fresh process, and with more threads: the same bytes"
    movielens_sample(tmp_path/'a', 20, 30, 200)
    code = f"from fastseqprep.sample import *; movielens_sample({str(tmp_path/'b')!r}, 20, 30, 200)"
    subprocess.run([sys.executable, '-c', code], check=True)
    for name in ('u.data', 'u.user'): assert (tmp_path/'a'/name).read_bytes()==(tmp_path/'b'/name).read_bytes()


@pytest.mark.parametrize('real', [False, True])
def test_both_kinds_of_folder_are_read(real, tmp_path):
    folder = ensure_movielens() if real else movielens_sample(tmp_path, 943, 1682, 100_000)
    users,events = movielens_sources(folder)
    assert (users.name, users.is_profile, users.cats, users.conts, users.texts)==('users', True, ['gender', 'zip_code'], ['age'], ['occupation'])
    assert (events.name, events.is_profile, events.cats, events.time_col)==('ratings', False, ['movie_id', 'rating'], 'timestamp')
    assert users.entity_col==events.entity_col=='user_id'
    u,r = users.df.collect(),events.df.collect()
    assert u.shape==(943, 5) and r.shape==(100_000, 4)
    assert u.schema['zip_code']==pl.String and u['user_id'].to_list()==list(range(1, 944))


def test_fastai_finds_the_real_data_without_a_network():
    code = '''
import socket
def closed(*args, **kwargs): raise OSError('the network is closed')
socket.create_connection = socket.getaddrinfo = socket.socket.connect = closed
from fastai.data.external import untar_data, URLs
print(untar_data(URLs.ML_100k))
'''
    folder = ensure_movielens()
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout
    assert Path(out.splitlines()[-1])==folder


def test_the_data_is_fetched_into_the_folder_that_fastai_is_set_to(tmp_path, monkeypatch):
    monkeypatch.setenv('FASTAI_HOME', str(tmp_path/'home'))
    folder = ensure_movielens()
    assert folder==tmp_path/'home'/'data'/'ml-100k'
    assert sorted(p.name for p in folder.parent.iterdir())==['ml-100k']
    assert sorted(p.name for p in folder.iterdir())==['u.data', 'u.item', 'u.user']
    assert (folder/'u.item').read_text('latin-1').splitlines()[0].startswith('1|Toy Story (1995)|01-Jan-1995|')
