"""grain on the records of a set: write an ArrayRecord file, or load and pack it by grain's own first-fit packing. Run by its own
Python, see `_probe.main`. Its bins have a fixed size, so that a record is cut to the budget, and bins are padded."""
import pickle, shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
from _probe import Probe, main, stream
from _records import Records


def write(task):
    from array_record.python.array_record_module import ArrayRecordWriter
    shutil.rmtree(task['out'], ignore_errors=True)
    Path(task['out']).mkdir(parents=True)
    with Probe() as p:
        r, w = Records(task['records']), ArrayRecordWriter(str(Path(task['out'])/'records.array_record'), 'group_size:1')
        for i in range(len(r)): w.write(pickle.dumps(r[i]))
        w.close()
    return dict(p.facts, version=version('grain'))


class Parse:
    "A record as arrays that can be packed: tokens of all kinds, which event they are of, and the events"
    def __init__(self, max_tokens): self.max_tokens = max_tokens
    def __call__(self, data):
        r = pickle.loads(data)
        of = np.concatenate([np.full(len(r['fixed']), -1, np.int32), np.repeat(np.arange(len(r['lengths']), dtype=np.int32), r['lengths'])])
        tokens = np.concatenate([r['fixed'], r['tokens']]).astype(np.int64)
        return dict(tokens=tokens[:self.max_tokens], of=of[:self.max_tokens], time=r['time'][:self.max_tokens], cal=r['cal'][:self.max_tokens])


def load(task):
    import grain
    from grain.experimental import FirstFitPackIterDataset
    n = task['max_tokens']
    with Probe() as p:
        src = grain.sources.ArrayRecordDataSource(str(Path(task['out'])/'records.array_record'))

        def epoch():
            ds = grain.MapDataset.source(src).seed(0).shuffle().map(Parse(n)).to_iter_dataset()
            ds = FirstFitPackIterDataset(ds, length_struct=dict(tokens=n, of=n, time=n, cal=n), num_packing_bins=4)
            return iter(ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=task['workers'])) if task['workers'] else ds)
        res = stream(epoch, lambda b: int((b['tokens_segment_ids'] > 0).sum()), lambda b: int(b['tokens_segment_ids'].max()), task['seconds'])
    return dict(p.facts, **res, version=version('grain'))


if __name__ == '__main__': main(write, load)
