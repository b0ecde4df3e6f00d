"""Rows to windows: fastseqprep beside sequifier, and both beside the least that polars needs.

    python benchmarks/table.py --quick                # 20,000 rows, one round, to see that all works
    python benchmarks/table.py                        # 1M and 5M rows, three rounds
    python benchmarks/table.py --tasks parquet pt --rows 1000000
    python benchmarks/table.py --peer-python PATH     # an environment that already holds sequifier and csvkit
    python benchmarks/table.py --no-peer              # ours and polars alone

Each run is the whole command in a fresh process, from its start to its end, with two cores. They take turns (A B C A B C ...);
every figure is a median, every ratio the median of the rounds' ratios. Needs about 5 GB of disk at 5M rows.
"""
import argparse, compileall, json, os, shutil, sys, tempfile
from datetime import date
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _measure import HERE, medians, spread, venv
from _table_data import make
from _tree import watch
from events import busy, machine, ratio, row, table

OURS, PEER, LIMIT, IDS = 'fastseqprep', 'sequifier', 'polars', 'polars, with ids'
PACKAGES = 'sequifier==3.1.1.0', 'csvkit'
TASKS = { # what is run: (kind of input, keys of the configuration, words)
    'parquet': ('rows', dict(write_format='parquet', merge_output=True), 'Parquet, one file per split'),
    'shards': ('rows', dict(write_format='parquet', merge_output=False), 'Parquet shards'),
    'pt': ('rows', dict(write_format='pt', merge_output=False), 'PT shards'),
    'csv': ('rows', dict(write_format='csv', merge_output=True), 'CSV'),
    'files': ('files', dict(write_format='parquet', merge_output=True), 'a folder of eight files to Parquet'),
    'distinct': ('distinct', dict(write_format='pt', merge_output=False), 'as many distinct strings as rows, PT'),
}
LARGE = 'parquet', 'shards', 'pt' # the tasks that are run beyond the first size, if none are named
CONFIG = dict(project_root='.', read_format='parquet', n_cores=2, split_ratios=[.8, .1, .1], window_length=65, window_stride=64, max_target_offset=1)


def args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--rows', nargs='+', type=int, default=[1_000_000, 5_000_000], help='rows of the tables')
    p.add_argument('--tasks', nargs='+', choices=list(TASKS), help='what to run; by default all at the first size, and Parquet and PT beyond')
    p.add_argument('--repeats', type=int, default=3, help='rounds in which each has its turn')
    p.add_argument('--quick', action='store_true', help='20,000 rows and one round')
    p.add_argument('--no-peer', action='store_true', help='leave sequifier out')
    p.add_argument('--no-ours', action='store_true', help='leave fastseqprep out')
    p.add_argument('--peer-python', type=Path, help='a Python that has sequifier and csvkit, instead of making an environment')
    p.add_argument('--work', type=Path, default=Path(tempfile.gettempdir())/'fastseqprep-benchmarks', help='folder for data, environment and outputs')
    p.add_argument('--results', type=Path, default=Path(__file__).parent/'RESULTS-table.md', help='markdown file to write')
    a = p.parse_args()
    if a.quick: a.rows, a.repeats = [20_000], 1
    a.work = a.work.resolve()
    return a


def commands(a):
    "Who is run, and how: {name: (command, environment)}"
    res = {} if a.no_ours else {OURS: ([Path(sys.executable).parent/OURS, 'preprocess'], {})}
    if res: compileall.compile_dir(Path(find_spec(OURS).origin).parent, quiet=1) # as pip did with all that is installed; a working copy may be newer than its bytecode
    if a.no_peer: return res
    python = (a.peer_python or venv(a.work/'env'/PEER, *PACKAGES)).absolute()
    return {**res, PEER: ([python.parent/'sequifier', 'preprocess'], dict(PATH=f'{python.parent}{os.pathsep}{os.environ["PATH"]}'))}


def versions(pys):
    "The versions that are compared"
    import importlib.metadata as m, polars
    res = {OURS: m.version(OURS), LIMIT: polars.__version__, IDS: polars.__version__}
    if PEER in pys: res[PEER] = PACKAGES[0].split('==')[1]
    return res


def project(folder, data, keys):
    "An empty project with a configuration, and a link to the input"
    shutil.rmtree(folder, ignore_errors=True)
    (folder/'configs').mkdir(parents=True)
    name = 'log' if (data/'log').is_dir() else 'log.parquet'
    (folder/'input').mkdir()
    (folder/'input'/name).symlink_to(data/name, target_is_directory=name == 'log')
    (folder/'configs'/'preprocess.yaml').write_text(json.dumps({**CONFIG, **keys, 'preprocessing_data_path': f'input/{name}'})) # JSON is YAML
    return folder


def outputs(folder): return sorted(f for f in (folder/'data').rglob('*') if f.is_file() and f.suffix in ('.parquet', '.pt', '.csv'))


def facts_of(folder): return sorted([*(folder/'data').rglob('metadata.json'), *(folder/'configs'/'metadata_configs').glob('*.json')])


def windows(folder, merged):
    "Windows of each split"
    import polars as pl
    if not merged: return [json.loads((folder/'data'/f'log-split{k}'/'metadata.json').read_text())['total_samples'] for k in range(3)]
    scan = lambda f: pl.scan_csv(f) if f.suffix == '.csv' else pl.scan_parquet(f)
    return [scan(f).filter(pl.col('inputCol') == 'level').select(pl.len()).collect().item() for f in outputs(folder)]


def one_run(who, cmd, env, folder, data, keys):
    "Figures of one run"
    project(folder, data, keys)
    facts = watch([*cmd, '--config-path', 'configs/preprocess.yaml'], folder, env)
    files = outputs(folder)
    if not files: raise RuntimeError(f'{who} wrote no windows:\n{(folder/"log.txt").read_text()[-3000:]}')
    return dict(facts, files=len(files), out_mb=sum(f.stat().st_size for f in files)/2**20, windows=windows(folder, keys['merge_output']))


def limit(a, folder, data, made, keys, ids=False):
    "Figures of polars: read, sort, and write the windows of a finished run; with `ids`, make a vocabulary too, instead of copying it"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    spec, res = folder/'task.json', folder/'result.json'
    source = data/'log' if (data/'log').is_dir() else data/'log.parquet'
    spec.write_text(json.dumps(dict(input=str(source), out=str(folder), files=[str(f) for f in [*outputs(made), *([] if ids else facts_of(made))]], merged=keys['merge_output'], ids=ids)))
    facts = watch([sys.executable, HERE/'peers'/'polars_table.py', spec, res], folder)
    aside = json.loads(res.read_text()) # what it took to load the finished windows
    return dict({k: facts[k] - v for k, v in aside.items()}, peak_mb=facts['peak_mb'])


def rounds(a, pys, n, task):
    "All runs of one task at one size: {name: [result per round]}"
    kind, keys, _ = TASKS[task]
    data = a.work/'data'/f'table-{kind}-{n}'
    make(data, n, kind)
    res = {who: [] for who in [*pys, LIMIT, *([IDS] if task == 'distinct' else [])]}
    for i in range(a.repeats):
        for who, (cmd, env) in pys.items():
            folder = a.work/'out'/f'table-{task}-{who}'
            r = one_run(who, cmd, env, folder, data, keys)
            res[who].append(r)
            print(f"{n:>10,} {task:9} round {i+1}  {who:12} {r['wall_s']:.1f} s, {r['cpu_s']:.1f} s CPU, {r['peak_mb']:.0f} MB, {r['windows']} windows", flush=True)
        res[LIMIT].append(limit(a, a.work/'out'/f'table-{task}-{LIMIT}', data, folder, keys))
        print(f"{n:>10,} {task:9} round {i+1}  {LIMIT:12} {res[LIMIT][-1]['wall_s']:.1f} s", flush=True)
        if IDS in res: res[IDS].append(limit(a, a.work/'out'/f'table-{task}-{LIMIT}', data, folder, keys, ids=True))
    counts = {who: rs[0]['windows'] for who, rs in res.items() if who in pys}
    if len(set(map(tuple, counts.values()))) > 1: print(f'NOT THE SAME WINDOWS: {counts}')
    for who in [*pys, LIMIT]: shutil.rmtree(a.work/'out'/f'table-{task}-{who}', ignore_errors=True)
    return res


def figures(runs, names):
    "The table of one task and size"
    rows = []
    for who, rs in runs.items():
        m, (lo, hi) = medians([{k: v for k, v in r.items() if k != 'windows'} for r in rs]), spread(rs, 'wall_s')
        cells = [f"{m['largest_mb']:,.0f}", f"{m['processes']:.0f}", f"{m['out_mb']:,.0f}", f"{m['files']:.0f}", f"{sum(rs[0]['windows']):,}"] if 'files' in m else ['']*5
        rows.append([f'{who} {names[who]}', f"{m['wall_s']:.2f} ({lo:.2f}-{hi:.2f})", f"{m['cpu_s']:.2f}", f"{m['peak_mb']:,.0f}", *cells])
    for who in runs:
        if who == OURS or OURS not in runs: continue
        rows.append([f'ours / {who}', *(f'**{ratio(runs, who, k):.2f}**' for k in ('wall_s', 'cpu_s')), f"**{ratio(runs, who, 'peak_mb'):.2f}**" if who == PEER else '', *['']*5])
    return table(['', 'wall s', 'CPU s', 'memory MB', 'largest process MB', 'processes', 'MB on disk', 'files', 'windows'], rows)


AIMS = [ # (against, figure, tasks or None, aim, is it met)
    (PEER, 'wall_s', LARGE, 'at least 8 times faster than sequifier', lambda r: r <= 1/8),
    (PEER, 'peak_mb', LARGE, "at most a third of sequifier's memory", lambda r: r <= 1/3),
    (LIMIT, 'wall_s', None, 'at most 2.5 times the time of polars', lambda r: r <= 2.5),
    (IDS, 'wall_s', None, 'at most 2.5 times the time of polars that makes the vocabulary, too', lambda r: r <= 2.5)]


def aims(allruns):
    "What we set out to reach, and what was reached"
    rows = [[f'{n:,} rows, {task}', aim, f'{ratio(runs, who, key):.2f}', 'yes' if ok(ratio(runs, who, key)) else 'no']
            for (n, task), runs in allruns.items() for who, key, only, aim, ok in AIMS if who in runs and OURS in runs and (only is None or task in only)]
    return table(['run', 'aim', 'ours / theirs', 'reached'], rows) if rows else ''


NOTES = """Windows of 65 items every 64, three splits (80, 10 and 10 % of each sequence), three categorical and two real columns, sequences of 20 to
180 rows, rows in order of time. Every figure is of a whole command, started afresh, with two cores: wall and CPU seconds from its start to its end
(imports of compiled modules and workers included), *memory* the peak of the resident sizes of all its processes added up (pages that they share counted in each).
*polars* is no window maker: it reads the same rows, sorts them by sequence and position, and writes the same windows that are already made
(for PT, the same bytes) and the metadata beside them, with its maps of values to ids, as bytes; that is the least that such a job can do. Loading
what is written so is left out of its time, but not of its memory. *polars, with ids* makes the maps instead of copying them: distinct texts sorted, an id
for each row, and JSON four times, as the job has to.
"""


def report(a, allruns, names, note):
    "The markdown of all tables"
    out = [f'# Tables: rows to windows\n\nMade by `benchmarks/table.py` on {date.today()}; {machine()}; {a.repeats} rounds, medians (lowest and highest in brackets).{note}\n', NOTES, aims(allruns)]
    for (n, task), runs in allruns.items(): out.append(f'## {n:,} rows: {TASKS[task][2]}\n\n{figures(runs, names)}')
    return '\n'.join(out)


def main():
    a = args()
    pys, allruns, note = commands(a), {}, busy()
    if not pys: raise SystemExit('nothing to run')
    print(note)
    for i, n in enumerate(a.rows):
        for task in a.tasks or (TASKS if i == 0 else LARGE): allruns[n, task] = rounds(a, pys, n, task)
    (a.work/'table.json').write_text(json.dumps([dict(rows=n, task=t, runs=r) for (n, t), r in allruns.items()]))
    text = report(a, allruns, versions(pys), note)
    a.results.write_text(text)
    print('\n' + text)


if __name__ == '__main__': main()
