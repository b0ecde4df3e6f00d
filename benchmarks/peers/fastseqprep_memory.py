"""Resident size of a loader's workers over some epochs, on shards made for it. See `_probe.main`."""
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from _probe import main


def write_store(folder, n_records, n_shards=8, n_events=3, seed=0):
    "Token rows of small records: a profile token, and some events of two tokens each"
    import pyarrow as pa, pyarrow.parquet as pq
    folder = Path(folder)
    if (folder/'complete').exists(): return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng, event = np.random.default_rng(seed), np.r_[-1, np.repeat(np.arange(n_events), 2)]
    key = np.where(event < 0, 5, np.r_[5, np.tile([6, 7], n_events)])
    names = pa.array(list('abcdefgh'))
    for s, ids in enumerate(np.array_split(np.arange(n_records), n_shards)):
        n, k = len(ids), len(event)
        tile = lambda a, t: pa.array(np.tile(np.asarray(a, t), n))
        cols = dict(user_id=pa.array(np.repeat(ids, k)), key=pa.DictionaryArray.from_arrays(pa.array(np.tile(key, n).astype(np.int32)), names), key_id=tile(key, np.int64),
            val_id=pa.array(rng.integers(3, 500, n*k)), val_pos=tile(0*key, np.int64), time=tile(event*60, np.int64), logsec=tile(event.max()-event, np.float64),
            source_idx=tile(np.minimum(event, 0), np.int32), event_idx=tile(event, np.int64), **{c: tile(0*key+1, np.float32) for c in ('hour','dow','dom')})
        pq.write_table(pa.table(cols), folder/f'shard_{s}.parquet')
    (folder/'complete').touch()
    return folder


def sizes(pid):
    "MB of a process: resident, and what of it no other process shares"
    kb = {l.split(':')[0]: int(l.split()[1]) for l in open(f'/proc/{pid}/smaps_rollup').readlines()[1:]}
    return kb['Rss']/1024, (kb['Private_Clean']+kb['Private_Dirty'])/1024


def curve(folder, n_workers=4, epochs=3, points=8, max_tokens=12_000, **kw):
    "Points over the epochs: epoch, share of it done, MB resident in all workers, MB of it that are a worker's alone, MB resident here"
    import os
    from multiprocessing import active_children
    from fastseqprep.dataloader import pragma_dl
    dl = pragma_dl(folder, max_tokens=max_tokens, shuffle=True, mask=True, num_workers=n_workers, persistent_workers=True, **kw)
    out = []
    for epoch in range(epochs):
        n = len(dl)
        at = set(np.linspace(n/points, n, points).astype(int).tolist())
        it = iter(dl)
        for i, b in enumerate(it, 1):
            del b
            if i in at:
                found = [sizes(w.pid) for w in active_children()]
                out.append(dict(epoch=epoch, done=i/n, resident=sum(r for r, _ in found), own=sum(o for _, o in found), here=sizes(os.getpid())[0]))
    return out


def write(task):
    from fastseqprep.compiled import compile_records
    return dict(records=len(compile_records(write_store(task['out'], task['n']), cache_dir=str(Path(task['out'])/'compiled'))))


def load(task):
    import torch
    torch.set_num_threads(1)
    start = time.perf_counter()
    points = curve(task['out'], task['workers'], task['epochs'], cache_dir=str(Path(task['out'])/'compiled'))
    return dict(points=points, n=task['n'], workers=task['workers'], wall_s=time.perf_counter()-start, version=version('fastseqprep'))


if __name__ == '__main__': main(write, load)
