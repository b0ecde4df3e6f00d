"""Packed batches: fastseqprep, its peers, and what numpy alone can do; planning of 100 million records; memory of workers.

    python benchmarks/loader.py                        # everything; makes the data and an environment per peer
    python benchmarks/loader.py --quick                # a few minutes: one round, short runs, small plans
    python benchmarks/loader.py --no-peers             # fastseqprep and the limits
    python benchmarks/loader.py --parts plan memory    # only these
    python benchmarks/loader.py --peer-python P --stream-python Q   # environments that hold the peers already

Needs the package with its torch extra. Sets and shards are those of `events.py`, in the same work folder, and are made if they
are not there. All loaders of a task take turns (A B C A B C ...), each run a fresh process; every figure is a median with
lowest and highest, every ratio the median of the rounds' ratios. litdata, mosaicml-streaming and grain read the same records in
formats of their own; writing those is not timed.
"""
import argparse, json, sys, tempfile
from datetime import date
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from _measure import medians, run, spread, venv
from events import LIMITS, PEERS, busy, machine, ratio, table

OURS, LIMIT = 'fastseqprep', 'numpy'
STREAMS = dict(litdata='litdata==0.2.76', mosaic='mosaicml-streaming==0.13.0', grain='grain==0.2.18')
ALSO = ['torch', 'filelock<3.20']       # mosaicml-streaming takes its locks along into workers, which newer ones refuse
TASKS = {  # name → masked?, workers, who takes part
    'packed, one process': (False, 0, [OURS, LIMIT, *STREAMS]),
    'packed, 2 workers': (False, 2, [OURS, *STREAMS]),
    'masked, one process': (True, 0, [OURS, LIMIT, *PEERS]),
    'masked, 2 workers': (True, 2, [OURS, 'fastpragma'])}


def args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--parts', nargs='+', default=['load','plan','memory'], choices=['load','plan','memory'], help='what to measure')
    p.add_argument('--sets', nargs='+', default=['movielens','bank'], choices=['movielens','bank'], help='data sets')
    p.add_argument('--repeats', type=int, default=5, help='rounds in which each loader has its turn')
    p.add_argument('--seconds', type=float, default=3, help='a loader runs whole epochs for at least so long, after one to warm up')
    p.add_argument('--records', type=int, default=100_000_000, help='records to plan')
    p.add_argument('--memory-records', type=int, default=1_000_000, help='records that the workers of the memory curve read')
    p.add_argument('--quick', action='store_true', help='one round of short runs, a million records to plan, 100,000 for memory')
    p.add_argument('--no-peers', action='store_true', help='fastseqprep and numpy only')
    p.add_argument('--slow-peers', type=int, default=1, help='rounds of fastpragma, which takes minutes for one')
    p.add_argument('--peer-python', help='a Python that has fastpragma and pragmatiq')
    p.add_argument('--stream-python', help='a Python that has litdata, mosaicml-streaming and grain')
    p.add_argument('--work', type=Path, default=Path(tempfile.gettempdir())/'fastseqprep-benchmarks', help='folder for data, environments and outputs')
    p.add_argument('--results', type=Path, default=Path(__file__).parent/'RESULTS-loader.md', help='markdown file to write')
    a = p.parse_args()
    if a.quick: a.repeats, a.seconds, a.records, a.memory_records = 1, .5, min(a.records, 1_000_000), min(a.memory_records, 100_000)
    return a


def pythons(a):
    "Which Python runs which loader"
    res = {OURS: sys.executable, LIMIT: sys.executable}
    if a.no_peers: return res
    res |= {k: a.peer_python or venv(a.work/'env'/k, v) for k, v in PEERS.items()}
    return res | dict.fromkeys(STREAMS, a.stream_python or venv(a.work/'env'/'streams', *STREAMS.values(), *ALSO))


def prepared(a, pys, name, data):
    "Write what each loader reads, if it is not there: {loader: its task's paths}"
    out = {w: a.work/'out'/f'{name}-{w}' for w in pys}
    records = a.work/'out'/f'{name}-records'
    for w in (OURS, *PEERS):
        if w in pys and not any(out[w].rglob('*.parquet')): run(pys[w], f'{w}_events.py', dict(LIMITS, mode='write', data=str(data), out=str(out[w])))
    task = dict(LIMITS, mode='write', data=str(data), records=str(records))
    if not (records/'uid.npy').exists(): run(pys[OURS], f'{OURS}_loader.py', dict(task, out=str(out[OURS])))
    for w in STREAMS:
        if w in pys and not (out[w]/'complete').exists():
            run(pys[w], f'{w}_loader.py', dict(task, out=str(out[w])))
            (out[w]/'complete').touch()
    return {w: dict(LIMITS, mode='load', data=str(data), out=str(out[w]), records=str(records), seconds=a.seconds) for w in pys}


def rounds(a, pys, name, data):
    "All runs on one set: {task: {loader: [result per round]}}; a loader that fails is left out, and says why"
    tasks, failed = prepared(a, pys, name, data), {}
    res = {t: {w: [] for w in who if w in pys} for t, (_, _, who) in TASKS.items()}
    for t, (masked, workers, _) in TASKS.items():
        for i in range(a.repeats):
            for who in list(res[t]):
                if who == 'fastpragma' and i >= a.slow_peers: continue
                try: r = run(pys[who], f'{who}_loader.py', dict(tasks[who], mask=masked, workers=workers), timeout=900)
                except Exception as e:
                    failed[f'{who}, {t}'] = str(e).strip().splitlines()[-1][:200]
                    print(f'{name:10} {t:20} round {i+1}  {who:12} FAILED: {failed[f"{who}, {t}"]}', flush=True)
                    del res[t][who]
                    continue
                res[t][who].append(r)
                print(f"{name:10} {t:20} round {i+1}  {who:12} {r['tokens_per_s']/1e6:8.2f} M tokens/s", flush=True)
    return res, failed


def load_table(runs, title):
    "One line a loader, with ours against it"
    rows = []
    for who, rs in runs.items():
        m, (lo, hi) = medians(rs), spread(rs, 'tokens_per_s')
        rows.append([f"{who} {m['version']}", f"{m['tokens_per_s']/1e6:.2f} ({lo/1e6:.2f}-{hi/1e6:.2f})", f"{m['records_per_s']:,.0f}", f"{m['first_s']:.2f}", f"{m['batches']:.0f}",
            f"{m['added_mb']:,.0f}", '' if who == OURS or OURS not in runs else f"**{ratio(runs, who, 'tokens_per_s'):.2f}**"])
    return table([title,'M tokens/s','records/s','first epoch s','batches','added MB','ours / it'], rows)


def more_workers(runs):
    "How much faster two workers are than none, for each loader"
    rows = []
    for what in 'packed', 'masked':
        one, two = runs[f'{what}, one process'], runs[f'{what}, 2 workers']
        for who in two:
            if one.get(who) and two[who]: rows.append([f'{who}, {what}', f"{median(y['tokens_per_s']/x['tokens_per_s'] for x, y in zip(one[who], two[who])):.2f}"])
    return table(['2 workers / one process','tokens/s'], rows)


AIMS = [  # (task, figure, aim, is it reached)
    ('packed, one process', lambda r: ratio(r, LIMIT, 'tokens_per_s'), 'packed at half the bare gather or more', lambda x: x >= 1/2),
    ('masked, one process', lambda r: ratio(r, LIMIT, 'tokens_per_s'), 'masked at two thirds of the bare masked gather or more', lambda x: x >= 2/3),
    ('masked, one process', lambda r: medians(r[OURS])['tokens_per_s']/1e6, 'masked at 10 million tokens/s or more', lambda x: x >= 10)]


def aims(allruns):
    "What we set out to reach, and what was reached"
    rows = []
    for name, runs in allruns.items():
        for t, figure, aim, ok in AIMS:
            if runs[t].get(OURS) and runs[t].get(LIMIT): rows.append([name, aim, f'{figure(runs[t]):.2f}', 'yes' if ok(figure(runs[t])) else 'no'])
        for what in 'packed', 'masked':
            one, two = (runs[f'{what}, {k}'].get(OURS) for k in ('one process','2 workers'))
            if one and two:
                r = median(y['tokens_per_s']/x['tokens_per_s'] for x, y in zip(one, two))
                rows.append([name, f'{what} with 2 workers no slower than with none', f'{r:.2f}', 'yes' if r >= 1 else 'no'])
        if ours := runs['packed, one process'].get(OURS):
            m = medians(ours)
            rows.append([name, f"batches filled to 0.995 or more (without looking ahead: {m['fill_greedy']:.4f})", f"{m['fill']:.4f}", 'yes' if m['fill'] >= .995 else 'no'])
    return table(['set','aim','reached','yes or no'], rows)


def alone(a, script, mode='load', **task):
    "A task that needs no data set"
    none = a.work/'out'/'none'
    none.mkdir(parents=True, exist_ok=True)
    (none/'sources.json').write_text('{}')
    return run(sys.executable, script, dict(task, mode=mode, data=str(none)))


def plan_part(a):
    "Plans of very many records, by full permutation and by hash"
    rows = []
    for shuffle in 'hash', True:
        r = alone(a, 'fastseqprep_plan.py', out=str(a.work/'out'/f'lengths-{a.records}'), n=a.records, shuffle=shuffle, max_tokens=LIMITS['max_tokens'])
        rows.append([f"{r['n']:,} records, shuffle={shuffle!r}", f"{r['wall_s']:.1f}", f"{r['added_mb']:,.0f}", f"{r['file_mb']:,.0f}", f"{r['own_mb']:,.0f}", f"{r['batches']:,}", f"{r['fill']:.4f}", f"{r['batch_us']:.0f}"])
        print(rows[-1], flush=True)
    return '## Planning\n\n' + table(['plan','wall s','added MB at most','of which the file of lengths, mapped','own MB at the end','batches','fill','µs a batch'], rows) + \
        '\nLengths lie in a file that is mapped; its pages count as resident as long as the system leaves them there, and it can take them back at any time.\n'


def memory_part(a):
    "The curve of the workers' memory"
    task = dict(out=str(a.work/'out'/f'memory-{a.memory_records}'), n=a.memory_records, workers=4, epochs=3)
    alone(a, 'fastseqprep_memory.py', 'write', **task)
    r = alone(a, 'fastseqprep_memory.py', **task)
    most = max(p['resident'] for p in r['points'])
    rows = [[p['epoch'], f"{p['done']:.0%}", f"{p['resident']:.0f}", '█'*round(40*p['resident']/most), f"{p['own']:.0f}", f"{p['here']:.0f}"] for p in r['points']]
    for row in rows: print(*row, flush=True)
    first, last = ([max(p[k] for p in r['points'] if p['epoch'] == e) for k in ('resident','own')] for e in (0, 2))
    return f"## Memory of workers\n\n{r['n']:,} records, {r['workers']} workers, 3 epochs, packed and masked, workers staying alive ({r['wall_s']:.0f} s). Largest resident size of all workers together " \
        f"in epoch 0: {first[0]:.0f} MB, of which {first[1]:.0f} MB are a worker's alone; in epoch 2: {last[0]:.0f} MB and {last[1]:.0f} MB. The rest is shared: pages of the store that workers have touched, " \
        "shared memory that batches travel in, and what a forked worker shares with its parent.\n\n" + table(['epoch','done','workers\' resident MB','','their own MB','resident MB here'], rows)


NOTES = """All loaders give shuffled batches of up to 12,000 tokens, with all fields of an event record as int64 and float32 tensors (numpy: as arrays). *numpy* is the
limit: the same records in memory, slices of it side by side, with the plainest masks; it resumes nothing, and checks nothing. litdata and mosaicml-streaming give single records, which
are put side by side in the iterable that is handed to torch's `DataLoader`; grain packs by itself, into bins of fixed size. Tokens are real ones, padding left out. The
first epoch (opening, starting workers, warming up) is shown apart; the rate is that of the epochs after it. Workers stay alive between epochs where the loader can do that.
*Added* memory is that of the main process.
"""


def main():
    a = args()
    note = busy()
    print(note)
    out = [f'# Packed batches\n\nMade by `benchmarks/loader.py` on {date.today()}; {machine()}; {a.repeats} rounds, medians (lowest and highest in brackets).{note}\n', NOTES]
    if 'load' in a.parts:
        import _data
        pys, allruns = pythons(a), {}
        text = []
        for name in a.sets:
            data = getattr(_data, name)(a.work/'data'/name)
            d = json.loads((data/'sources.json').read_text())
            allruns[name], failed = rounds(a, pys, name, data)
            text.append(f"## {d['name']}\n\n{d['n_entities']:,} entities, {d['n_events']:,} events; {d['origin']}.\n")
            text += [load_table(r, t) for t, r in allruns[name].items()] + [more_workers(allruns[name])]
            if failed: text.append('\n'.join(f'- {k} failed: {v}' for k, v in failed.items()) + '\n')
        (a.work/'loader.json').write_text(json.dumps(allruns))
        out += [aims(allruns), *text]
    if 'plan' in a.parts: out.append(plan_part(a))
    if 'memory' in a.parts: out.append(memory_part(a))
    text = '\n'.join(out)
    a.results.write_text(text)
    print('\n' + text)


if __name__ == '__main__': main()
