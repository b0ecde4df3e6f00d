"""Windows shown: the same from every format, the values of the source, and marks as training reads them."""
import re
from pathlib import Path

import numpy as np, polars as pl, pytest

from fastseqprep.blocks import WindowBlock
from fastseqprep.encoder import Encoder
from fastseqprep.preprocess import preprocess
from fastseqprep.show_windows import first_windows, show_windows, slot_kinds

pytestmark = pytest.mark.filterwarnings('ignore')
ROWS = pl.DataFrame(dict(sequenceId=['b']*11+['a']*3, itemPosition=[*range(5, 16), *range(3)], item=[*'abacabadab', '<x>', *'bba'], amount=[float(i*i) for i in range(14)],
                         at=pl.datetime_range(pl.datetime(2025, 1, 1), pl.datetime(2025, 1, 14), '1d', eager=True)))
KEYS = dict(split_ratios=[.6, .4], window_length=5, window_stride=2, max_target_offset=1, target_offset=1, prediction_aligned_splits=[1], prediction_length=2, timestamps=dict(at=['delta', 'weekday']))
FORMATS = [dict(), dict(merge_output=False, batches_per_file=1), dict(layout='wide'), dict(layout='wide', merge_output=False), dict(write_format='csv'),
           dict(write_format='pt', merge_output=False, batches_per_file=1), dict(write_format='arrow'), dict(write_format='arrow', merge_output=False), dict(write_format='bin')]


def run(root, **keys): return preprocess(dict(project_root=str(root), dataset_name='my shop', **{**KEYS, **keys}), ROWS, progress=False)

@pytest.fixture(scope='module')
def plain(tmp_path_factory): return run(tmp_path_factory.mktemp('plain'))


@pytest.mark.parametrize('fmt', FORMATS, ids=str)
def test_every_format_shows_the_same(plain, tmp_path, fmt):
    result = run(tmp_path, **fmt)
    for split in 0, 1:
        want, got = plain.show_windows(split, n=9), result.show_windows(split, n=9)
        assert repr(got) == repr(want)
        assert got._repr_html_() == want._repr_html_()
        assert repr(show_windows(result.splits[split], 9)).splitlines()[1:] == repr(want).splitlines()[1:]
        assert len(result.show_windows(split, n=2)) == 2


def test_values_are_those_of_the_source(plain):
    for split in 0, 1:
        shown = plain.show_windows(split, n=99)
        assert len(shown) == plain.windows[split]
        for i in range(len(shown)):
            start, pad = (int(x[i]) for x in (shown.block.start_item_positions, shown.block.left_pad_lengths))
            mine = ROWS.filter(pl.col('sequenceId') == shown.sequences[i], pl.col('itemPosition') >= start+pad, pl.col('itemPosition') < start+5)
            items, amounts = shown.values(i)['item'], shown.values(i)['amount']
            assert items[:pad] == amounts[:pad] == ['']*pad
            seen = set(ROWS.filter(pl.col('sequenceId') == 'b')['item'][:6])|{'b'}
            assert items[pad:] == [o if o in seen else '[other]' for o in mine['item']]
            assert np.allclose([float(o) for o in amounts[pad:]], mine['amount'].to_list(), rtol=1e-3, atol=1e-9)
            assert {*shown.values(i)['at_delta'][pad:]} <= {'1 d', '0 s'}


def kinds_by_hand(block, width, offset, steps=None):
    "Slot by slot, as training reads windows"
    res = []
    for k in range(block.n):
        line = ''
        for slot in range(width):
            item = block.start_item_positions[k]+slot
            if slot < block.left_pad_lengths[k]: line += '·'
            elif item < block.split_start_item_positions[k]: line += 'h'
            elif item < block.split_end_item_positions[k] and slot-offset >= 0 and (steps is None or slot >= width-steps): line += 't'
            else: line += 'i'
        res.append(line)
    return res

def test_marks():
    rng = np.random.default_rng(0)
    for _ in range(200):
        n, width, offset = 4, int(rng.integers(1, 8)), int(rng.integers(0, 3))
        pad = rng.integers(0, width+1, n)
        start = rng.integers(-5, 5, n)
        lo = start+rng.integers(0, width+1, n)
        block = WindowBlock(np.arange(n), np.zeros(n), start, pad, lo, lo+rng.integers(1, 9, n), dict(x=np.zeros((n, width))))
        for steps in (None, 1, 2): assert [''.join(o) for o in slot_kinds(block, offset, steps)] == kinds_by_hand(block, width, offset, steps)


def test_html_is_escaped_and_says_what_the_colours_mean(plain, tmp_path):
    page = preprocess(dict(project_root=str(tmp_path), dataset_name='s', split_ratios=[1.], window_length=5), ROWS.drop('at').with_columns(item=pl.lit('<b>&')), progress=False).show_windows()._repr_html_()
    assert '&lt;b&gt;&amp;' in page and '<b>&' not in page
    for word in 'padding', 'history', 'target': assert word in page


def test_long_windows_show_their_end(tmp_path):
    df = pl.DataFrame(dict(sequenceId=1, itemPosition=range(100), x=range(100)))
    result = preprocess(dict(project_root=str(tmp_path), dataset_name='s', split_ratios=[1.], window_length=90), df, progress=False)
    lines = repr(result.show_windows(n=1)).splitlines()
    assert re.fullmatch(r'position  …( +\d+){15}', lines[3]) and lines[3].endswith('89')
    assert len(repr(result.show_windows(n=1, max_slots=90)).splitlines()[3].split()) == 91


def test_one_sequence_only(plain):
    shown = plain.show_windows(1, sequence=0) # texts are numbered in their order
    assert set(shown.sequences) == {'a'} and len(shown) >= 1
    assert len(plain.show_windows(sequence=99)) == 0


def test_what_cannot_be_shown(plain, tmp_path):
    with pytest.raises(ValueError, match='there is no split 2'): plain.show_windows(2)
    with pytest.raises(ValueError, match='is not the path of a split'): show_windows(tmp_path/'x.parquet')
    with pytest.raises(FileNotFoundError, match='hand over an encoder'): show_windows(tmp_path/'data'/'x-split0.parquet')
    copy = tmp_path/'away-split0.parquet'
    copy.write_bytes(Path(plain.splits[0]).read_bytes())
    assert repr(show_windows(copy, encoder=Encoder.load(plain))).splitlines()[1:] == repr(show_windows(plain)).splitlines()[1:]
    with pytest.raises(FileNotFoundError): first_windows(tmp_path/'nothing', 1)


def test_pictures(plain):
    plt = pytest.importorskip('matplotlib.pyplot')
    for split in 0, 1:
        shown = plain.show_windows(split, n=9)
        for i in range(len(shown)): assert len(shown.draw(i)) == len(shown.block.features)
        assert len(shown.draw(0, ['item'])) == 1
        with pytest.raises(ValueError, match="no feature 'itm'"): shown.draw(0, ['itm'])
        plt.close('all')
