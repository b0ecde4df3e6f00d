"The configuration: every key, every rule between keys, composition, and paths."
import datetime as dt, json, os, pickle, subprocess, sys

import pytest, yaml
from hypothesis import HealthCheck, given, settings, strategies as st

from fastseqprep.compose import ConfigError, compose, override, read_yaml
from fastseqprep.config import PreprocessConfig, config_schema
from fastseqprep.rules import CardinalityRule

quick = settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def project(tmp_path, monkeypatch):
    "A working directory with data, as in `project_root: .`"
    monkeypatch.chdir(tmp_path)
    (tmp_path/'input').mkdir()
    (tmp_path/'configs'/'metadata_configs').mkdir(parents=True)
    (tmp_path/'input'/'d.parquet').touch()
    (tmp_path/'configs'/'metadata_configs'/'old.json').write_text('{}')
    return tmp_path


base = dict(project_root='.', preprocessing_data_path='input/d.parquet', read_format='parquet', write_format='parquet', merge_output=True, n_cores=1,
            split_ratios=[.6, .2, .2], window_length=6, window_stride=3, max_target_offset=1)
aligned = dict(prediction_aligned_splits=[1], prediction_length=2, target_offset=1)
cutoff = dict(split_ratios=None, split_method='value_cutoff', split_column='t', split_values=[3])
subs = dict(position_column='sub', columns=['kind'], context_length=4)
depth = dict(write_format='pt', merge_output=False, depth_layouts=dict(subs=subs))
DROP = object()


def keys(**more): return {k: v for k, v in {**base, **more}.items() if v is not DROP}


def problems(**more):
    try: PreprocessConfig(**keys(**more))
    except ConfigError as e: return e.problems
    return []


# ---- what is refused, with the words that a message must hold

refused = [
    (dict(project_root=DROP), ['project_root']), (dict(project_root=''), ['project_root']), (dict(project_root=None), ['project_root']),
    (dict(preprocessing_data_path=DROP), ['preprocessing_data_path']), (dict(preprocessing_data_path=' '), ['preprocessing_data_path']),
    (dict(preprocessing_data_path='input/none.parquet'), ['input/none.parquet']), (dict(dataset_name='a/b'), ['dataset_name']),
    (dict(read_format='json'), ['read_format', 'json']), (dict(write_format='feather'), ['write_format', 'feather', 'arrow']),
    (dict(write_format='pt'), ['merge_output', 'pt']), (dict(write_format='pt', merge_output=DROP), ['merge_output']), (dict(write_format='bin'), ['merge_output']),
    (dict(write_format='csv', merge_output=False), ['merge_output']), (dict(continue_preprocessing=True), ['continue_preprocessing', 'merge_output']),
    (dict(window_lenght=4), ['window_lenght', "did you mean 'window_length'"]), (dict(window_stride=0), ['window_stride']), (dict(window_stride=-1), ['window_stride']),
    (dict(window_length=0), ['window_length']), (dict(window_length=DROP), ['window_length', 'window_lengths']), (dict(window_lengths=[6, 6, 6]), ['window_length', 'window_lengths']),
    (dict(window_length=DROP, window_lengths=[6, 6]), ['window_lengths', '3']), (dict(window_length=DROP, window_lengths=[6, 0, 6]), ['window_lengths.1']),
    (dict(window_length=DROP, window_lengths=[6, 1, 6]), ['max_target_offset']), (dict(window_length=DROP, window_lengths=[6, 9, 7]), ['window_lengths']),
    (dict(window_length=3, max_target_offset=3), ['window_length', 'max_target_offset']), (dict(max_target_offset=-1), ['max_target_offset']),
    (dict(prediction_alignment_steps=2), ['prediction_alignment_steps', 'window_lengths']), (dict(prediction_alignment_steps=0), ['prediction_alignment_steps']),
    (dict(prediction_length=2), ['prediction_length']), (dict(target_offset=1), ['target_offset']),
    (dict(aligned, prediction_aligned_splits=[3]), ['prediction_aligned_splits', '3']), (dict(aligned, prediction_aligned_splits=[-1]), ['prediction_aligned_splits']),
    (dict(aligned, prediction_aligned_splits=[1, 1]), ['prediction_aligned_splits', 'different']), (dict(prediction_aligned_splits=[1]), ['prediction_length', 'target_offset']),
    (dict(aligned, prediction_length=6), ['prediction_length', 'room for 5']), (dict(aligned, target_offset=0), ['target_offset', 'max_target_offset']), (dict(aligned, allow_sequence_splitting=True), ['allow_sequence_splitting']),
    (dict(aligned, window_length=DROP, window_lengths=[6, 6, 7], prediction_length=3, prediction_alignment_steps=2), ['split 1 has room for 5']),
    (dict(batches_per_file=0), ['batches_per_file']), (dict(seed=-1), ['seed']), (dict(seed=2**32), ['seed']), (dict(n_cores=-1), ['n_cores']), (dict(max_rows=-1), ['max_rows']),
    (dict(split_method='random'), ['split_method', 'random']), (dict(split_ratios=DROP), ['split_ratios']), (dict(split_values=[3]), ['split_ratios', 'split_values']),
    (dict(split_ratios=[.5, .4]), ['split_ratios', '0.9']), (dict(split_ratios=[1., 0.]), ['split_ratios']), (dict(split_ratios=[1.5, -.5]), ['split_ratios']), (dict(split_ratios=[float('nan'), .5]), ['split_ratios']),
    (dict(split_ratios=[]), ['split_ratios']), (dict(split_column='code'), ['split_column']), (dict(split_ratios=DROP, split_values=[3]), ['split_values', 'value_cutoff']),
    (dict(cutoff, split_column=DROP), ['split_column']), (dict(cutoff, split_values=[]), ['split_values']), (dict(cutoff, split_values=None), ['split_values']), (dict(cutoff, split_ratios=[1.]), ['split_ratios', 'split_values']),
    (dict(split_method='value_cutoff', split_column='t'), ['split_ratios', 'split_values']), (dict(cutoff, split_values=[True]), ['split_values', 'True']), (dict(cutoff, split_values=[1.5]), ['split_values', '1.5']), (dict(cutoff, split_values=3), ['split_values']), (dict(cutoff, split_values=[3, 1]), ['split_values', '1 does not come after 3']), (dict(cutoff, split_values=[3, '2024-01-01']), ['split_values', 'mixed']), (dict(cutoff, split_values=['soon']), ['split_values', 'soon']),
    (dict(cutoff, split_column='sequenceId'), ['split_column']), (dict(cutoff, split_column='itemPosition'), ['split_column']), (dict(cutoff, split_column='__sequifier_split_value'), ['split_column']), (dict(cutoff, curriculum_column='t'), ['split_column']),
    (dict(selected_columns=[]), ['selected_columns']), (dict(selected_columns=['sequenceId']), ['selected_columns']), (dict(selected_columns=['a', '']), ['selected_columns']), (dict(selected_columns='a'), ['selected_columns']),
    (dict(selected_columns=['item'], real_columns=['code']), ['code']), (dict(selected_columns=['item'], categorical_columns=['itm']), ["did you mean 'item'"]),
    (dict(real_columns=['a', 'a']), ["'a' is named twice"]), (dict(categorical_columns=['']), ['empty name']), (dict(real_columns=['a'], categorical_columns=['a']), ["'a' is in categorical_columns too"]),
    (dict(column_data_types={'item': 'Date'}), ['item', 'Date']), (dict(column_data_types={'item': 'Int7'}), ["did you mean 'Int8'"]), (dict(column_data_types={'item': 'INT8'}), ['INT8']), (dict(column_data_types={'item': 3}), ['column_data_types.item']),
    (dict(selected_columns=['item', 'amount'], column_data_types={'item': 'Int64'}), ['amount']), (dict(real_columns=['amount'], column_data_types={'item': 'Int64'}), ['amount']),
    (dict(categorical_columns=['code'], column_data_types={'code': 'Float32'}), ['code', 'integer type']), (dict(real_columns=['code'], column_data_types={'code': 'Int8'}), ['code', 'float type']),
    (dict(cardinality_config={'item': dict(top_k=2, min_freq=2)}), ['cardinality_config.item', 'top_k', 'min_freq']), (dict(cardinality_config={'item': {}}), ['cardinality_config.item']), (dict(cardinality_config={'item': dict(top_k=None)}), ['cardinality_config.item']),
    (dict(cardinality_config={'item': dict(k=2, top_k=2)}), ["'k' and 'top_k'"]), (dict(cardinality_config={'item': dict(top_n=2)}), ['cardinality_config.item.top_n', "did you mean 'top_k'"]), (dict(cardinality_config={'item': dict(k=0)}), ['cardinality_config.item.top_k']),
    (dict(cardinality_config={'item': dict(hashing={})}), ['num_buckets']), (dict(cardinality_config={'item': dict(hashing=dict(num_buckets=2, sed=1))}), ['cardinality_config.item.hashing.sed', "did you mean 'seed'"]), (dict(cardinality_config={'item': dict(hashing=dict(buckets=0))}), ['num_buckets']),
    (dict(cardinality_config={'item': 3}), ['cardinality_config.item']), (dict(cardinality_config={'item': dict(k=2)}, use_precomputed_maps=['item']), ['item', 'use_precomputed_maps']),
    (dict(cardinality_config={'code': dict(k=2)}, real_columns=['code']), ['code', 'real_columns']), (dict(cardinality_config={'code': dict(k=2)}, categorical_columns=['item']), ['code', 'categorical_columns']), (dict(cardinality_config={'code': dict(k=2)}, selected_columns=['item']), ['code', 'selected_columns']),
    (dict(mask_column='flag'), ['mask_column', 'metadata_config_path']), (dict(mask_column='itemPosition', metadata_config_path='configs/metadata_configs/old.json'), ['mask_column']),
    (dict(mask_column='flag', metadata_config_path='configs/metadata_configs/old.json', selected_columns=['item', 'flag']), ['mask_column', 'flag']), (dict(metadata_config_path='configs/none.json'), ['metadata_config_path', 'configs/none.json']),
    (dict(curriculum_column=['code', 'code']), ['curriculum_column']), (dict(curriculum_column=['']), ['curriculum_column']), (dict(curriculum_column='sequenceId'), ['curriculum_column']), (dict(curriculum_column='__sequifier_curriculum_value_x'), ['curriculum_column']),
    (dict(depth, curriculum_column='sub'), ['curriculum_column', 'sub']), (dict(depth, curriculum_column='kind'), ['curriculum_column', 'kind']), (dict(curriculum_column='m', mask_column='m', metadata_config_path='configs/metadata_configs/old.json'), ['curriculum_column', 'mask_column']),
    (dict(depth_layouts=dict(subs=subs)), ['depth_layouts', 'pt', 'merge_output']), (dict(depth, selected_columns=['kind', 'sub']), ['sub']), (dict(depth, selected_columns=['item']), ['kind']), (dict(depth, column_data_types={'sub': 'Int8'}), ['column_data_types', 'sub']),
    (dict(depth, max_rows=0), ['max_rows']), (dict(depth, mask_column='m', metadata_config_path='configs/metadata_configs/old.json'), ['depth_layouts', 'mask_column']), (dict(depth, depth_layouts={'a.b': subs}), ['a.b']), (dict(depth, depth_layouts={'type': subs}), ['type']), (dict(depth, depth_layouts={'': subs}), ['depth_layouts']),
    (dict(depth, depth_layouts=dict(a=subs, b=dict(subs, position_column='other'))), ["'kind' is in the layout 'a' too"]), (dict(depth, depth_layouts=dict(subs=dict(subs, context_length=0))), ['depth_layouts.subs.context_length']), (dict(depth, depth_layouts=dict(subs=dict(subs, columns=[]))), ['depth_layouts.subs.columns']),
    (dict(depth, depth_layouts=dict(subs=dict(subs, position_base=2))), ['position_base']), (dict(depth, depth_layouts=dict(subs=dict(subs, columns=['kind', 'kind']))), ['different names']), (dict(depth, depth_layouts=dict(subs=dict(subs, allow_gap=True))), ["did you mean 'allow_gaps'"]), (dict(depth, depth_layouts=dict(subs=dict(subs, position_column='itemPosition'))), ['position_column']),
    (dict(nulls='skip'), ['nulls', 'skip']), (dict(nulls={'item': 'mean'}, categorical_columns=['item']), ['nulls.item']), (dict(nulls={'a': 'unknown'}, real_columns=['a']), ['nulls.a']), (dict(nulls='error+indicator'), ['nulls']), (dict(nulls={'x': 'zero'}, selected_columns=['item']), ['nulls.x']), (dict(nulls=3), ['nulls']), (dict(nulls={'sequenceId': 'drop_row'}), ['nulls.sequenceId']),
    (dict(gaps='fill'), ['gaps', 'fill']), (dict(duplicates='any'), ['duplicates']), (dict(duplicates='order'), ['duplicates', 'gaps']), (dict(memory_limit='lots'), ['memory_limit', 'lots']), (dict(memory_limit=5), ['memory_limit']),
    (dict(layout='tall'), ['layout', 'tall']), (dict(layout='wide', write_format='csv'), ['layout', 'csv']), (dict(layout='long', write_format='arrow'), ['layout', 'arrow']), (dict(dtypes='small'), ['dtypes']),
    (dict(timestamps={'at': ['hours']}), ['timestamps.at', "did you mean 'hour'"]), (dict(timestamps={'at': []}), ['timestamps.at']), (dict(timestamps={'at': ['hour', 'hour']}), ['timestamps.at']), (dict(timestamps={'at': 'hour'}, real_columns=['at']), ['timestamps.at', 'real_columns']), (dict(timestamps={'at': 'hour'}, selected_columns=['at', 'at_hour']), ['at_hour']),
    (dict(time_zone='Europe/Warsav'), ['time_zone', 'Europe/Warsaw']), (dict(text_columns={'note': dict(max_token=3)}), ["did you mean 'max_tokens'"]), (dict(text_columns='note', categorical_columns=['note']), ['text_columns', 'note']), (dict(text_columns='note'), ['text_columns', 'long layout', 'wide']), (dict(static_columns=['a', 'a']), ['static_columns']), (dict(static_columns='a', text_columns='a'), ['static_columns']),
    (dict(target_columns='x', selected_columns=['item']), ['target_columns', 'x']), (dict(target_columns='item', selected_columns=['item']), ['target_columns']),
]


@pytest.mark.parametrize('more, words', refused)
def test_refused(project, more, words):
    found = problems(**more)
    assert found and all(any(w in o for o in found) for w in words), found
    assert all(type(o) is str and '\n' not in o for o in found)


accepted = [
    {}, aligned, cutoff, depth, dict(skip_metadata=False), dict(window_length='6', max_target_offset='1', n_cores=1.0), dict(window_stride=None), dict(window_stride=DROP), dict(column_data_types={}), dict(cardinality_config=None),
    dict(split_ratios=[1.]), dict(split_ratios=[1/3]*3), dict(split_ratios=[.7, .2, .1]), dict(split_ratios=['0.5', .5]), dict(n_cores=0), dict(n_cores=None), dict(max_rows=0), dict(seed=2**32-1), dict(max_target_offset=0), dict(split_ratios=[.4, .6]), dict(allow_sequence_splitting=True),
    dict(selected_columns=['a', 'a', 'sequenceId', 'itemPosition']), dict(column_data_types={'a': 'int8', 'b': 'float16', 'c': 'UInt64'}), dict(selected_columns=['a'], column_data_types={'a': 'Int8', 'unused': 'Float32'}),
    dict(cutoff, column_data_types={'t': 'Datetime(time_unit=us)'}), dict(cutoff, column_data_types={'t': 'Date'}), dict(cutoff, split_values=['2024-01-01T00:00:00Z', '2024-02-01']), dict(cutoff, split_values=[dt.date(2024, 1, 1)]), dict(cutoff, split_values=[dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)]), dict(cutoff, split_values=[-2**63, 3.0]),
    dict(window_length=DROP, window_lengths=[6, 9, 6]), dict(aligned, window_length=DROP, window_lengths=[6, 6, 7], prediction_alignment_steps=2), dict(window_length=DROP, window_lengths=[6, 2, 6]),
    dict(cardinality_config={'a': dict(top_k=3, min_freq=None, hashing=None)}), dict(cardinality_config={'a': dict(min_count=3, hashing=dict(buckets='4', seed=-10**30))}), dict(cardinality_config={'a': dict(max_categories=3)}, categorical_columns=['a']),
    dict(curriculum_column='stage'), dict(curriculum_column=['stage', 'step'], selected_columns=['stage', 'a']), dict(mask_column='m', metadata_config_path='configs/metadata_configs/old.json'), dict(depth, depth_layouts=dict(a=subs, b=dict(subs, position_column='line', columns=['x'], position_base='1'))), dict(depth, **cutoff),
    dict(nulls='error'), dict(nulls=None), dict(nulls='unknown+indicator'), dict(nulls={'*': 'drop_row', 'a': 'mean+indicator'}), dict(gaps='renumber', duplicates='order'), dict(memory_limit='2GB'), dict(layout='wide'), dict(layout='wide', merge_output=False), dict(write_format='arrow'), dict(write_format='arrow', merge_output=False, layout='wide', dtypes='standard'), dict(write_format='bin', merge_output=DROP),
    dict(write_format='csv'), dict(write_format='pt', merge_output=False, dtypes='compact', continue_preprocessing=True), dict(timestamps={'at': ['delta', 'hour']}, time_zone='Europe/Warsaw'), dict(timestamps={'at': 'weekday'}, selected_columns=['at', 'a'], column_data_types={'a': 'Int8'}),
    dict(text_columns='note', write_format='arrow'), dict(text_columns=['note', 'title'], layout='wide'), dict(text_columns={'note': None, 'title': dict(max_tokens=4)}, write_format='bin', merge_output=False), dict(static_columns='age', target_columns=['churn']), dict(preprocessing_data_path=DROP, dataset_name='frame'), dict(preprocessing_data_path='input'), dict(preprocessing_data_path='input/'), dict(preprocessing_data_path='s3://bucket/d.parquet', project_root='memory://p'),
]


@pytest.mark.parametrize('more', accepted)
def test_accepted(project, more):
    c = PreprocessConfig(**keys(**more))
    plain = json.loads(json.dumps(c.resolved()))
    again = PreprocessConfig(**plain)
    assert again.resolved() == plain == c.resolved()
    assert pickle.loads(pickle.dumps(c)) == c
    (project/'c.yaml').write_text(yaml.safe_dump(plain))
    assert PreprocessConfig.from_yaml('c.yaml').resolved() == plain


def test_defaults():
    want = dict(read_format='csv', write_format='parquet', merge_output=True, continue_preprocessing=False, selected_columns=None, categorical_columns=None, real_columns=None, cardinality_config={}, column_data_types=None, normalize_real_columns=True,
                normalize_on_all_data=False, split_method='within_sequence', split_column=None, split_values=None, window_lengths=None, max_target_offset=1, window_stride=None, prediction_aligned_splits=[], prediction_length=None, target_offset=None,
                prediction_alignment_steps=1, max_rows=None, seed=1010, n_cores=None, batches_per_file=1024, process_by_file=True, allow_sequence_splitting=False, use_precomputed_maps=None, metadata_config_path=None, mask_column=None, curriculum_column=None, depth_layouts={})
    c = PreprocessConfig(project_root='.', dataset_name='x', split_ratios=[1.], window_length=4)
    assert {k: getattr(c, k) for k in want} == want
    assert (c.stride, c.widths, c.n_splits, c.wide, c.compact, c.curriculum_columns, c.features) == (4, [4], 1, False, False, [], None)
    assert c.cores == len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else c.cores > 0
    with pytest.raises(Exception, match='frozen'): c.seed = 3


def test_all_problems_in_one_error(project):
    with pytest.raises(ConfigError) as e:
        PreprocessConfig(**keys(window_lenght=3, seed='x', split_ratios=[.5], window_stride=0, cardinality_config={'a': {'top': 1}}, write_format='pt', nulls={'a': 'no'}, preprocessing_data_path='none'))
    places = {o.split(':')[0] for o in e.value.problems}
    assert places == {'window_lenght', 'seed', 'split_ratios', 'window_stride', 'cardinality_config.a.top', 'merge_output', 'nulls.a', 'preprocessing_data_path'}
    assert isinstance(e.value, ValueError) and str(e.value).startswith('configuration: 8 problems\n  - ') and str(pickle.loads(pickle.dumps(e.value))) == str(e.value)


def test_a_key_that_cannot_be_read_has_no_further_problems(project):
    assert problems(window_length='wide') == ["window_length: is 'wide': input should be a valid integer, unable to parse string as an integer"]
    assert problems(split_method=3, split_ratios=[1.]) == ["split_method: is 3, expected 'within_sequence', 'between_sequence' or 'value_cutoff'"]


junk = st.recursive(st.none() | st.booleans() | st.integers(-3, 2**33) | st.floats() | st.text(max_size=4) | st.sampled_from(['a', 'parquet', 'value_cutoff', 'mean', '4GB', 'hour', 'Int8']),
                    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3) | st.sampled_from(['a', 'top_k', 'hashing', 'num_buckets', 'columns', 'position_column']), x, max_size=3), max_leaves=6)


@quick
@given(more=st.dictionaries(st.sampled_from([*PreprocessConfig.model_fields, 'unknown', 'additional_config_paths', 'self']), junk, max_size=5))
def test_nothing_but_a_config_error(project, more):
    try: c = PreprocessConfig(**{**base, **more})
    except ConfigError as e:
        assert e.problems and all(':' in o for o in e.problems)
        return
    c.split_paths, c.metadata_path, c.stride, c.compact, c.timestamp_features
    plain = json.loads(json.dumps(c.resolved()))
    assert json.dumps(PreprocessConfig(**plain).resolved()) == json.dumps(plain)


# ---- names and paths

@pytest.mark.parametrize('path, name', [('input/d.parquet', 'd'), ('input/a.b.parquet', 'a.b'), ('input/x.parquet.parquet', 'x.parquet'), ('input/set', 'set'), ('input/set/', 'set'), ('input/set//', 'set'), ('input/my.set', 'my'), ('input/my.set/', 'my'),
                                        ('data', 'data'), ('input/data/', 'data'), ('input/two words.csv', 'two words'), ('input/.hidden', '.hidden'), ('input/set/.', 'set'), ('input/set/../data', 'data'), ('./input/ü', 'ü')])
def test_name_of_the_data(project, path, name):
    if not os.path.exists(path): os.makedirs(path)
    c = PreprocessConfig(**keys(preprocessing_data_path=path))
    assert c.name == name and c.split_path(1) == f'./data/{name}-split1.parquet' and c.metadata_path == f'./configs/metadata_configs/{name}.json'
    assert PreprocessConfig(**keys(preprocessing_data_path=os.path.abspath(path))).name == name
    assert PreprocessConfig(**keys(preprocessing_data_path=path, dataset_name='other')).name == 'other'


def test_name_of_the_working_directory(project):
    assert PreprocessConfig(**keys(preprocessing_data_path='.')).name == os.path.splitext(project.name)[0]
    assert PreprocessConfig(**keys(preprocessing_data_path='./')).name == os.path.splitext(project.name)[0]


def test_paths_of_outputs(project):
    paths = lambda **more: PreprocessConfig(**keys(**more)).split_paths
    assert paths() == ['./data/d-split0.parquet', './data/d-split1.parquet', './data/d-split2.parquet']
    assert paths(write_format='csv')[0] == './data/d-split0.csv' and paths(write_format='arrow')[0] == './data/d-split0.arrow'
    assert paths(merge_output=False) == ['./data/d-split0', './data/d-split1', './data/d-split2'] == paths(write_format='pt', merge_output=False) == paths(write_format='bin', merge_output=False)
    (project/'sub').mkdir()
    c = PreprocessConfig(**keys(project_root='sub/', metadata_config_path='../configs/metadata_configs/old.json'))
    assert (c.split_path(0), c.data_folder, c.id_maps_folder, c.reused_metadata_path) == ('sub/data/d-split0.parquet', 'sub/data', 'sub/configs/id_maps', 'sub/../configs/metadata_configs/old.json')


def test_data_is_seen_from_the_working_directory_and_the_rest_from_the_root(project, monkeypatch):
    (project/'work').mkdir()
    monkeypatch.chdir(project/'work')
    assert problems(project_root='..', preprocessing_data_path='../input/d.parquet', metadata_config_path='configs/metadata_configs/old.json') == []
    assert len(problems(project_root='..', metadata_config_path='../configs/metadata_configs/old.json')) == 2


# ---- YAML

def files(project, **texts):
    (project/'configs'/'parts').mkdir(exist_ok=True)
    for k, v in texts.items(): (project/'configs'/(f'{k}.yaml' if k == 'main' else f'parts/{k}.yaml')).write_text(v if isinstance(v, str) else yaml.safe_dump(v))
    return 'configs/main.yaml'


def test_composition(project):
    main = files(project, main=dict(keys(split_ratios=DROP, window_length=DROP, window_stride=DROP), additional_config_paths=['configs/parts/a.yaml', 'configs/parts/b.yaml'], cardinality_config={'item': {'hashing': {'seed': 4}}}),
                 a=dict(cardinality_config={'item': {'top_k': 3}}, column_data_types={'code': 'Int16', 'item': 'Int32'}, split_ratios=[.6, .4]),
                 b=dict(cardinality_config={'code': {'min_freq': 2}, 'item': {'hashing': {'num_buckets': 2}}}, column_data_types={'amount': 'Float32'}, window_length=5))
    c = PreprocessConfig.from_yaml(main)
    assert c.cardinality_rules == {'item': {'top_k': 3, 'hashing': {'num_buckets': 2, 'seed': 4}}, 'code': {'min_freq': 2}}
    assert c.column_data_types == {'code': 'Int16', 'item': 'Int32', 'amount': 'Float32'} and c.stride == 5 and c.split_ratios == [.6, .4]
    absolute = files(project, main=dict(keys(window_length=DROP), additional_config_paths=str(project/'configs'/'parts'/'w.yaml')), w=dict(window_length=9))
    assert PreprocessConfig.from_yaml(absolute).window_length == 9


@pytest.mark.parametrize('main, parts, words', [
    (dict(additional_config_paths='configs/parts/a.yaml', seed=1), dict(a='seed: 1'), ['seed: is defined in', 'parts/a.yaml', 'main.yaml']), (dict(additional_config_paths='configs/parts/a.yaml', max_rows=None), dict(a='max_rows: null'), ['max_rows']),
    (dict(additional_config_paths='configs/parts/a.yaml', column_data_types={'item': 'Int8'}), dict(a='column_data_types: {item: Int8}'), ['column_data_types.item']), (dict(additional_config_paths='configs/parts/a.yaml', column_data_types={}), dict(a='column_data_types: {item: Int8}'), ['column_data_types: is defined']),
    (dict(additional_config_paths='configs/parts/a.yaml', split_ratios=[1.]), dict(a='split_ratios: [1.0]'), ['split_ratios']), (dict(additional_config_paths=['configs/parts/zzz.yaml']), {}, ['zzz.yaml', 'does not exist']),
    (dict(additional_config_paths='configs/parts/a.yaml', project_root=None), dict(a='seed: 1'), ['project_root']), (dict(additional_config_paths='configs/parts/a.yaml', project_root=' '), dict(a='seed: 1'), ['project_root']),
    (dict(additional_config_paths=['configs/parts/a.yaml', './configs/../configs/parts/a.yaml']), dict(a='seed: 1'), ['twice']), (dict(additional_config_paths='configs/main.yaml'), {}, ['the file itself']), (dict(additional_config_paths='configs/parts/a.yaml'), dict(a='additional_config_paths: null'), ['additional_config_paths']),
    (dict(additional_config_paths='configs/parts/a.yaml'), dict(a=''), ['a.yaml', 'nothing']), (dict(additional_config_paths='configs/parts/a.yaml'), dict(a='- 1'), ['a.yaml', 'list']), (dict(additional_config_paths=3), {}, ['additional_config_paths']), (dict(additional_config_paths=['']), {}, ['additional_config_paths']), (dict(additional_config_paths={'a': 1}), {}, ['additional_config_paths']),
    (dict(additional_config_paths=['configs/parts/a.yaml', 'configs/parts/none.yaml'], seed=1), dict(a='seed: 1'), ['2 problems', 'seed', 'none.yaml'])])
def test_composition_that_is_refused(project, main, parts, words):
    path = files(project, main={'project_root': '.', **main}, **parts)
    with pytest.raises(ConfigError) as e: compose(path)
    assert all(w in str(e.value) for w in words) and str(e.value).startswith('configs/main.yaml: '), str(e.value)


@pytest.mark.parametrize('text, words', [('a: [1,\nb: {', ['line 2']), ('- a\n- b', ['list']), ('', ['nothing']), ('seed: 1\nseed: 2', ['seed: stands twice', '1 and 2']), ('a: {b: 1, b: 1}', ['b: stands twice']), ('3: x', ['3']), ('a: !!python/object/apply:os.getcwd []', ['constructor']), ('a: *b', ['undefined alias'])])
def test_yaml_that_is_refused(project, text, words):
    (project/'c.yaml').write_text(text)
    with pytest.raises(ConfigError) as e: read_yaml('c.yaml')
    assert all(w in str(e.value) for w in ['c.yaml', *words]), str(e.value)


def test_yaml_that_cannot_be_read(project):
    with pytest.raises(ConfigError, match='configs/preprocess.yaml: does not exist'): PreprocessConfig.from_yaml('configs/preprocess.yaml')
    with pytest.raises(ConfigError, match='configs: cannot be read'): PreprocessConfig.from_yaml('configs')
    (project/'c.yaml').write_bytes(b'\xff\xfe\xfa')
    with pytest.raises(ConfigError, match='c.yaml: '): PreprocessConfig.from_yaml('c.yaml')


def test_merge_keys_of_yaml_work(project):
    (project/'c.yaml').write_text('x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}')
    assert read_yaml('c.yaml')['y'] == {'a': 3, 'b': 2}


def test_overrides(project):
    main = files(project, main=keys(selected_columns=['a'], cardinality_config={'a': {'top_k': 3}}, seed=5))
    c = PreprocessConfig.from_yaml(main, selected_columns=None, cardinality_config={'a': {'hashing': {'num_buckets': 2}}}, seed=7, preprocessing_data_path='input')
    assert (c.selected_columns, c.seed, c.name) == (None, 7, 'input') and c.cardinality_rules['a'] == {'top_k': 3, 'hashing': {'num_buckets': 2, 'seed': 0}}
    assert override({'a': {'b': 1}, 'c': 2}, {'a': {'d': 3}, 'c': None}) == {'a': {'b': 1, 'd': 3}, 'c': None}
    with pytest.raises(ConfigError, match='configs/main.yaml: seed: is -1'): PreprocessConfig.from_yaml(main, seed=-1)


# ---- the rest

def test_resolved(project):
    c = PreprocessConfig(**keys(n_cores=7, cardinality_config={'a': dict(k=3)}, nulls='unknown', text_columns='note', layout='wide', prediction_aligned_splits=[2, 1], prediction_length=1, target_offset=1))
    assert 'n_cores' not in c.resolved(results_only=True) and c.resolved()['cardinality_config'] == {'a': {'top_k': 3}} and c.resolved()['nulls'] == {'*': 'unknown'}
    assert c.aligned_splits == [1, 2]
    assert c.resolved(results_only=True) == PreprocessConfig(**keys(n_cores=2, cardinality_config={'a': dict(max_categories=3)}, nulls={'*': 'unknown'}, text_columns={'note': {}}, layout='wide', prediction_aligned_splits=[2, 1], prediction_length=1, target_offset=1)).resolved(results_only=True)


def test_null_rules(project):
    c = PreprocessConfig(**keys(nulls={'*': 'mean', 'a': 'unknown+indicator', 'b': 'error'}))
    assert [c.null_rule(o) for o in 'abc'] == [('unknown', True), ('error', False), ('mean', False)]
    assert PreprocessConfig(**base).null_rule('a') == ('error', False)


def test_cardinality_rules_are_equal_when_they_say_the_same():
    assert CardinalityRule(k=3) == CardinalityRule(max_categories='3', hashing=None) != CardinalityRule(k=4)


def test_names_that_pytorch_has_taken():
    torch = pytest.importorskip('torch')
    from fastseqprep.keys import _torch_names
    taken = {o for o in dir(torch.nn.ModuleDict()) if o[0] != '_'}
    assert taken <= _torch_names, taken-_torch_names


def test_schema(tmp_path):
    schema = config_schema(tmp_path/'s.json')
    assert json.loads((tmp_path/'s.json').read_text()) == schema
    assert {*PreprocessConfig.model_fields, 'additional_config_paths'} == {*schema['properties']}
    assert all(o.get('description') for o in schema['properties'].values())
    for name in ('CardinalityRule', 'Hashing', 'DepthLayout', 'TextRule'): assert all(o.get('description') for o in schema['$defs'][name]['properties'].values())


def test_import_is_light():
    code = "import sys, fastseqprep.config; print([o for o in ('polars', 'pyarrow', 'numpy', 'torch', 'pandas') if o in sys.modules])"
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip() == '[]'


@pytest.mark.parametrize('name,good', [('.', False), ('..', False), ('a\nb', False), ('a\x00', False), ('\x1b[31m', False), ('a/b', False), ('a\\b', False), ('', False), ('...', True), ('.x', True), ('a b', True), ('é*?', True)])
def test_names_of_data_sets(name, good):
    "What can stand in the name of a file: no folder, and nothing that a terminal would obey"
    keys = dict(project_root='.', dataset_name=name, split_ratios=[1.], window_length=2)
    if good: assert PreprocessConfig(**keys).name == name
    else:
        with pytest.raises(ConfigError, match='dataset_name') as e: PreprocessConfig(**keys)
        assert str(e.value).isprintable()
