"""Plan an epoch of very many records: time, and memory beside the lengths, which lie in a file. See `_probe.main`."""
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from _probe import Probe, main, status


def lengths(path, n):
    "Lengths of `n` records, some long and most short, in a file of two bytes each"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size == 2*n: return
    rng = np.random.default_rng(0)
    with open(path, 'wb') as f:
        for i in range(0, n, 1 << 20): np.clip(rng.lognormal(4, 1, min(1 << 20, n-i)), 1, 6000).astype(np.uint16).tofile(f)


def load(task):
    from fastseqprep.plan import Plan
    path = Path(task['out'])
    lengths(path, task['n'])
    sizes = np.memmap(path, np.uint16, 'r')
    with Probe() as p:
        plan = Plan(sizes, task['max_tokens'], shuffle=task['shuffle'], seed=1)
        own = status('RssAnon')
        start = time.perf_counter()
        seen = sum(len(plan[k]) for k in range(0, len(plan), max(1, len(plan)//1000)))
        per_batch = (time.perf_counter()-start)/len(range(0, len(plan), max(1, len(plan)//1000)))
    return dict(p.facts, n=task['n'], batches=len(plan), fill=plan.fill, own_mb=own, batch_us=per_batch*1e6, seen=seen, file_mb=sizes.nbytes/2**20, version=version('fastseqprep'))


if __name__ == '__main__': main(None, load)
