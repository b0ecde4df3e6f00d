"""What every runner shares: read the task, watch time and memory, hand back one JSON. Standard library only."""
import json, os, resource, sys, time
from pathlib import Path


def status(field):
    "A memory line of /proc/self/status in MB, or None where there is no such file"
    try: text = Path('/proc/self/status').read_text()
    except OSError: return None
    return next((int(l.split()[1])/1024 for l in text.splitlines() if l.startswith(field+':')), None)


def peak_mb():
    "Largest resident size since the start or the last `forget_peak`"
    unit = 1 if sys.platform == 'darwin' else 1024
    return status('VmHWM') or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*unit/2**20


def rss_mb():
    "Resident size now"
    return status('VmRSS') or peak_mb()


def forget_peak():
    "Let the peak start again from the resident size of now, so that the imports' own peak does not count"
    try: Path('/proc/self/clear_refs').write_text('5')
    except OSError: pass


def cpu_s():
    "User and system seconds of this process and its finished children"
    t = os.times()
    return t.user + t.system + t.children_user + t.children_system


def settle_imports():
    "Load pandas if it is there: pyarrow would do so at its first array, and that is no work of the package under test"
    try: import pandas  # noqa: F401
    except ImportError: pass


class Probe:
    "`with Probe() as p: work()` and then `p.facts`"
    def __enter__(self):
        settle_imports()
        forget_peak()
        self.rss, self.cpu, self.wall = rss_mb(), cpu_s(), time.perf_counter()
        return self

    def __exit__(self, *exc):
        self.facts = dict(wall_s=time.perf_counter()-self.wall, cpu_s=cpu_s()-self.cpu, base_mb=self.rss, peak_mb=peak_mb())
        self.facts['added_mb'] = self.facts['peak_mb'] - self.rss


def stream(epoch, n_tokens, n_records, seconds):
    "Run `epoch()` (an iterator of batches) once to warm up, then until `seconds` are over, counting real tokens and records"
    def once():
        t0, c0, toks, recs, n = time.perf_counter(), cpu_s(), 0, 0, 0
        for b in epoch(): toks, recs, n = toks+n_tokens(b), recs+n_records(b), n+1
        return dict(wall_s=time.perf_counter()-t0, cpu_s=cpu_s()-c0, tokens=toks, records=recs, batches=n)
    first, rest, begun = once(), [], time.perf_counter()
    while not rest or time.perf_counter()-begun < seconds: rest.append(once())
    rest.sort(key=lambda o: o['wall_s'])
    mid = rest[len(rest)//2]
    return dict(first_s=first['wall_s'], epochs=len(rest), epoch_s=mid['wall_s'], tokens=mid['tokens'], records=mid['records'], batches=mid['batches'],
        tokens_per_s=mid['tokens']/mid['wall_s'], tokens_per_cpu_s=mid['tokens']/mid['cpu_s'], records_per_s=mid['records']/mid['wall_s'])


def main(write, load):
    "Run the task named on the command line and write what came of it"
    task = json.loads(Path(sys.argv[1]).read_text())
    task['sources'] = json.loads((Path(task['data'])/'sources.json').read_text())
    res = dict(write=write, load=load)[task['mode']](task)
    Path(sys.argv[2]).write_text(json.dumps(res))
