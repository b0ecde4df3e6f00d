"Names that are made or misspelt, targets that are not there yet, and shards that were damaged while a run lay idle"
import datetime as dt, json

import numpy as np, polars as pl, pytest

from fastseqprep.blockfiles import read_block
from fastseqprep.cli import main
from fastseqprep.encoder import Encoder
from fastseqprep.preprocess import preprocess
import fastseqprep.preprocess as job

ROWS = pl.DataFrame(dict(sequenceId=[1]*6, itemPosition=range(6), a=list('abcabc'), x=[1., 2, 3, 4, 5, 6]))
HOURS = ROWS.with_columns(t=pl.datetime_range(dt.datetime(2024, 1, 1), dt.datetime(2024, 1, 1, 5), '1h', eager=True))


def run(tmp_path, df=ROWS, **keys):
    return preprocess(dict(project_root=str(tmp_path/'o'), split_ratios=[.5, .5], window_length=3) | keys, df, progress=False)


@pytest.mark.parametrize('df, keys, name', [
    (HOURS.with_columns(t_hour=pl.lit(99)), dict(timestamps={'t': ['hour']}), 't_hour'),
    (ROWS.with_columns(x_is_null=pl.lit(7)), dict(nulls={'x': 'mean+indicator'}), 'x_is_null'),
    (ROWS.with_columns(x_is_null=pl.lit(7)), dict(nulls={'x': 'mean+indicator'}, selected_columns=['x_is_null', 'x']), 'x_is_null')])
def test_a_made_feature_never_takes_the_place_of_a_column(tmp_path, df, keys, name):
    with pytest.raises(ValueError, match=f'feature called {name!r}'): run(tmp_path, df, **keys)
    assert not (tmp_path/'o'/'data').exists()


@pytest.mark.parametrize('keys', [dict(static_columns=['A']), dict(text_columns=['A'], write_format='arrow'), dict(target_columns=['A']), dict(timestamps={'A': ['hour']})])
def test_names_that_are_not_there_are_told(tmp_path, keys):
    with pytest.raises(ValueError, match="no column 'A'"): run(tmp_path, **keys)


def test_targets_may_be_missing_though_they_are_declared(tmp_path):
    declared = dict(selected_columns=['a', 'x'], categorical_columns=['a'], real_columns=['x'], cardinality_config={'a': {'top_k': 2}}, nulls={'a': 'unknown'})
    first = run(tmp_path, **declared)
    meta = str(first.metadata_path)
    again = run(tmp_path, ROWS.drop('a'), **declared, dataset_name='new', target_columns=['a'], metadata_config_path=meta.removeprefix(str(tmp_path/'o')+'/'))
    want, got = read_block(first.splits[0]), read_block(again.splits[0])
    assert list(got.features) == ['x'] and (got.features['x'] == want.features['x']).all()
    with pytest.raises(ValueError, match='zz'): run(tmp_path, ROWS.drop('a'), **declared, dataset_name='new', target_columns=['zz', 'a'], metadata_config_path=meta.removeprefix(str(tmp_path/'o')+'/'))


def test_a_shard_that_was_damaged_in_between_is_written_again(tmp_path, monkeypatch):
    df = pl.DataFrame(dict(sequenceId=np.repeat(np.arange(30), 5), itemPosition=np.tile(np.arange(5), 30), a=np.arange(150) % 7))
    df.write_parquet(tmp_path/'d.parquet')
    keys = dict(project_root=str(tmp_path/'o'), preprocessing_data_path=str(tmp_path/'d.parquet'), read_format='parquet', split_ratios=[.5, .5], window_length=3, merge_output=False, batches_per_file=5, n_cores=1)
    whole = {p.name: p.read_bytes() for p in (tmp_path/'o').rglob('*.parquet')} if preprocess(keys, progress=False) else None
    real, done = job.write_windows, []
    def stop(task):
        if len(done) == 5: raise OSError('no space left')
        done.append(task)
        return real(task)
    monkeypatch.setattr(job, 'write_windows', stop)
    keys['project_root'] = str(tmp_path/'p')
    with pytest.raises(OSError): preprocess(keys, progress=False)
    shard, = (tmp_path/'p'/'data'/'.d.run').rglob('d-split0-0-00.parquet')
    b = bytearray(shard.read_bytes())
    b[len(b)//2] ^= 255
    shard.write_bytes(b)
    monkeypatch.setattr(job, 'write_windows', real)
    preprocess(keys | dict(continue_preprocessing=True), progress=False)
    assert {p.name: p.read_bytes() for p in (tmp_path/'p').rglob('*.parquet')} == whole


def test_wide_integers_in_a_frame(tmp_path):
    wide = ROWS.with_columns(c=pl.Series([2**62, 0, 3, 1, 5, 5], dtype=pl.Int128), sequenceId=pl.Series([2**62]*6, dtype=pl.Int128))
    narrow = wide.with_columns(pl.col('c', 'sequenceId').cast(pl.Int64))
    a, b = (read_block(run(tmp_path/str(i), df, selected_columns=['c']).splits[0]) for i, df in enumerate((wide, narrow)))
    assert (a.features['c'] == b.features['c']).all() and a.sequence_ids.tolist() == [2**62]*a.n


def test_times_as_text(tmp_path):
    HOURS.with_columns(pl.col('t').dt.strftime('%Y-%m-%dT%H:%M:%SZ')).write_csv(tmp_path/'d.csv')
    keys = dict(project_root=str(tmp_path/'o'), split_ratios=[.5, .5], window_length=3, timestamps={'t': ['hour', 'delta']}, time_zone='Europe/Paris', write_format='arrow')
    text = preprocess(dict(keys, preprocessing_data_path=str(tmp_path/'d.csv')), progress=False)
    time = preprocess(dict(keys, dataset_name='frame'), HOURS.with_columns(pl.col('t').dt.replace_time_zone('UTC')), progress=False)
    a, b = (read_block(r.splits[0]).features for r in (text, time))
    assert list(a) == list(b) and all((a[k] == b[k]).all() for k in a)
    HOURS.with_columns(t=pl.lit('soon')).write_csv(tmp_path/'e.csv')
    with pytest.raises(ValueError, match="timestamps: column 't' holds 'soon'"): preprocess(dict(keys, preprocessing_data_path=str(tmp_path/'e.csv')), progress=False)


def test_integers_beyond_a_float_are_not_rounded(tmp_path):
    df = ROWS.with_columns(i=pl.lit(2**53+1))
    with pytest.raises(ValueError, match='9007199254740993'): run(tmp_path, df, real_columns=['i'])
    assert run(tmp_path, df.with_columns(i=pl.lit(2**53)), real_columns=['i']).windows


@pytest.mark.parametrize('dtype,last', [('Float16', 2**11), ('Float32', 2**24), ('Float64', 2**53)])
@pytest.mark.parametrize('normalize', [True, False])
@pytest.mark.parametrize('fmt', ['parquet', 'csv'])
def test_integers_are_exact_in_the_float_type_they_are_given_or_refused(dtype, last, normalize, fmt, tmp_path):
    def made(name, values):
        df, path = ROWS.select('sequenceId', 'itemPosition').with_columns(i=pl.Series(values)), tmp_path/f'{name}.{fmt}'
        getattr(df, f'write_{fmt}')(path)
        keys = dict(project_root=str(tmp_path/'o'), preprocessing_data_path=str(path), read_format=fmt, split_ratios=[1.], window_length=6, max_target_offset=0, write_format='arrow')
        return preprocess(keys | dict(column_data_types={'i': dtype}, normalize_real_columns=normalize), progress=False)
    good = [last, -last, 2*last-4, 0, 1, 2]
    stored = read_block(made('good', good).splits[0]).features['i'][0]
    assert str(stored.dtype) == dtype.lower()
    if not normalize: assert stored.tolist() == good
    for bad in last+1, -last-1, 2**63-1:
        with pytest.raises(ValueError, match=f"column 'i', row 3 .*: {bad} is .* as {dtype}, .*column_data_types"): made('bad', [1, 2, bad, 0, 0, 0])
        assert not list((tmp_path/'o').rglob('bad*'))


def test_a_file_of_integers_beside_one_of_floats_is_not_rounded_either(tmp_path):
    df = ROWS.select('sequenceId', 'itemPosition').with_columns(i=pl.Series([1, 2, 2**53+1, 4, 5, 6]))
    (tmp_path/'in').mkdir()
    df.write_parquet(tmp_path/'in'/'a.parquet')
    df.with_columns(sequenceId=pl.col('sequenceId')+100, i=pl.lit(.5)).write_parquet(tmp_path/'in'/'b.parquet')
    keys = dict(project_root=str(tmp_path/'o'), preprocessing_data_path=str(tmp_path/'in'), read_format='parquet', split_ratios=[1.], window_length=2)
    with pytest.raises(ValueError, match=r"\(a.parquet\).*row 3 .*: 9007199254740993 is 9007199254740992 as Float64"): preprocess(keys | dict(column_data_types={'i': 'Float64'}), progress=False)


def test_a_project_is_verified_as_a_whole(tmp_path, capsys):
    run(tmp_path)
    run(tmp_path, dataset_name='other', merge_output=False)
    assert main(['verify', str(tmp_path/'o')]) == 0
    assert capsys.readouterr().out.count('all as the manifest says') == 2
    with open(tmp_path/'o'/'data'/'data-split0.parquet', 'r+b') as f: f.write(b'x')
    assert main(['verify', str(tmp_path/'o')]) == 2


def test_a_finished_run_is_no_run_to_go_on_with(tmp_path):
    run(tmp_path, merge_output=False)
    with pytest.raises(ValueError, match='leave continue_preprocessing out to replace it'): run(tmp_path, ROWS.reverse(), merge_output=False, continue_preprocessing=True)
