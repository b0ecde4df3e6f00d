"""fastseqprep, fastpragma and pragmatiq on the same events: fit and write, then load, each in a process of its own.

    python benchmarks/events.py                       # everything; makes the data and an environment per peer
    python benchmarks/events.py --sets bank --repeats 1
    python benchmarks/events.py --peer-python PATH    # an environment that already holds both peers
    python benchmarks/events.py --no-peers            # ours alone

Needs the package with its torch extra, about 2 GB of disk for data and outputs, and some more for the peers' environments.
The three take turns (A B C A B C ...); every figure is a median, every ratio the median of the rounds' ratios.
"""
import argparse, json, os, platform, shutil, sys, tempfile
from datetime import date
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from _measure import medians, run, spread, venv

OURS, PRAGMA, PRAGMATIQ = 'fastseqprep', 'fastpragma', 'pragmatiq'
PEERS = {PRAGMA: 'fastpragma==0.0.20', PRAGMATIQ: 'pragmatiq==1.1.0'}
LIMITS = dict(n_shards=16, bpe=4000, num_buckets=100, max_tokens=12_000)
TASKS = dict(write=dict(mode='write'), packed=dict(mode='load', mask=False), masked=dict(mode='load', mask=True))


def args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--sets', nargs='+', default=['movielens','bank'], choices=['movielens','bank'], help='data sets')
    p.add_argument('--tasks', nargs='+', default=list(TASKS), choices=list(TASKS), help='what to measure; loading needs an earlier write in the same work folder')
    p.add_argument('--repeats', type=int, default=3, help='rounds in which each package has its turn')
    p.add_argument('--seconds', type=float, default=3, help='a loader runs whole epochs for at least so long, after one to warm up')
    p.add_argument('--no-peers', action='store_true', help='run fastseqprep alone')
    p.add_argument('--peer-python', help='a Python that has both peers, instead of making environments')
    p.add_argument('--work', type=Path, default=Path(tempfile.gettempdir())/'fastseqprep-benchmarks', help='folder for data, environments and outputs')
    p.add_argument('--results', type=Path, default=Path(__file__).parent/'RESULTS.md', help='markdown file to write')
    return p.parse_args()


def pythons(a):
    "Which Python runs which package"
    res = {OURS: sys.executable}
    if a.no_peers: return res
    return {**res, **{k: a.peer_python or venv(a.work/'env'/k, v) for k, v in PEERS.items()}}


def rounds(a, pys, name, data):
    "All runs on one data set: {task: {package: [result per round]}}"
    res = {t: {w: [] for w in pys} for t in a.tasks}
    for t in a.tasks:
        for i in range(a.repeats):
            for who, py in pys.items():
                out = a.work/'out'/f'{name}-{who}'
                if t == 'write': shutil.rmtree(out, ignore_errors=True)
                r = run(py, f'{who}_events.py', dict(TASKS[t], data=str(data), out=str(out), seconds=a.seconds, **LIMITS))
                res[t][who].append(r)
                what = f"{r['cpu_s']:.1f} s CPU, {r['wall_s']:.1f} s, {r['added_mb']:.0f} MB added" if t == 'write' else f"{r['tokens_per_s']:,.0f} tokens/s"
                print(f'{name:10} {t:7} round {i+1}  {who:12} {what}', flush=True)
    return res


def ratio(runs, who, key, than=OURS):
    "Median over the rounds of `than`'s figure through `who`'s"
    return median(x[key]/y[key] for x, y in zip(runs[than], runs[who]))


def row(*cells): return '| ' + ' | '.join(str(c) for c in cells) + ' |'


def table(head, rows): return '\n'.join([row(*head), row(*['---'] + ['---:']*(len(head)-1)), *[row(*r) for r in rows]]) + '\n'


def write_table(runs):
    "Fit and write, one line a package, then ours against each"
    rows = []
    for who, rs in runs.items():
        m, (lo, hi) = medians(rs), spread(rs, 'cpu_s')
        rows.append([f"{who} {m['version']}", f"{m['cpu_s']:.1f} ({lo:.1f}-{hi:.1f})", f"{m['wall_s']:.1f}", f"{m['added_mb']:,.0f}", f"{m['peak_mb']:,.0f}",
            f"{m['tokens']:,.0f}", f"{m['files']:.0f}", f"{m['out_mb']:.0f}"])
    for who in runs:
        if who == OURS or OURS not in runs: continue
        rows.append([f'ours / {who}'] + [f'**{ratio(runs, who, k):.2f}**' for k in ('cpu_s','wall_s','added_mb','peak_mb')] + ['']*3)
    return table(['fit and write','CPU s','wall s','added MB','peak MB','tokens','files','MB on disk'], rows)


def load_table(runs, title):
    "Loading, one line a package, then ours against each"
    rows = []
    for who, rs in runs.items():
        m, (lo, hi) = medians(rs), spread(rs, 'tokens_per_s')
        rows.append([f"{who} {m['version']}", f"{m['tokens_per_s']/1e6:.2f} ({lo/1e6:.2f}-{hi/1e6:.2f})", f"{m['tokens_per_cpu_s']/1e6:.2f}", f"{m['records_per_s']:,.0f}",
            f"{m['first_s']:.2f}", f"{m['batches']:.0f}", f"{m['added_mb']:,.0f}"])
    for who in runs:
        if who == OURS or OURS not in runs: continue
        rows.append([f'ours / {who}'] + [f'**{ratio(runs, who, k):.1f}**' for k in ('tokens_per_s','tokens_per_cpu_s','records_per_s')] + [f'**{ratio(runs, who, "first_s"):.2f}**', '',
            f'{ratio(runs, who, "added_mb"):.2f}'])
    return table([title,'M tokens/s','M tokens per CPU s','records/s','first epoch s','batches','added MB'], rows)


AIMS = [  # (task, against, figure, data set or None, aim, is it met)
    ('write', PRAGMA, 'cpu_s', 'movielens', 'CPU seconds at most half of fastpragma\'s', lambda r: r <= 1/2),
    ('write', PRAGMA, 'cpu_s', 'bank', 'CPU seconds at most a third of fastpragma\'s', lambda r: r <= 1/3),
    ('write', PRAGMATIQ, 'added_mb', None, 'less added memory than pragmatiq', lambda r: r < 1),
    ('masked', PRAGMA, 'tokens_per_s', None, 'masked batches at 60 times fastpragma\'s tokens/s', lambda r: r >= 60),
    ('masked', PRAGMATIQ, 'tokens_per_s', None, 'masked batches at 6 times pragmatiq\'s tokens/s', lambda r: r >= 6)]


def aims(allruns):
    "What we set out to reach, and what was reached"
    rows = [[name, aim, f'{ratio(runs[task], who, key):.2f}', 'yes' if ok(ratio(runs[task], who, key)) else 'no']
            for name, runs in allruns.items() for task, who, key, only, aim, ok in AIMS
            if only in (None, name) and task in runs and who in runs[task] and OURS in runs[task]]
    return table(['set','aim','ours / theirs','reached'], rows) if rows else ''


def machine():
    "The machine in a few words"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
    try: mem = f", {os.sysconf('SC_PAGE_SIZE')*os.sysconf('SC_PHYS_PAGES')/2**30:.0f} GiB"
    except (ValueError, OSError, AttributeError): mem = ''
    return f'{cores} cores{mem}, {platform.system()} {platform.machine()}, Python {platform.python_version()}'


def busy():
    "A warning where other work runs beside the benchmark"
    load = os.getloadavg()[0] if hasattr(os, 'getloadavg') else 0
    return f' The machine was busy with other work (load {load:.1f} at the start), so the figures are rough.' if load > 1 else ''


NOTES = """Each run is a fresh process. *Added* memory is the peak resident size less the resident size right after the imports. CPU is user and
system time together, imports left out. All get 100 buckets per number, a BPE of up to 4,000 and 16 shards (pragmatiq files
users by length, so it writes a few more). pragmatiq reads one form of file only; making it is not counted. It gives each event one token more
(its source), has no sign token, and trains its BPE on at most 60,000 of the commonest texts, so that its texts fall into more pieces: look at records/s as well as
tokens/s. Tokens are real ones: event, profile and lifelong tokens as they stand in the batch, padding left out. Loading is one process, shuffled, in batches of
up to 12,000 tokens, torch having one thread; the first epoch (opening, reading, warming up) is shown apart, the rate is that of the epochs after it.
"""


def report(a, allruns, sets, note):
    "The markdown of all tables"
    out = [f'# Events: fit, write, load\n\nMade by `benchmarks/events.py` on {date.today()}; {machine()}; {a.repeats} rounds, medians (lowest and highest in brackets).{note}\n', NOTES, aims(allruns)]
    for name, runs in allruns.items():
        d = sets[name]
        out.append(f"## {d['name']}\n\n{d['n_entities']:,} entities, {d['n_events']:,} events; {d['origin']}.\n")
        for t, r in runs.items(): out.append(write_table(r) if t == 'write' else load_table(r, dict(packed='packed batches', masked='packed and masked')[t]))
    return '\n'.join(out)


def main():
    a = args()
    import _data
    pys, sets, allruns = pythons(a), {}, {}
    note = busy()
    print(note)
    for name in a.sets:
        data = getattr(_data, name)(a.work/'data'/name)
        sets[name] = json.loads((data/'sources.json').read_text())
        allruns[name] = rounds(a, pys, name, data)
    (a.work/'events.json').write_text(json.dumps(allruns))
    text = report(a, allruns, sets, note)
    a.results.write_text(text)
    print('\n' + text)


if __name__ == '__main__': main()
