"""From a configuration and rows to a prepared table, and the seams of the job: null rules, compact dtypes, kept split columns, metadata
used again, ids of every kind, texts, static columns, and rows handed over."""
import datetime as dt, json
from pathlib import Path

import numpy as np, polars as pl, pytest

from fastseqprep.blockfiles import read_block, split_files
from fastseqprep.blocks import WindowBlock
from fastseqprep.config import ConfigError, PreprocessConfig
from fastseqprep.payload import load_pt_payload
from fastseqprep.prepare import PreparedTable, check_static, prepare
from fastseqprep.preprocess import preprocess
from fastseqprep.source import DataSource

pytestmark = pytest.mark.filterwarnings('ignore')
N = 12
DF = pl.DataFrame(dict(sequenceId=[1]*8+[2]*4, itemPosition=[*range(8), *range(4)], item=[*'abcabcab', *'abax'], amount=[float(i) for i in range(N)]))
FORMATS = [dict(write_format='pt', merge_output=False), dict(write_format='parquet', layout='wide'), dict(write_format='arrow'), dict(write_format='bin')]


def run(tmp, df=DF, **keys):
    return preprocess({**dict(project_root=str(tmp), dataset_name='d', split_ratios=[.5, .5], window_length=4, max_target_offset=0, write_format='arrow'), **keys}, df, progress=False)
def windows(res, i=0): return WindowBlock.concat([read_block(f) for f in split_files(res.splits[i])])
def meta(res): return json.loads(Path(res.metadata_path).read_text())


# ---------------------------------------------------------------- nulls
def test_null_rules_with_indicators(tmp_path):
    df = DF.with_columns(item=pl.Series([*'ab', None, *'abcab', *'ab', None, 'x']), amount=pl.Series([0., None, 2., 3., *range(4, 8), 8., 9., None, 11.]))
    with pytest.raises(ValueError, match="'item'.*row 3.*null.*'amount' too"): run(tmp_path, df)
    for rules, filled in ((dict(item='unknown+indicator', amount='mean+indicator'), None), (dict(item='unknown+indicator', amount='zero+indicator'), 0.)):
        res = run(tmp_path, df, nulls=rules, dtypes='standard')
        m, b = meta(res), windows(res)
        kept = [0., 2, 3, 8, 9]
        mean, std = np.mean(kept), np.std(kept, ddof=1)
        assert list(b.features) == ['item', 'item_is_null', 'amount', 'amount_is_null']
        assert b.features['item'][0].tolist() == [3, 4, 0, 3] and m['id_maps']['item_is_null'] == {'0': 3, '1': 4}
        assert b.features['item_is_null'][0].tolist() == [3, 3, 4, 3] and b.features['amount_is_null'][0].tolist() == [3, 4, 3, 3]
        x = np.array([0, mean if filled is None else filled, 2, 3])
        np.testing.assert_allclose(b.features['amount'][0], (x-mean)/(std+1e-9))
        assert m['selected_columns_statistics']['amount'] == pytest.approx(dict(mean=mean, std=std))
    res = run(tmp_path, df, nulls=dict(item='drop_row', amount='zero'), gaps='renumber')
    assert res.ledger.sources['df']['dropped'] == {'null in item': 2}
    with pytest.raises(ValueError, match="'item' is categorical.*'mean' cannot fill"): run(tmp_path, df, nulls='mean')
    with pytest.raises(ValueError, match="'amount' is real.*'unknown' cannot fill"): run(tmp_path, df, nulls='unknown')


def test_an_indicator_does_not_need_a_null(tmp_path):
    res = run(tmp_path, DF, nulls=dict(item='unknown+indicator'))
    assert (windows(res).features['item_is_null'][0] == 3).all() and meta(res)['id_maps']['item_is_null'] == {'0': 3}
    later = DF.with_columns(item=pl.Series([None, *'bcabcab', *'abax']))
    res = run(tmp_path, later, nulls=dict(item='unknown+indicator'), dataset_name='e', metadata_config_path='configs/metadata_configs/d.json')
    assert windows(res).features['item_is_null'][0].tolist() == [1, 3, 3, 3] # true was never seen: other


# ---------------------------------------------------------------- dtypes
def test_compact_dtypes(tmp_path):
    rnd = np.random.default_rng(0)
    df = pl.DataFrame(dict(sequenceId=np.zeros(600, int), itemPosition=np.arange(600), small=rnd.integers(0, 3, 600), many=np.arange(600), flag=rnd.random(600) < .5, x=rnd.normal(size=600), h=rnd.normal(size=600).astype(np.float32),
                           day=pl.date_range(dt.date(2024, 1, 1), dt.date(2025, 8, 22), eager=True)[:600]))
    keys = dict(split_method='value_cutoff', split_ratios=None, split_column='day', split_values=['2025-01-01'])
    b = windows(run(tmp_path, df, **keys))
    assert {k: v.dtype.name for k, v in b.features.items()} == dict(small='int8', many='int16', flag='int8', x='float32', h='float32', day='int16')
    b = windows(run(tmp_path, df, **keys, dtypes='standard'))
    assert {k: v.dtype.name for k, v in b.features.items()} == dict(small='int64', many='int64', flag='int64', x='float64', h='float32', day='int64')
    b = windows(run(tmp_path, df, **keys, write_format='pt', merge_output=False, dtypes='compact'))
    assert b.features['small'].dtype == np.int8 and b.features['day'].dtype == np.int16


# ---------------------------------------------------------------- kept split columns
T0 = dt.datetime(2024, 3, 30, 22)
TIMES = [T0+dt.timedelta(hours=i) for i in range(8)]


@pytest.mark.parametrize('dtype, values, stored', [
    (pl.Int64, [3, 4], None), (pl.Datetime('ms'), ['2024-03-31T02:00:00Z', '2024-03-31T04:00:00Z'], lambda t: int(t.timestamp()*1e3)),
    (pl.Datetime('us'), ['2024-03-31T02:00:00', '2024-03-31T04:00:00Z'], lambda t: int(t.timestamp()*1e6)), (pl.Datetime('ns'), [dt.datetime(2024, 3, 31, 2), dt.datetime(2024, 3, 31, 4)], lambda t: int(t.timestamp()*1e9)),
    (pl.Datetime('us', 'Europe/Warsaw'), ['2024-03-31T02:00:00+00:00', '2024-03-31T06:00:00+02:00'], lambda t: int(t.timestamp()*1e6)), (pl.String, ['2024-03-31T02:00:00Z', '2024-03-31T04:00:00Z'], lambda t: int(t.timestamp()*1e6)),
    (pl.Date, ['2024-03-31', '2024-04-02'], lambda t: int(t.timestamp()//86400))])
def test_kept_split_column(dtype, values, stored, tmp_path):
    utc = [t.replace(tzinfo=dt.timezone.utc) for t in TIMES]
    s = pl.Series('when', utc, dtype=pl.Datetime('us', 'UTC'))
    if dtype == pl.Int64: s = pl.Series('when', range(8))
    elif dtype == pl.Date: s, utc = pl.Series('when', [dt.date(2024, 3, 28)+dt.timedelta(days=i) for i in range(8)]), [dt.datetime(2024, 3, 28, tzinfo=dt.timezone.utc)+dt.timedelta(days=i) for i in range(8)]
    elif dtype == pl.String: s = s.dt.strftime('%Y-%m-%dT%H:%M:%SZ')
    elif dtype.time_zone: s = s.dt.convert_time_zone(dtype.time_zone)
    else: s = s.dt.replace_time_zone(None).cast(dtype)
    df = DF[:8].with_columns(s)
    keys = dict(split_method='value_cutoff', split_ratios=None, split_column='when', split_values=values, dtypes='standard', window_length=2)
    res = run(tmp_path, df, **keys)
    cut = [3, 4] if dtype == pl.Int64 else [3, 5] if dtype == pl.Date else [4, 6]
    got = [windows(res, i) for i in range(3)]
    assert [int(b.split_start_item_positions[0]) for b in got] == [0, *cut]
    for b, a in zip(got, (0, *cut)):
        want = [3+i if a == 0 else 1 for i in range(a, a+2)] if stored is None else [stored(t) for t in utc[a:a+2]]
        assert [int(v) for v in b.features['when'][0] if v] == want[:int((b.features['when'][0] != 0).sum())]
    res = run(tmp_path, df, **keys, selected_columns=['item'])
    assert list(windows(res).features) == ['item']
    res = run(tmp_path, df, **keys, write_format='parquet')
    if stored is not None: assert meta(res)['column_data_types']['when'] == ("Datetime(time_unit='us', time_zone='UTC')" if dtype == pl.String else str(df['when'].dtype))


# ---------------------------------------------------------------- metadata used again
def test_metadata_of_every_kind_of_column(tmp_path):
    df = DF.with_columns(flag=pl.Series([True, False]*6), code=pl.Series([-5, 70_000, 3]*4), huge=pl.Series([2**63, 2**64-1]*6, dtype=pl.UInt64))
    first = run(tmp_path, df, split_ratios=[1.])
    again = run(tmp_path, df, split_ratios=[1.], dataset_name='e', metadata_config_path='configs/metadata_configs/d.json')
    a, b = windows(first), windows(again)
    assert all(np.array_equal(a.features[c], b.features[c]) for c in df.columns[2:])
    own = 'split_paths',  # of each run
    assert {k: v for k, v in meta(first).items() if k not in own} == {k: v for k, v in meta(again).items() if k not in own}
    new = df.with_columns(code=pl.lit(4), flag=pl.lit(True))
    c = windows(run(tmp_path, new, split_ratios=[1.], dataset_name='f', metadata_config_path='configs/metadata_configs/d.json'))
    assert (c.features['code'] == 1).all() and (c.features['flag'] == 4).all()
    few = run(tmp_path, df, split_ratios=[1.], dataset_name='g', metadata_config_path='configs/metadata_configs/d.json', selected_columns=['flag'])
    assert list(windows(few).features) == ['flag'] and set(meta(few)['id_maps']) == set(meta(first)['id_maps'])


def test_common_dtype_holds_all_columns_of_used_metadata(tmp_path):
    types = dict(item='Int8', amount='Float32')
    run(tmp_path, DF, column_data_types=types)
    res = run(tmp_path, DF, selected_columns=['item'], column_data_types=None, dataset_name='e', write_format='parquet', metadata_config_path='configs/metadata_configs/d.json')
    assert pl.read_parquet(res.splits[0])['0'].dtype == pl.Float32
    res = run(tmp_path, DF, selected_columns=['item'], dataset_name='e', write_format='csv', metadata_config_path='configs/metadata_configs/d.json')
    assert pl.read_csv(res.splits[0])['0'].dtype == pl.Float64
    res = run(tmp_path, DF, selected_columns=['item'], column_data_types=dict(item='Int8'), dataset_name='e', write_format='parquet')
    assert pl.read_parquet(res.splits[0])['0'].dtype == pl.Int8


# ---------------------------------------------------------------- ids, static columns
@pytest.mark.parametrize('ids', [['b', 'a'], [2**64-1, 2**63], [-5, 3]])
def test_ids(ids, tmp_path):
    s = pl.Series('sequenceId', [ids[0]]*8+[ids[1]]*4, dtype=pl.UInt64 if ids[0] == 2**64-1 else None)
    res = run(tmp_path, DF.with_columns(s), split_ratios=[1.])
    b, path = windows(res), tmp_path/'data'/'d.ids.parquet'
    if ids == [-5, 3]: assert not path.exists() and sorted(set(b.sequence_ids.tolist())) == [-5, 3]
    else:
        back = dict(pl.read_parquet(path).iter_rows())
        assert [back[i] for i in sorted(set(b.sequence_ids.tolist()))] == sorted(ids)
        assert (b.features['item'][b.sequence_ids == [k for k, v in back.items() if v == ids[1]][0]] != 0).any()


def test_static_columns(tmp_path):
    df = DF.with_columns(age=pl.Series([30]*8+[40]*4), sex=pl.Series([None]*8+['f']*4))
    b = windows(run(tmp_path, df, static_columns=['age', 'sex'], nulls='unknown', split_ratios=[1.], selected_columns=['item', 'age', 'sex']))
    assert b.features['age'][b.sequence_ids == 1].tolist() == [[3]*4]*2 and b.features['sex'][b.sequence_ids == 1].tolist() == [[0]*4]*2
    with pytest.raises(ValueError, match="'age' changes from 30 to 31 in sequence 1 at item position 7"): run(tmp_path, df.with_columns(age=pl.Series([30]*7+[31]+[40]*4)), static_columns='age', nulls='unknown')
    with pytest.raises(ValueError, match="'sex' changes from None to 'f' in sequence 1 at item position 5"): run(tmp_path, df.with_columns(sex=pl.Series([None]*5+['f']*7)), static_columns='sex', nulls='unknown')
    with pytest.raises(ValueError, match="'age' changes from 0 to None"): run(tmp_path, df.with_columns(age=pl.Series([0, None]+[0]*6+[4]*4)), static_columns='age', nulls='unknown')


# ---------------------------------------------------------------- texts
NOTES = DF.with_columns(note=pl.Series(['too big', 'ok', 'too small', '', None, 'big big big big big big', 'ok', 'ok', 'too red', 'blue', 'big', 'ok']))


@pytest.mark.parametrize('fmt', FORMATS)
def test_texts_in_every_format(fmt, tmp_path):
    keys = dict(text_columns=dict(note=dict(max_tokens=4, vocab_size=300)), nulls=dict(note='unknown'), window_stride=2, **fmt)
    res = run(tmp_path, NOTES, **keys)
    m, p = meta(res), prepare(PreprocessConfig(project_root=str(tmp_path), dataset_name='d', split_ratios=[.5, .5], window_length=4, max_target_offset=0, **keys), NOTES)
    text = p.fitted['note'].text
    assert m['text_columns']['note'] == json.loads(json.dumps(dict(max_tokens=4, **text.to_metadata()))) and m['n_classes']['note'] == len(text)+3
    by = {(s, i): t for s, i, t in NOTES.select('sequenceId', 'itemPosition', 'note').rows()}
    for i in range(2):
        b = windows(res, i)
        assert b.features['note'].shape == (b.n, 4, 4) == b.depth_masks['note'].shape
        for w in range(b.n):
            for j in range(4):
                ids, there = b.features['note'][w, j], b.depth_masks['note'][w, j]
                if j < b.left_pad_lengths[w]: assert not there.any() and not ids.any(); continue
                t = by[b.sequence_ids[w], b.start_item_positions[w]+j]
                want = [0] if t is None else (text.encode(pl.Series([t])).values[:4]+3).tolist()
                assert ids[there].tolist() == want
    if fmt['write_format'] == 'pt':
        for f in split_files(res.splits[0]): load_pt_payload(f, layouts=m['depth_layouts'], n_classes=m['n_classes'])
    again = run(tmp_path, NOTES, **{**keys, 'text_columns': 'note'}, dataset_name='e', metadata_config_path='configs/metadata_configs/d.json')
    for i in range(2): assert np.array_equal(windows(again, i).features['note'], windows(res, i).features['note'])
    assert meta(again)['text_columns'] == m['text_columns']


def test_texts_are_fitted_on_the_first_split(tmp_path):
    keys = dict(text_columns=dict(note=dict(max_tokens=4, vocab_size=300)), nulls=dict(note='unknown'))
    a = meta(run(tmp_path, NOTES, **keys))
    b = meta(run(tmp_path, NOTES.with_columns(note=pl.when(pl.col('itemPosition') >= pl.when(pl.col('sequenceId') == 1).then(4).otherwise(2)).then(pl.lit('zebra zebra')).otherwise('note')), **keys))
    assert a['text_columns'] == b['text_columns']
    with pytest.raises(ConfigError, match='text_columns: .*long layout'): run(tmp_path, NOTES, **keys, write_format='parquet')
    with pytest.raises(ValueError, match='holds no text'): run(tmp_path, NOTES, text_columns='amount', nulls='unknown')
    with pytest.raises(ValueError, match='note.*null'): run(tmp_path, NOTES, text_columns='note')


def test_a_mask_hides_texts(tmp_path):
    keys = dict(text_columns=dict(note=dict(max_tokens=3, vocab_size=300)), nulls=dict(note='unknown'), split_ratios=[1.])
    run(tmp_path, NOTES, **keys)
    res = run(tmp_path, NOTES.with_columns(hide=pl.col('itemPosition') < 2), **keys, dataset_name='e', mask_column='hide', metadata_config_path='configs/metadata_configs/d.json')
    b = windows(res)
    first = (b.subsequence_ids == 0)
    assert b.features['note'][first][:, :2].tolist() == [[[2, 0, 0]]*2]*2 and b.depth_masks['note'][first][:, :2].tolist() == [[[True, False, False]]*2]*2


def test_a_tokenizer_file_is_an_input(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    tok = Tokenizer(models.WordLevel({'[UNK]': 0, 'too': 1, 'big': 2}, unk_token='[UNK]'))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.save(str(tmp_path/'tok.json'))
    keys = dict(text_columns=dict(note=dict(tokenizer='tok.json', max_tokens=4)), nulls=dict(note='unknown'), dtypes='standard')
    res = run(tmp_path, NOTES, **keys)
    assert windows(res).features['note'][0].tolist() == [[4, 5, 0, 0], [3, 0, 0, 0], [4, 3, 0, 0], [0]*4]
    assert any('tok.json' in i.name for i in res.manifest.inputs)
    with pytest.raises(FileNotFoundError, match='none.json'): run(tmp_path, NOTES, text_columns=dict(note=dict(tokenizer='none.json')), nulls='unknown')


def test_texts_beside_depth(tmp_path):
    df = NOTES.with_columns(note=pl.col('note').fill_null(''), line=pl.lit(0))
    res = run(tmp_path, df, text_columns='note', depth_layouts=dict(subs=dict(position_column='line', columns=['amount'], context_length=2)))
    assert set(windows(res).depth_masks) == {'subs', 'note'} and set(meta(res)['depth_layouts']) == {'subs', 'note'}
    with pytest.raises(ConfigError, match='name of a depth layout'): run(tmp_path, df, text_columns='note', depth_layouts=dict(note=dict(position_column='line', columns=['amount'], context_length=2)))


# ---------------------------------------------------------------- handed over rows
def test_three_lines(tmp_path):
    rows = pl.DataFrame(dict(user=['u']*20+['v']*9, at=[1_700_000_000+3600*(i//2) for i in range(20)]+[1_700_000_000+60*i for i in range(9)], item=[*'abcdefghij'*2, *'abcdefghi'], price=np.arange(29.)))
    source = DataSource.from_df(rows.sample(fraction=1, shuffle=True, seed=1).sort('at', maintain_order=True), cats=['item'], conts=['price'], entity_col='user', time_col='at')
    res = preprocess(dict(split_ratios=[.8, .2], window_length=8, project_root=str(tmp_path)), source, progress=False)
    b = read_block(res.splits[0])
    assert b.width == 8 and set(b.features) == {'item', 'price'} and res.ledger.sources['df']['kept'] == 29
    assert pl.read_parquet(tmp_path/'data'/'df.ids.parquet')['id'].to_list() == ['u', 'v']
    assert b.split_start_item_positions.tolist() == [0]*b.n and [r['rows'] for r in res.report().to_dicts()] == [16+7, 4+2]
    plain = preprocess(dict(split_ratios=[.8, .2], window_length=8, project_root=str(tmp_path/'b')), rows.rename(dict(user='sequenceId')).with_columns(itemPosition=pl.int_range(pl.len()).over('sequenceId')).drop('at'), progress=False)
    assert plain.windows == res.windows


def test_a_prepared_table_comes_back(tmp_path):
    p = prepare(PreprocessConfig(project_root='.', dataset_name='d', split_ratios=[.5, .5], window_length=4, write_format='arrow', text_columns='note', nulls=dict(note='unknown'), curriculum_column='stage'), NOTES.with_columns(stage=pl.lit(3)))
    p.table.save(tmp_path/'t')
    t = PreparedTable.load(tmp_path/'t')
    assert t.layouts == p.table.layouts and t.dtypes == p.table.dtypes and list(t.features) == list(p.table.features)
    for c in t.features: assert np.array_equal(t.features[c], p.table.features[c])
    assert np.array_equal(t.slots['note'].starts, p.table.slots['note'].starts) and t.slots['note'].slots is None and t.slots['note'].depth == 32
