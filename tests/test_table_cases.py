"""The recorded runs of sequifier 3.1.1.0 (`cases/table`), reproduced through the command line, and what must be refused.

Where ours differs on purpose, `CORRECTIONS` holds the right values, worked out by hand, with the reason beside them. The
plain-Python job is held to the same figures, so it can be trusted elsewhere. The comparison reads files without the package.
"""
import json, os, re, shutil, subprocess, sys, warnings
from pathlib import Path

import numpy as np, polars as pl, pytest

import table_job_oracle as oracle
from table_windows import COORDS, Part, differences, from_oracle, read, recorded, stored, which, window_differences

CASES = Path(__file__).parent/'cases'/'table'
NAMES = sorted(p.name for p in CASES.iterdir() if (p/'case.json').exists())
ERRORS = json.loads((CASES/'errors'/'errors.json').read_text(encoding='utf-8'))


def read_json(path): return json.loads(Path(path).read_text(encoding='utf-8'))


# ---------------------------------------------------------------- what ours does differently, by hand
CORRECTIONS = {}


def correction(case, reason):
    def add(f):
        CORRECTIONS[case] = (reason, f)
        return f
    return add


def by_hand(case, out, split, *windows):
    """Replace a split by windows (sequenceId, subsequenceId, startItemPosition, leftPadLength, splitStartItemPosition,
    splitEndItemPosition). Their values are the input's, looked up in the recorded map or standardised with the recorded moments"""
    meta = out.metadata['d']
    rows = {(r['sequenceId'], r['itemPosition']): r for r in pl.read_parquet(CASES/case/'project'/'input'/'d.parquet').to_dicts()}
    old, = out.splits['d', split]
    def value(c, x):
        if x is None: return 0
        if c in meta['id_maps']: return meta['id_maps'][c][str(x)]
        m = meta['selected_columns_statistics'][c]
        return (x - m['mean'])/(m['std'] + 1e-9)
    feats = {c: np.array([[value(c, rows[s, at][c] if at >= start+pad else None) for at in range(start, start+a.shape[1])] for s, _, start, pad, _, _ in windows], a.dtype)
             for c, a in old.features.items()}
    out.splits['d', split] = [Part(old.file, {c: np.array([w[i] for w in windows], np.int64) for i, c in enumerate(COORDS)}, feats, old.schema, list(feats)*len(windows))]


@correction('03-within-ratio-rounding', 'bounds are exact: 7+2+1 of 10 rows, 14+4+2 of 20, 21+6+3 of 30, 4+2+1 of 7; the old tool lost the last row of each sequence to a sum of 0.9999999999999999')
def _(case, out):
    by_hand(case, out, 1, (0, 0, 5, 2, 7, 9), (1, 0, 14, 0, 14, 18), (2, 0, 21, 0, 21, 27), (2, 1, 23, 0, 21, 27), (3, 0, 2, 2, 4, 6))
    by_hand(case, out, 2, (0, 0, 6, 3, 9, 10), (1, 0, 16, 2, 18, 20), (2, 0, 26, 1, 27, 30), (3, 0, 3, 3, 6, 7))


@correction('22-sequence-splitting', 'allow_sequence_splitting never changes results: sequence 0 is one sequence of 24+6 rows (windows at 0 4 8 … 20, then 24 and 26), not two pieces that both begin with window 0; sequence 1 has 6+2')
def _(case, out):
    by_hand(case, out, 0, *[(0, n, 4*n, 0, 0, 24) for n in range(6)], (1, 0, 0, 0, 0, 6), (1, 1, 2, 0, 0, 6))
    by_hand(case, out, 1, (0, 0, 24, 0, 24, 30), (0, 1, 26, 0, 24, 30), (1, 0, 4, 2, 6, 8))


@correction('33-zero-std', 'a column without spread gives 0, also for a later value that differs (3.5 where all fitted ones are 2.5), not 10⁹')
def _(case, out):
    flat = out.splits['d', 1][0].features['flat']
    assert flat[0, 2] > 9e8
    flat[0, 2] = 0


@correction('69-resume-loses-windows', 'resume counts per task, not per file that was begun: sequence 3 is not lost. The inputs are those of case 68, so the windows are too')
def _(case, out):
    whole = recorded(read_json(CASES/'68-resume'/'expected.json'))
    assert [len(p.coords['sequenceId']) for p in whole.splits['set', 0]] != [len(p.coords['sequenceId']) for p in out.splits['set', 0]]
    out.splits, out.own = whole.splits, whole.own


@correction('70-stale-shards', 'shards of an earlier run are not listed: what counts is the one shard of each split that the second run wrote')
def _(case, out):
    for key, own in out.own.items():
        out.splits[key] = out.splits[key][:1]
        own['batch_files'] = own['batch_files'][:1]
        own['total_samples'] = own['batch_files'][0]['samples']


def expected(case):
    "The recorded output with our corrections"
    out = recorded(read_json(CASES/case/'expected.json'))
    if case in CORRECTIONS: CORRECTIONS[case][1](case, out)
    return out


# ---------------------------------------------------------------- running
def lay(project, tree):
    "Copy a recorded project, writable"
    shutil.copytree(tree, project, dirs_exist_ok=True, copy_function=shutil.copyfile)


def command(*args):
    "The exit code of the command in this process"
    from fastseqprep.cli import main
    try: return main(['preprocess', *args]) or 0
    except SystemExit as e: return e.code if isinstance(e.code, int) else int(e.code is not None)


def said(capsys, caught=()):
    "What a user reads: the error stream, and warnings"
    return '\n'.join([capsys.readouterr().err, *(str(w.message) for w in caught)])


def run_steps(case, project, monkeypatch, capsys):
    "All steps of a case; a step that must fail must say so in one line"
    for step in read_json(CASES/case/'case.json')['steps']:
        if 'overlay' in step: lay(project, CASES/case/step['overlay'])
        for k, v in step.get('env', {}).items(): monkeypatch.setenv(k, v)
        monkeypatch.chdir(project)
        code, text = command('--config-path', 'configs/preprocess.yaml', *step.get('argv', [])), said(capsys)
        if step.get('expect') == 'error': assert code == 1 and one_line(text), f'{case}: a step that cannot work ended with {code}: {text}'
        else: assert code == 0, f'{case}: exit code {code}: {text}'


def one_line(text): return 'Traceback' not in text and sum(l.startswith('fastseqprep:') for l in text.splitlines()) == 1


def last_config(case, project):
    cfg = oracle.load('configs/preprocess.yaml', project)
    for step in read_json(CASES/case/'case.json')['steps']:
        if step.get('argv') == ['-sc', 'None']: cfg['selected_columns'] = None
    return cfg


def check(problems, case):
    assert not problems, f'{case}: {len(problems)} differences\n  ' + '\n  '.join(problems[:12])


# ---------------------------------------------------------------- the cases
def test_all_cases_are_there(): assert len(NAMES) == 57 and len(ERRORS) == 106 and set(CORRECTIONS) <= set(NAMES)


@pytest.mark.parametrize('case', NAMES)
def test_recorded_windows(case, tmp_path, monkeypatch, capsys):
    lay(tmp_path/'p', CASES/case/'project')
    run_steps(case, tmp_path/'p', monkeypatch, capsys)
    got = stored(tmp_path/'p')
    want = expected(case)
    check(differences(want, got), case)
    left = [f.relative_to(tmp_path/'p').as_posix() for f in (tmp_path/'p').rglob('*') if 'temp' in f.name.lower() or f.suffix == '.tmp']
    assert not left, f'{case}: left behind {left}'


def is_strict(case):
    "One file and one worker: names and order of everything are fixed"
    lines = '\n'.join(p.read_text(encoding='utf-8') for p in sorted((CASES/case).rglob('*.yaml')))
    return set(re.findall(r'^n_cores: (\d+)', lines, re.M)) == {'1'} and not re.search(r'^preprocessing_data_path: input/set$', lines, re.M) and read_json(CASES/case/'case.json')['determinism'] == 'full'


STRICT = [c for c in NAMES if is_strict(c)]


@pytest.mark.parametrize('case', STRICT)
def test_recorded_files_in_every_detail(case, tmp_path, monkeypatch, capsys):
    lay(tmp_path/'p', CASES/case/'project')
    run_steps(case, tmp_path/'p', monkeypatch, capsys)
    check(differences(expected(case), stored(tmp_path/'p'), strict=True), case)


@pytest.mark.parametrize('case', NAMES)
def test_plain_python_job(case, tmp_path):
    "The oracle of the other tests, held to the recorded figures and to our corrections"
    project, want, got = tmp_path/'p', expected(case), None
    lay(project, CASES/case/'project')
    for step in read_json(CASES/case/'case.json')['steps']:
        if 'overlay' in step: lay(project, CASES/case/step['overlay'])
        cfg = last_config(case, project)
        if step.get('expect') == 'error':
            with pytest.raises(oracle.Refused): oracle.run(cfg, project)
            continue
        name = Path(cfg['preprocessing_data_path']).stem
        res = oracle.run(cfg, project)
        out = from_oracle(res, cfg, name)
        if got: out.splits, out.own, out.metadata = got.splits | out.splits, got.own | out.own, got.metadata | out.metadata
        got = out
        (project/'configs'/'metadata_configs').mkdir(parents=True, exist_ok=True)
        (project/'configs'/'metadata_configs'/f'{name}.json').write_text(json.dumps(res.metadata), encoding='utf-8')
    check(differences(want, got), case)


@pytest.mark.parametrize('case', [c for c in NAMES if c[:2] in ('01', '44', '49', '63')])
def test_reading_back_with_the_package(case, tmp_path, monkeypatch, capsys):
    "What `read_block` reads is what lies there"
    from fastseqprep.blockfiles import read_block
    lay(tmp_path/'p', CASES/case/'project')
    run_steps(case, tmp_path/'p', monkeypatch, capsys)
    for f in sorted((tmp_path/'p'/'data').rglob('*-split*-*.pt')) + sorted(p for p in (tmp_path/'p'/'data').glob('*-split*') if p.is_file()):
        part, block = read(f), read_block(f)
        assert block.n == len(part)
        for c, k in COORDS.items(): np.testing.assert_array_equal(getattr(block, k), part.coords[c])
        assert list(block.features) == list(part.features)
        for c, a in part.features.items(): np.testing.assert_array_equal(block.features[c], a)


def python(project, *args, env=None):
    "The command as a user starts it"
    return subprocess.run([sys.executable, '-m', 'fastseqprep.cli', 'preprocess', *args], cwd=project, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize('case', ['01-within-basic', '21-allow-large-splits', '62-sharded-pt'])
def test_in_a_process_of_its_own(case, tmp_path):
    lay(tmp_path/'p', CASES/case/'project')
    for step in read_json(CASES/case/'case.json')['steps']:
        done = python(tmp_path/'p', '--config-path', 'configs/preprocess.yaml', *step.get('argv', []), env=step.get('env'))
        assert done.returncode == 0, done.stderr
    check(differences(expected(case), stored(tmp_path/'p')), case)


# ---------------------------------------------------------------- refusals
def lay_error(project, name):
    for path, what in ERRORS[name]['files'].items():
        f = project/path
        f.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(what, str): f.write_bytes(what.encode())
        else: shutil.copyfile(CASES/'errors'/'inputs'/what['input'], f)


def tree(folder): return {p.relative_to(folder).as_posix(): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob('*'))}


# name: why it is accepted; what it gives is then what the plain-Python job gives
ACCEPTED = {
    'c-guard-seed-doc-example': 'the 50 % guard is a warning with the numbers: the first split holds an estimated 5.9 % of the windows',
    'c-guard-within': 'the 50 % guard is a warning with the numbers: 40 %',
    'd-guard-between': 'the 50 % guard is a warning with the numbers',
    'c-write-format': 'Arrow is a format to write: one row per window, a list per feature',
    'd-csv-no-csvstack': 'CSV is written without an external program',
    'd-float-position': 'float positions are taken if they are whole numbers',
    'd-folder-empty-file': 'an empty file in a folder is nothing to stumble over',
    'd-folder-named-data': 'a folder may be called data',
    'd-folder-trailing-slash': 'a trailing slash is no part of the name',
    'd-huge-sequence-id': 'ids beyond Int64 get numbers in their order, and the map is stored',
    'd-id-map-int-reserved': 'reserved labels may stand in the map of an integer column',
    'd-metadata-bool': 'metadata with a boolean column can be used again',
    'd-mixed-csv': 'the types of a CSV come from all its rows: k holds text',
    'd-narrow-input': 'categories are encoded before any cast: code 3000 has a small id',
    'd-string-sequence-id': 'string ids get numbers in their order, and the map is stored',
    'd-unsafe-splitting': 'allow_sequence_splitting never changes results, so it is never unsafe',
}
LATER = {'c-depth-cutoff'} # several rows per item with a cut-off: no error once depth layouts are there
REFUSED = [n for n in ERRORS if n not in ACCEPTED and n not in LATER]
EITHER = {n for n in ERRORS if n.startswith(('d-id-map', 'd-metadata'))} | {'c-resume-no-temp'} # files beside the config: both codes make sense


@pytest.mark.parametrize('name', REFUSED)
def test_refused_before_anything_is_written(name, tmp_path, monkeypatch, capsys):
    lay_error(tmp_path, name)
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter('always')
        code = command('--config-path', 'configs/preprocess.yaml')
    text, case = said(capsys), ERRORS[name]
    assert code in ((1, 2) if name in EITHER else (2,) if case['stage'] == 'config' else (1,)), f'exit code {code} ({case["stage"]}: {case["meaning"]}): {text}'
    assert one_line(text), f'not one line: {text}'
    missing = [w for w in case['should_mention'] if w not in text]
    assert not missing, f'{missing} not in: {text}'
    assert len(text) < 1500
    after = tree(tmp_path)
    assert after == before, f'written: {sorted(set(after) - set(before))}'


@pytest.mark.parametrize('name', ACCEPTED)
def test_accepted(name, tmp_path, monkeypatch, capsys):
    lay_error(tmp_path, name)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        code = command('--config-path', 'configs/preprocess.yaml')
    text = said(capsys, caught)
    assert code == 0, f'{ACCEPTED[name]}, but: {text}'
    cfg = oracle.load('configs/preprocess.yaml', tmp_path)
    dataset = Path(cfg['preprocessing_data_path'].rstrip('/')).stem
    res, got = oracle.run(cfg, tmp_path), stored(tmp_path)
    want = from_oracle(res, cfg, dataset)
    if name == 'c-write-format': # compact types may differ from those of the other formats
        for m in (*want.metadata.values(), *got.metadata.values()): m.pop('column_data_types')
        assert {p.name for p in (tmp_path/'data').iterdir()} >= {f'd-split{k}.arrow' for k in range(3)}
    if name.startswith('d-metadata'): want.metadata = {dataset: want.metadata[dataset]}
    check(differences(want, got), name)
    if 'guard' in name:
        share = guarded_share(cfg, tmp_path)
        assert share < 50 and re.search(r'(?<![\d.])(%.1f|%.2f|%.0f|%.4f|%.3f|%.2f)(?!\d)' % (share, share, share, share/100, share/100, share/100), text), f'no warning of {share:.1f} % in: {text}'
    if name in ('d-string-sequence-id', 'd-huge-sequence-id'):
        labels = [str(i) for i in sorted(pl.read_parquet(tmp_path/'input'/'d.parquet')['sequenceId'].unique().to_list())]
        assert list(labels_of_sequences(tmp_path)) == labels
    by_eye(name, got)


def guarded_share(cfg, root):
    "The first split's share of the windows in percent, as estimated from rows and spacings"
    K = len(cfg['split_ratios'])
    rows = list(cfg['split_ratios'])
    if cfg.get('split_method') == 'between_sequence':
        ids = pl.read_parquet(root/cfg['preprocessing_data_path'])['sequenceId']
        of = oracle.between(sorted(set(ids.to_list())), cfg['split_ratios'], cfg.get('seed', 1010))
        rows = [sum(of[i] == k for i in ids.to_list()) for k in range(K)]
    gap = [cfg['prediction_length']*cfg.get('prediction_alignment_steps', 1) if k in cfg.get('prediction_aligned_splits', ()) else cfg['window_stride'] for k in range(K)]
    weight = [r/g for r, g in zip(rows, gap)]
    return 100*weight[0]/sum(weight)


def labels_of_sequences(project):
    "The stored map from numbers back to the ids of the input, as text in order: from any JSON, CSV or Parquet file that is no split"
    def lists(o):
        if isinstance(o, list): yield o
        if isinstance(o, dict):
            yield list(o)
            for v in o.values(): yield from lists(v)
    ids = {str(i) for f in (project/'input').rglob('*.parquet') for i in pl.read_parquet(f)['sequenceId'].to_list()}
    for f in sorted([*(project/'data').rglob('*'), *(project/'configs'/'metadata_configs').rglob('*')]):
        if '-split' in f.relative_to(project).as_posix(): continue
        found = lists(read_json(f)) if f.suffix == '.json' else [pl.read_parquet(f)[c].to_list() for c in pl.read_parquet_schema(f)] if f.suffix == '.parquet' else []
        for values in found:
            if {str(v) for v in values} == ids: return [str(v) for v in values]
    raise AssertionError(f'the ids {sorted(ids)[:3]} are in no file beside the windows')


def by_eye(name, got):
    "A few values that can be checked by looking"
    key = which('d-split0.parquet')
    if name == 'd-narrow-input':
        feats = got.splits[key][0].features['code']
        assert feats.dtype == np.int8 and set(got.metadata['d']['id_maps']['code']) == {'-2000', '-1000', '0', '1000', '2000', '3000'} and feats.max() <= 8
    if name == 'd-mixed-csv':
        assert got.metadata['d']['id_maps']['k'] == {**{str(i): 3+i for i in range(7)}, '[unknown]': 0, '[other]': 1} # abc is the last row
        assert got.splits['d', 2][0].features['k'][-1, -1] == 1
    if name == 'd-string-sequence-id': assert set(got.splits[key][0].coords['sequenceId'].tolist()) == {0, 1}
    if name == 'd-folder-named-data': assert set(got.splits) == {('data', k) for k in range(3)}
    if name == 'd-folder-trailing-slash': assert set(got.splits) == {('set', k) for k in range(3)}


def test_a_null_in_a_column_that_is_not_used(tmp_path, monkeypatch, capsys):
    "With selected_columns null the column counts, and its nulls are refused; left out, it is not read at all"
    lay_error(tmp_path, 'd-null-unused-column')
    monkeypatch.chdir(tmp_path)
    cfg = tmp_path/'configs'/'preprocess.yaml'
    cfg.write_text(cfg.read_text() + 'selected_columns: [item, code, flag, amount]\n')
    assert command('--config-path', 'configs/preprocess.yaml') == 0, said(capsys)
    c = oracle.load('configs/preprocess.yaml', tmp_path)
    check(differences(from_oracle(oracle.run(c, tmp_path), c, 'd'), stored(tmp_path)), 'selected columns')


def test_a_format_that_nobody_writes(tmp_path, monkeypatch, capsys):
    lay_error(tmp_path, 'c-write-format')
    monkeypatch.chdir(tmp_path)
    cfg = tmp_path/'configs'/'preprocess.yaml'
    cfg.write_text(cfg.read_text().replace('write_format: arrow', 'write_format: arow'))
    before = tree(tmp_path)
    assert command('--config-path', 'configs/preprocess.yaml') == 2
    text = said(capsys)
    assert one_line(text) and 'write_format' in text and 'arow' in text and tree(tmp_path) == before


def test_all_problems_of_a_config_in_one_message(tmp_path, monkeypatch, capsys):
    lay_error(tmp_path, 'c-unknown-key')
    monkeypatch.chdir(tmp_path)
    cfg = tmp_path/'configs'/'preprocess.yaml'
    cfg.write_text(cfg.read_text() + 'batches_per_file: 0\nsplit_method: random\n')
    assert command('--config-path', 'configs/preprocess.yaml') == 2
    text = said(capsys)
    assert one_line(text) and all(w in text for w in ('window_lenght', 'window_length', 'batches_per_file', 'split_method')), text


@pytest.mark.parametrize('name,code', [('c-unknown-key', 2), ('d-inf', 1), ('c-no-file', 2)])
def test_exit_codes_of_a_process(name, code, tmp_path):
    lay_error(tmp_path, name)
    done = python(tmp_path, '--config-path', 'configs/preprocess.yaml')
    assert done.returncode == code and one_line(done.stderr), (done.returncode, done.stderr)


def test_a_wrong_flag_is_a_usage_error(tmp_path):
    lay_error(tmp_path, 'c-unknown-key')
    done = python(tmp_path, '--config-pat', 'configs/preprocess.yaml')
    assert done.returncode == 2 and one_line(done.stderr), done.stderr
