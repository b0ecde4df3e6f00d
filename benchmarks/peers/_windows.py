"""What both loaders of windows are asked to do."""
import os, time
from pathlib import Path


def rss_mb(field='VmRSS'):
    "Resident size of this process; without pages of files, which the system takes back when it needs them, for `RssAnon`"
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith(field+':'))/1024


def epochs(batches, get, task):
    "One epoch to warm up, then the fastest of some; samples, slots per second and per second of processor time, and the peak of memory"
    best, cpu, samples, peak = float('inf'), float('inf'), 0, 0
    for e in range(task['epochs']+1):
        start, work, n = time.perf_counter(), time.process_time(), 0
        for i, b in enumerate(batches(e)):
            n += len(get(b))
            if i % 16 == 0 and not e: peak = max(peak, rss_mb(), rss_mb('RssAnon'))
        if e: best, cpu = min(best, time.perf_counter()-start), min(cpu, time.process_time()-work)
        samples = n
    return dict(samples=samples, tokens_s=samples*task['context']/best, tokens_cpu_s=samples*task['context']/cpu, epoch_s=best, peak_mb=max(peak, rss_mb()), anon_mb=rss_mb('RssAnon'))
