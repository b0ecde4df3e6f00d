"Names that are made or misspelt, targets that are not there yet, and shards that were damaged while a run lay idle"
import datetime as dt, json

import numpy as np, polars as pl, pytest

from fastseqprep.blockfiles import read_block
from fastseqprep.cli import main
from fastseqprep.encoder import Encoder
from fastseqprep.preprocess import preprocess
from fastseqprep.source import DataSource
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


def reused(tmp_path, df, meta=None, **keys):
    "Another run with the metadata of the first"
    first = tmp_path/'o'/'configs'/'metadata_configs'/'data.json'
    if meta is not None: first.write_text(json.dumps(meta))
    return run(tmp_path, df, dataset_name='new', metadata_config_path='configs/metadata_configs/data.json', **keys)


@pytest.mark.parametrize('df', [HOURS.with_columns(pl.col('t').cast(pl.String)), HOURS.with_columns(t=pl.lit(1.7)), HOURS.with_columns(t=pl.int_range(6)), HOURS.with_columns(t=pl.lit('x')), HOURS.with_columns(pl.col('t').dt.date()), HOURS.with_columns(pl.col('t').dt.cast_time_unit('ms'))],
                         ids=['text', 'float', 'integer', 'word', 'date', 'ms'])
@pytest.mark.parametrize('dtypes', ['standard', 'compact'])
def test_times_of_an_earlier_run_have_its_type(tmp_path, df, dtypes):
    how = dict(selected_columns=['a', 't'], dtypes=dtypes, split_ratios=None, split_method='value_cutoff', split_column='t', split_values=['2024-01-01T03:00:00'])
    run(tmp_path, HOURS, **how)
    if df['t'].dtype.is_temporal():
        with pytest.raises(ValueError, match="times of another type: 't' is .*, there it is Datetime"): reused(tmp_path, df, **how)
    else:
        with pytest.raises(ValueError, match="times of another type: 't' is .*, there it is Datetime"): reused(tmp_path, df, selected_columns=['a', 't'])
    assert not list((tmp_path/'o'/'data').glob('new*'))
    assert reused(tmp_path, HOURS, **how).windows
    (tmp_path/'o'/'data'/'data.manifest.json').unlink() # metadata alone, as other tools write it
    if dtypes=='standard' or not df['t'].dtype.is_temporal():
        with pytest.raises(ValueError, match="column 't' as Datetime.*, but in the data it is|column 't' only that it is stored as"): reused(tmp_path, df, **(how if df['t'].dtype.is_temporal() else dict(selected_columns=['a', 't'])))


def test_metadata_with_holes_is_refused(tmp_path):
    run(tmp_path)
    meta = json.loads((tmp_path/'o'/'configs'/'metadata_configs'/'data.json').read_text())
    for wrong, said in [(dict(selected_columns_statistics={}), "column 'x' only that it is stored as Float64"), (dict(id_maps={}), "column 'a' only that it is stored as Int64"), (dict(id_maps=None), "column 'a' only"),
                        (dict(column_data_types=[]), 'has list as column_data_types, expected an object'), (dict(selected_columns_statistics=dict(x=dict(mean='x', std=1.))), "the mean 'x' of column 'x', expected a finite number"),
                        (dict(id_maps=dict(a={**meta['id_maps']['a'], 'z': 2**70})), "'z' has the id 1180591620717411303424, which does not fit into 64 bits")]:
        with pytest.raises(ValueError, match=said): reused(tmp_path, ROWS, {**meta, **wrong})


@pytest.mark.parametrize('text, said', [('{"\\ud800": 3, "a": 4}', "a.json.*'.ud800' has half a surrogate pair"), ('{"a": 1180591620717411303424}', 'a.json.*does not fit into 64 bits'), ('['*100_000, 'a.json.*not readable as JSON')])
def test_maps_that_are_none_name_their_file(tmp_path, text, said):
    (tmp_path/'o'/'configs'/'id_maps').mkdir(parents=True)
    (tmp_path/'o'/'configs'/'id_maps'/'a.json').write_text(text)
    with pytest.raises(ValueError, match=said): run(tmp_path)


def test_an_encoder_knows_the_columns_of_its_run(tmp_path):
    "What a `DataSource` named as entity and time is looked for in rows, too"
    df = HOURS.rename(dict(sequenceId='user')).drop('itemPosition')
    res = run(tmp_path, DataSource(df, entity_col='user', time_col='t'))
    enc = Encoder.load(res.metadata_path)
    assert (enc.sequence_col, enc.position_col) == ('user', 't')
    last = enc.encode_last_window(df)
    stored = read_block(res.splits[1])
    got = last.arrays()
    assert all((got[k][0] == stored.features[k][-1]).all() for k in stored.features)
    with pytest.raises(ValueError, match=r"have the columns \['other'\].*and user and t"): enc.encode_last_window(df.with_columns(other=1))
    for odd in ([99], None, 'x'):
        with pytest.raises(TypeError, match="expected numbers by feature, such as {'a': "): enc.decode(odd)


def test_a_damaged_manifest_of_a_killed_run_is_no_end(tmp_path, monkeypatch):
    "Killed while files are put in place, and the list of them damaged then: the run is done again"
    import fastseqprep.resume as resume
    want = {p.relative_to(tmp_path/'o'): p.read_bytes() for p in (run(tmp_path), tmp_path/'o')[1].rglob('*') if p.is_file()}
    for n in range(3):
        moved, real, root = [], resume.move_file, tmp_path/f'k{n}'/'o'
        def move(*args):
            if len(moved) == n: raise KeyboardInterrupt
            moved.append(real(*args))
        monkeypatch.setattr(resume, 'move_file', move)
        with pytest.raises(KeyboardInterrupt): run(tmp_path/f'k{n}')
        monkeypatch.setattr(resume, 'move_file', real)
        (root/'data'/'.data.run'/'manifest.json').write_text(['', '{"job": 3}', '[]'][n])
        run(tmp_path/f'k{n}')
        got = {p.relative_to(root): p.read_bytes() for p in root.rglob('*') if p.is_file()}
        assert got.keys() == want.keys() and all(got[k] == want[k] for k in want if not k.name.endswith('.json')), n


def test_what_is_no_config_or_metadata_is_told(tmp_path):
    with pytest.raises(TypeError, match='config is int, expected a PreprocessConfig or its keys'): preprocess(3, ROWS)
    with pytest.raises(TypeError, match='metadata of a run is NoneType, expected the path'): Encoder.load(None)
    with pytest.raises(IsADirectoryError, match='is a folder, expected the metadata file of a run'): Encoder.load(tmp_path)
    with pytest.raises(ValueError, match="column 'sequenceId' is not in df .*rename one, or name another with a DataSource"): run(tmp_path, ROWS.rename(dict(sequenceId='user')))
