"""Metadata used again on rows that lack the targets of children, as in data to predict on."""
import json
from pathlib import Path

import numpy as np, polars as pl, pytest

from fastseqprep.blockfiles import read_block, split_files
from fastseqprep.blocks import WindowBlock
from fastseqprep.encoder import Encoder
from fastseqprep.preprocess import preprocess

pytestmark = pytest.mark.filterwarnings('ignore')
DF = pl.DataFrame([dict(sequenceId=s, itemPosition=p, line=j, shop='ns'[p % 2], kind='abc'[(p+j) % 3], amt=p+.5*j, bought=[True, False, None][(p+2*j) % 3], label='xy'[j % 2]) for s in (1, 2) for p in range(8) for j in range(1+p % 3)])
KEYS = dict(split_ratios=[1.], window_length=4, nulls=dict(bought='unknown+indicator'), target_columns=['bought', 'label'], depth_layouts=dict(subs=dict(position_column='line', columns=['kind', 'amt', 'bought', 'label'], context_length=3)))
REUSE = dict(dataset_name='e', metadata_config_path='configs/metadata_configs/d.json')


def run(tmp, df, **keys): return preprocess({**KEYS, **dict(project_root=str(tmp), dataset_name='d'), **keys}, df, progress=False)
def windows(res): return WindowBlock.concat([read_block(f) for f in split_files(res.splits[0])])


@pytest.mark.parametrize('fmt', [dict(write_format='pt', merge_output=False), dict(write_format='arrow'), dict(write_format='parquet', layout='wide'), dict(write_format='bin')], ids=str)
@pytest.mark.parametrize('selected', [None, ['amt', 'shop', 'bought', 'kind', 'label']], ids=str)
def test_rows_without_targets(tmp_path, fmt, selected):
    more = dict(fmt, selected_columns=selected)
    whole = windows(run(tmp_path, DF, **more))
    for gone in (['bought'], ['label'], ['bought', 'label']):
        res = run(tmp_path, DF.drop(gone), **more, **REUSE)
        b, lost = windows(res), {*gone, *(f'{c}_is_null' for c in gone)}
        assert set(b.features) == set(whole.features)-lost and np.array_equal(b.depth_masks['subs'], whole.depth_masks['subs'])
        for c, x in b.features.items(): assert np.array_equal(x, whole.features[c]) and x.dtype == whole.features[c].dtype, c
        layouts = json.loads(Path(res.metadata_path).read_text())['depth_layouts']
        assert set(layouts['subs']['columns']) == {'kind', 'amt', 'bought', 'label', 'bought_is_null'}-lost
        w = Encoder.load(res.metadata_path).encode_last_window(DF.drop(gone).filter(sequenceId=2))
        for c, x in b.features.items(): assert np.array_equal(w.features[c], x[-1])
        assert f'{b.n:,} of' in str(res.show_windows(n=9))


def test_a_layout_of_targets_alone(tmp_path):
    two = dict(subs=dict(position_column='line', columns=['kind', 'amt'], context_length=3), later=dict(position_column='pay', columns=['bought', 'label'], context_length=3))
    df = DF.with_columns(pay=pl.col('line'))
    whole = windows(run(tmp_path, df, write_format='arrow', depth_layouts=two))
    b = windows(run(tmp_path, df.drop('pay', 'bought', 'label'), write_format='arrow', depth_layouts=two, **REUSE))
    assert list(b.depth_masks) == ['subs'] and all(np.array_equal(x, whole.features[c]) for c, x in b.features.items()) and set(b.features) == {'shop', 'kind', 'amt'}


def test_what_is_no_target_is_missed(tmp_path):
    run(tmp_path, DF, write_format='arrow')
    with pytest.raises(ValueError, match="'kind'"): run(tmp_path, DF.drop('kind'), write_format='arrow', **REUSE)
    with pytest.raises(ValueError, match="target_columns: there is no column 'label'"): run(tmp_path, DF.drop('label'), write_format='arrow', dataset_name='f')
    with pytest.raises(ValueError, match='depth_layouts are'): run(tmp_path, DF.drop('label'), write_format='arrow', **REUSE, depth_layouts=dict(subs=dict(KEYS['depth_layouts']['subs'], context_length=4)))
