"""Windows with several slots shown: children and texts as in the source, the same from every format, and drawn."""
import numpy as np, polars as pl, pytest

from fastseqprep.encoder import Encoder
from fastseqprep.preprocess import preprocess
from fastseqprep.show_windows import children_text, show_windows

pytestmark = pytest.mark.filterwarnings('ignore')
CHILDREN = [[0, 1], [1], [], [0, 2], [0, 1, 2], [2], [0]]
ROWS = pl.DataFrame([dict(sequenceId=s, itemPosition=p, line=j, shop='ns'[p % 2], note=['<too> big', 'ok', None][p % 3], kind=None if j is None else 'abc'[(p+j) % 3], amt=None if j is None else p*1.5+j) for s in (1, 2) for p, c in enumerate(CHILDREN) for j in (c or [None])])
KEYS = dict(split_ratios=[.7, .3], window_length=4, window_stride=2, nulls=dict(note='unknown'), text_columns='note', dtypes='standard', depth_layouts=dict(subs=dict(position_column='line', columns=['kind', 'amt'], context_length=3, allow_gaps=True)))
FORMATS = [dict(write_format='arrow'), dict(write_format='arrow', merge_output=False, batches_per_file=1), dict(write_format='parquet', layout='wide'), dict(write_format='pt', merge_output=False, batches_per_file=1), dict(write_format='bin')]


def run(root, **keys): return preprocess(dict(project_root=str(root), dataset_name='shop', **{**KEYS, **keys}), ROWS, progress=False)

@pytest.fixture(scope='module')
def plain(tmp_path_factory): return run(tmp_path_factory.mktemp('plain'), **FORMATS[0])


@pytest.mark.parametrize('fmt', FORMATS, ids=str)
def test_every_format_shows_the_same(plain, tmp_path, fmt):
    result = run(tmp_path, **fmt)
    for split in 0, 1:
        want, got = plain.show_windows(split, n=9), result.show_windows(split, n=9)
        assert repr(got) == repr(want) and got._repr_html_() == want._repr_html_()
        assert repr(show_windows(result.splits[split], 9)).splitlines()[1:] == repr(want).splitlines()[1:]


def test_values_are_those_of_the_source(plain):
    for split in 0, 1:
        shown = plain.show_windows(split, n=99)
        for i in range(len(shown)):
            start, pad = (int(x[i]) for x in (shown.block.start_item_positions, shown.block.left_pad_lengths))
            v = shown.values(i)
            assert list(v) == ['shop', 'note', 'kind', 'amt']
            for k in range(4):
                if k < pad: assert {v[c][k] for c in v} == {''}; continue
                p = start+k
                assert v['note'][k] == ['<too> big', 'ok', '[unknown]'][p % 3]
                assert v['kind'][k] == (', '.join('abc'[(p+j) % 3] if j in CHILDREN[p] else '–' for j in range(max(CHILDREN[p])+1)) if CHILDREN[p] else '–')
                if CHILDREN[p]: np.testing.assert_allclose([float(o) for o in v['amt'][k].split(', ') if o != '–'], [p*1.5+j for j in CHILDREN[p]], rtol=1e-3, atol=1e-6)


def test_text_and_html(plain):
    shown = plain.show_windows(n=1)
    assert '–, a' in repr(shown) or '–, c' in repr(shown) or '–, b' in repr(shown)
    assert '&lt;too&gt; big' in shown._repr_html_() and '<too>' not in shown._repr_html_()
    assert children_text(['x'], [1]) == '–, x' and children_text([1.25, None], [0, 1]) == '1.25, None'


def test_pictures(plain):
    plt = pytest.importorskip('matplotlib.pyplot')
    for split in 0, 1:
        shown = plain.show_windows(split, n=9)
        for i in range(len(shown)): assert len(shown.draw(i)) == 4
        assert len(shown.draw(0, ['kind', 'amt'])) == 2
        plt.close('all')


def test_an_encoder_that_is_handed_over(plain, tmp_path):
    from shutil import copy
    path = copy(plain.splits[0], tmp_path/'away-split0.arrow')
    assert repr(show_windows(path, encoder=Encoder.load(plain))).splitlines()[1:] == repr(show_windows(plain)).splitlines()[1:]
