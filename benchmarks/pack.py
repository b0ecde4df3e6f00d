"""Plans of packing by best fit, decreasing: fastseqprep against plain Python, one row at a time, in two ways.

    python benchmarks/pack.py              # 100,000 and 1,000,000 rows, bins of 2048 and 8192
    python benchmarks/pack.py --quick      # one round, 100,000 rows

Lengths only; no token is read. All make the same plan, bin by bin and row by row, which is checked. The plain ways differ in
how they find the room of the tightest bin: in a sorted list, with `bisect`, or in a tree over all rooms; the bins that have it
are a heap. Lengths are drawn with a fixed seed: short rows with a long tail, as chats have, and even ones.
"""
import argparse, json, subprocess, sys, time
from bisect import bisect_left, insort
from datetime import date
from heapq import heappop, heappush
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from events import busy, machine, table


def longest_first(lengths): return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def put(bins, i, b):
    if b == len(bins): bins.append([])
    bins[b].append(i)


def with_bisect(lengths, cap):
    "A sorted list of the rooms that bins have, and a heap of bins for each"
    rooms, at, bins = [], {}, []
    for i in longest_first(lengths):
        n = min(lengths[i], cap)
        k = bisect_left(rooms, n)
        if k < len(rooms):
            room = rooms[k]
            b = heappop(at[room])
            if not at[room]: del at[room], rooms[k]
        else: room, b = cap, len(bins)
        put(bins, i, b)
        room -= n
        if not room: continue
        if room not in at:
            at[room] = []
            insort(rooms, room)
        heappush(at[room], b)
    return bins


def with_tree(lengths, cap):
    "A heap of bins for each room, and a tree over rooms: each node knows the largest room below it that is to be had"
    size = 1 << (cap-1).bit_length()
    tree, at, bins = [0]*(2*size), [[] for _ in range(size)], []     # room r is leaf size+r; no bin ever waits with room `cap`

    def note(room, value):
        k = room+size
        tree[k] = value
        while k := k >> 1: tree[k] = tree[2*k+1] or tree[2*k]

    for i in longest_first(lengths):
        n = min(lengths[i], cap)
        if tree[1] >= n:
            k = 1
            while k < size: k = 2*k if tree[2*k] >= n else 2*k+1
            room = k-size
            b = heappop(at[room])
            if not at[room]: note(room, 0)
        else: room, b = cap, len(bins)
        put(bins, i, b)
        room -= n
        if room and not at[room]: note(room, room)
        if room: heappush(at[room], b)
    return bins


def fastseqprep(lengths, cap):
    from fastseqprep.pack import best_fit_decreasing
    return best_fit_decreasing(lengths, cap)


WAYS = dict(fastseqprep=fastseqprep, bisect=with_bisect, tree=with_tree)


def draw(kind, n, cap):
    rng = np.random.default_rng(n+cap)
    return np.clip(rng.lognormal(5.5, 1, n), 1, cap).astype(np.int64) if kind == 'long tail' else rng.integers(1, cap+1, n)


def one(task):
    "Time and memory of one plan, in this process; and a digest of it"
    import hashlib, resource
    lengths = draw(task['kind'], task['n'], task['cap'])
    total = int(lengths.sum())
    given = lengths if task['way'] == 'fastseqprep' else lengths.tolist()
    f = WAYS[task['way']]
    f(given[:1000], task['cap'])
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    plan = f(given, task['cap'])
    seconds = time.perf_counter()-begin
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss-before)/1024
    if task['way'] == 'fastseqprep': values, sizes = plan.values, plan.lengths
    else: values, sizes = np.concatenate([np.array(o) for o in plan]), np.array([len(o) for o in plan])
    digest = hashlib.sha256(values.astype('<i8').tobytes()+sizes.astype('<i8').tobytes()).hexdigest()
    return dict(seconds=seconds, added_mb=added, bins=len(sizes), fill=total/(len(sizes)*task['cap']), digest=digest)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--rows', type=int, nargs='+', default=[100_000, 1_000_000], help='how many lengths')
    p.add_argument('--caps', type=int, nargs='+', default=[2048, 8192], help='tokens that a bin holds')
    p.add_argument('--repeats', type=int, default=3, help='rounds in which each way has its turn')
    p.add_argument('--quick', action='store_true', help='one round of 100,000 rows')
    p.add_argument('--results', type=Path, default=Path(__file__).parent/'RESULTS-pack.md', help='markdown file to write, but by --quick')
    p.add_argument('--one', help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.one: return print(json.dumps(one(json.loads(a.one))))
    if a.quick: a.rows, a.repeats = [100_000], 1
    note = busy()
    rows, worst = [], 0
    for kind in ('long tail', 'even'):
        for n in a.rows:
            for cap in a.caps:
                runs = {w: [] for w in WAYS}
                for _ in range(a.repeats):
                    for w in WAYS:
                        task = json.dumps(dict(way=w, kind=kind, n=n, cap=cap))
                        runs[w].append(json.loads(subprocess.run([sys.executable, __file__, '--one', task], capture_output=True, text=True, check=True).stdout))
                if len({r['digest'] for rs in runs.values() for r in rs}) > 1: raise SystemExit(f'the plans of {kind}, {n:,} rows, bins of {cap} differ')
                s = {w: median(r['seconds'] for r in rs) for w, rs in runs.items()}
                mb = {w: median(r['added_mb'] for r in rs) for w, rs in runs.items()}
                ours, best = runs['fastseqprep'][0], min((w for w in WAYS if w != 'fastseqprep'), key=s.get)
                rows.append([f'{kind}, {n:,} rows, bins of {cap:,}', f"{ours['bins']:,}", f"{ours['fill']:.2%}", *(f'{s[w]:.2f}' for w in WAYS), f"**{s[best]/s['fastseqprep']:.0f}**",
                             f"{mb['fastseqprep']:.0f}", f'{mb[best]:.0f}'])
                print(*rows[-1], sep=' | ', flush=True)
                if n == 1_000_000: worst = max(worst, s['fastseqprep'])
    text = f'# Packing\n\nMade by `benchmarks/pack.py` on {date.today()}; {machine()}; {a.repeats} rounds, medians.{note} Each run is a fresh process; all ways make the same plan.\n\n' + \
        table(['lengths', 'bins', 'fill', *(f'{w} s' for w in WAYS), 'best plain / ours', 'ours, added MB', 'best plain, added MB'], rows)
    if worst: text += f'\nOne million lengths within a second: {worst:.2f} s at most, {"yes" if worst <= 1 else "no"}.\n'
    if not a.quick: a.results.write_text(text)
    print('\n'+text)


if __name__ == '__main__': main()
