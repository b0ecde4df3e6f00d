"""Loading stored windows, and making windows of items with several rows: fastseqprep beside sequifier.

    python benchmarks/windows.py --quick                # 50,000 rows, one round, to see that all works
    python benchmarks/windows.py                        # 500,000 rows, three rounds
    python benchmarks/windows.py --peer-python PATH     # an environment that already holds sequifier
    python benchmarks/windows.py --no-peer              # ours alone

The windows (65 wide, five features) are cut once. Each run is a fresh process with one thread that opens a split and goes through
shuffled epochs, one to warm up; the fastest counts. A token is an input slot of a sample. They take turns; every figure is a
median, every ratio the median of the rounds' ratios of tokens per second of processor time, which a busy machine changes little. Memory is
what the process grew by from before opening to the peak, and what of it is its own (`anon`):
pages of mapped files are the system's, which takes them back when it needs them.

The second table is of whole `preprocess` commands on items with children (a depth layout), and of ours alone as the rows grow. A command
of sequifier's that is not done after `--limit` seconds is stopped, so at that size there is only a lower bound: it takes more than the
limit. The ratio is therefore also measured at the sizes of `--sizes`, up to the largest one that it finishes within the limit.
"""
import argparse, json, os, shutil, sys, tempfile, time
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _measure import medians, run, venv
from _table_data import make
from _tree import watch
from events import machine, ratio, table

OURS, PEER = 'fastseqprep', 'sequifier'
FEATURES = ['item', 'code', 'action', 'amount', 'level']
RUNS = { # name: (who, format, how the peer opens it or whether ours maps it, what it is compared with)
    'sequifier, one Parquet file, eager': (PEER, 'parquet', 'file'),
    'fastseqprep, one Parquet file, eager': (OURS, 'parquet', False),
    'fastseqprep, one Parquet file, mapped': (OURS, 'parquet', True),
    'sequifier, PT shards, eager': (PEER, 'pt', 'folder'),
    'fastseqprep, PT shards, eager': (OURS, 'pt', False),
    'sequifier, PT shards, lazy': (PEER, 'pt', 'lazy'),
    'fastseqprep, PT shards, mapped': (OURS, 'pt', True),
    'fastseqprep, raw columns (bin), mapped': (OURS, 'bin', True),
}
BESIDE = {'fastseqprep, one Parquet file, eager': 'sequifier, one Parquet file, eager', 'fastseqprep, one Parquet file, mapped': 'sequifier, one Parquet file, eager',
          'fastseqprep, PT shards, eager': 'sequifier, PT shards, eager', 'fastseqprep, PT shards, mapped': 'sequifier, PT shards, lazy', 'fastseqprep, raw columns (bin), mapped': 'sequifier, PT shards, lazy'}

DEPTH = dict(project_root='.', preprocessing_data_path='input/log.parquet', read_format='parquet', write_format='pt', merge_output=False, n_cores=2, split_ratios=[.8, .2], window_length=17,
             window_stride=16, max_target_offset=1, depth_layouts=dict(parts=dict(position_column='part', columns=['tag', 'amount'], context_length=8)))
GROWING = {'default limit': {}, 'memory_limit 64 MB': dict(memory_limit='64MB')} # ways in which ours runs alone


def args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--rows', type=int, default=500_000, help='rows of the table')
    p.add_argument('--batch-size', type=int, default=256, help='samples in a batch')
    p.add_argument('--epochs', type=int, default=3, help='epochs that are timed')
    p.add_argument('--repeats', type=int, default=3, help='rounds in which each has its turn')
    p.add_argument('--parts', nargs='+', default=['load','depth'], choices=['load','depth'], help='what to measure')
    p.add_argument('--items', type=int, default=50_000, help='items with four children each')
    p.add_argument('--sizes', nargs='+', type=int, default=[2_000, 5_000, 10_000, 20_000], help='smaller numbers of items, for a ratio where --items takes sequifier too long')
    p.add_argument('--limit', type=float, default=300, help="seconds after which sequifier's command on items with children is stopped")
    p.add_argument('--children', nargs='+', type=int, default=[1_000_000, 5_000_000], help='rows of the growing tables of children')
    p.add_argument('--quick', action='store_true', help='50,000 rows and one round, 2,000 items')
    p.add_argument('--no-peer', action='store_true', help='leave sequifier out')
    p.add_argument('--peer-python', type=Path, help='a Python that has sequifier, instead of making an environment')
    p.add_argument('--work', type=Path, default=Path(tempfile.gettempdir())/'fastseqprep-benchmarks', help='folder for data, environment and outputs')
    p.add_argument('--results', type=Path, default=Path(__file__).parent/'RESULTS-windows.md', help='markdown file to write')
    a = p.parse_args()
    if a.quick: a.rows, a.repeats, a.epochs, a.items, a.sizes, a.children = 50_000, 1, 2, 2_000, [1_000], [100_000]
    a.work = a.work.resolve()
    return a


def cut(a):
    "The windows of the table in each format: {format: (path of split 0, metadata)}"
    from fastseqprep.preprocess import preprocess
    data, res = a.work/'data'/f'rows-{a.rows}', {}
    make(data, a.rows)
    for fmt in ('parquet', 'pt', 'bin'):
        root = a.work/'windows'/f'{fmt}-{a.rows}'
        split = root/'data'/('log-split0.parquet' if fmt == 'parquet' else 'log-split0')
        if not (root/'configs'/'metadata_configs'/'log.json').exists():
            root.mkdir(parents=True, exist_ok=True)
            preprocess(dict(project_root=str(root), preprocessing_data_path=str(data/'log.parquet'), read_format='parquet', write_format=fmt, merge_output=fmt == 'parquet', selected_columns=FEATURES,
                            split_ratios=[.8, .2], window_length=65, window_stride=16, max_target_offset=1), progress=False)
        res[fmt] = split, json.loads((root/'configs'/'metadata_configs'/'log.json').read_text())
    return res


def rounds(a, pythons, made):
    "The figures of all runs: {name: [one result per round]}"
    runs = {}
    for r in range(a.repeats):
        for name, (who, fmt, how) in RUNS.items():
            if who not in pythons: continue
            path, meta = made[fmt]
            few = dict(column_data_types=meta['column_data_types'], n_classes=meta['n_classes'], window_lengths=meta['window_lengths'], max_target_offset=meta['max_target_offset'])
            task = dict(mode='load', data=name, path=str(path), meta=few, format=fmt, inputs=FEATURES, targets=['item'], context=64, batch_size=a.batch_size, epochs=a.epochs)
            got = run(pythons[who], f'{who}_windows.py', dict(task, how=how, mmap=how is True))
            runs.setdefault(name, []).append(got)
            print(f"round {r+1}: {name}: {got['tokens_s']/1e6:.1f} million tokens/s, opened in {got['open_s']:.2f} s, {got['grown_mb']:.0f} MB ({got['anon_mb']:.0f} MB anon)", flush=True)
    return runs


def nested(folder, n_items, each):
    "Write items with `each` children, a hundred items in a sequence"
    import numpy as np, polars as pl
    if (folder/'log.parquet').exists(): return
    folder.mkdir(parents=True, exist_ok=True)
    rng, item = np.random.default_rng(0), np.repeat(np.arange(n_items), each)
    pl.DataFrame(dict(sequenceId=item//100, itemPosition=item%100, part=np.tile(np.arange(each), n_items), kind=item//3%7, price=item%50*.5, tag=rng.integers(0, 1000, len(item)),
                      amount=rng.normal(size=len(item)))).write_parquet(folder/'log.parquet', row_group_size=200_000)


def depth_run(a, who, cmd, n_items, each, keys):
    "Figures of one whole command; only time and CPU time so far, and `stopped`, if it was not done within the limit"
    data, folder = a.work/'data'/f'depth-{n_items}x{each}', a.work/'out'/f'depth-{who}'
    nested(data, n_items, each)
    shutil.rmtree(folder, ignore_errors=True)
    (folder/'configs').mkdir(parents=True)
    (folder/'input').mkdir()
    (folder/'input'/'log.parquet').symlink_to(data/'log.parquet')
    (folder/'configs'/'preprocess.yaml').write_text(json.dumps({**DEPTH, **keys})) # JSON is YAML
    start, cpu, env = time.perf_counter(), os.times(), dict(PATH=f'{Path(cmd[0]).parent}{os.pathsep}{os.environ["PATH"]}')
    if who == PEER: cmd = ['timeout', '-k', '5', str(a.limit), *cmd]
    try: facts = watch([*cmd, '--config-path', 'configs/preprocess.yaml'], folder, env)
    except RuntimeError:                                     # `timeout` ends its children too
        if who != PEER or time.perf_counter()-start < a.limit: raise
        print(f"{who}: {n_items*each:,} children, not done after {a.limit:g} s, stopped", flush=True)
        shutil.rmtree(folder)
        now = os.times()
        return dict(stopped=True, wall_s=a.limit, cpu_s=now.children_user+now.children_system-cpu.children_user-cpu.children_system)
    windows = sum(json.loads(f.read_text())['total_samples'] for f in (folder/'data').glob('*/metadata.json'))
    shutil.rmtree(folder)
    print(f"{who}: {n_items*each:,} children, {facts['wall_s']:.2f} s, {facts['peak_mb']:.0f} MB", flush=True)
    return dict(facts, windows=windows)


def beside(a, cmds, n):
    "Runs of the commands on `n` items: {who: [one result per round]}; the peer, which is slow, runs once"
    runs = {who: [] for who in cmds}
    for i in range(a.repeats):
        for who, cmd in cmds.items():
            if who == OURS or not i: runs[who].append(depth_run(a, who, cmd, n, 4, {}))
    return runs


def depth_rows(a, runs, n):
    "Lines of the table for the commands on `n` items"
    ours = medians(runs[OURS])
    for who, rs in runs.items():
        m = medians(rs)
        more = 'more than ' if 'stopped' in m else ''
        what = ['', f'stopped at {a.limit:g}', f"{m['cpu_s']:.2f}", ''] if more else [f"{int(m['windows']):,}", f"{m['wall_s']:.2f}", f"{m['cpu_s']:.2f}", f"{m['peak_mb']:.0f}"]
        yield who, f'{n:,}', f'{4*n:,}', *what, *([''] * 2 if who == OURS else [f'{more}{int(m[k]/ours[k])}×' for k in ('wall_s', 'cpu_s')])


def depth_part(a, pythons):
    "Commands on items with children, beside the peer and as the table grows"
    cmds = {who: [Path(p).parent/who, 'preprocess'] for who, p in pythons.items()}
    rows, done, stopped = [], '', ''
    for n in sorted({*(a.sizes if PEER in cmds else []), a.items}):
        if stopped and n != a.items: continue                # if a smaller one took too long, only the lower bound at full size is of interest
        runs = beside(a, cmds, n)
        rows += depth_rows(a, runs, n)
        if PEER not in runs: continue
        peer, ours = runs[PEER][0], medians(runs[OURS])
        if 'stopped' in peer: stopped = f" With {n:,} items {PEER} was stopped after {a.limit:g} s, so the figures there are lower bounds: it takes more than {int(peer['wall_s']/ours['wall_s'])} times our wall time, and more than {int(peer['cpu_s']/ours['cpu_s'])} times our CPU time."
        else: done = f" With {n:,} items, the most here that {PEER} finishes within {a.limit:g} s, it takes {int(peer['wall_s']/ours['wall_s'])} times our wall time and {int(peer['cpu_s']/ours['cpu_s'])} times our CPU time."
    for n in a.children:
        for how, keys in GROWING.items():
            m = depth_run(a, OURS, cmds[OURS], n//8, 8, keys)
            rows.append((f'{OURS}, {how}', f'{n//8:,}', f'{n:,}', f"{m['windows']:,}", f"{m['wall_s']:.2f}", f"{m['cpu_s']:.2f}", f"{m['peak_mb']:.0f}", '', ''))
    return '## Items with several rows\n\nThe whole command, two cores; memory is the most that was resident, pages of mapped files among it.' + \
        f'{done}{stopped}\n\n' + table(['command', 'items', 'children', 'windows', 'wall s', 'CPU s', 'peak MB', 'its wall time / ours', 'its CPU time / ours'], rows)


def load_part(a, pythons):
    "Loaders of stored windows"
    runs = rounds(a, pythons, cut(a))
    rows = []
    for name, rs in runs.items():
        m, other = medians(rs), BESIDE.get(name)
        times = '' if other not in runs else f"{ratio({name: rs, other: runs[other]}, other, 'tokens_cpu_s', name):.1f}×"
        rows.append((name, f"{int(m['samples']):,}", f"{m['tokens_s']/1e6:.1f}", f"{m['tokens_cpu_s']/1e6:.1f}", times, f"{m['open_s']:.2f}", f"{m['grown_mb']:.0f}", f"{m['anon_mb']:.0f}"))
    return f'## Loading\n\n{a.rows:,} rows, batches of {a.batch_size} samples of 64 slots, five features.\n\n' + \
        table(['loader', 'samples', 'million tokens/s', 'million tokens per CPU s', 'beside sequifier', 'opened in s', 'grown by MB', 'anon MB'], rows)


def main():
    a = args()
    pythons = {OURS: sys.executable}
    if not a.no_peer: pythons[PEER] = (a.peer_python or venv(a.work/'env'/PEER, 'sequifier==3.1.1.0')).absolute()
    text = '\n'.join(dict(load=load_part, depth=depth_part)[p](a, pythons) for p in a.parts)
    head = f'# Windows\n\n{date.today()}, {machine()}, {a.repeats} round{"s"*(a.repeats != 1)}, medians. `python benchmarks/windows.py`\n\n'
    print('\n'+head+text)
    if not a.quick: a.results.write_text(head+text)


if __name__ == '__main__': main()
