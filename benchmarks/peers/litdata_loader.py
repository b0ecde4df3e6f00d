"""litdata on the records of a set: write its chunks, or load and pack them. Run by its own Python, see `_probe.main`."""
import os, shutil
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault('DATA_OPTIMIZER_CACHE_FOLDER', '/tmp/litdata-cache')
from _probe import Probe, main, stream
from _records import Records, n_records, n_tokens, packed, tensors, torch_loader
from torch.utils.data import IterableDataset


def write(task):
    from litdata.streaming.cache import Cache
    shutil.rmtree(task['out'], ignore_errors=True)
    Path(task['out']).mkdir(parents=True)
    with Probe() as p:
        r, cache = Records(task['records']), Cache(task['out'], chunk_bytes='4MB')
        for i in range(len(r)): cache[i] = r[i]
        cache.done()
        cache.merge()
    return dict(p.facts, version=version('litdata'))


class Packed(IterableDataset):
    def __init__(self, ds, max_tokens): self.ds, self.max_tokens = ds, max_tokens
    def __iter__(self): return map(tensors, packed(self.ds, self.max_tokens))


def load(task):
    from litdata import StreamingDataset
    with Probe() as p:
        dl = torch_loader(Packed(StreamingDataset(task['out'], shuffle=True, seed=0), task['max_tokens']), task['workers'])
        res = stream(lambda: dl, n_tokens, n_records, task['seconds'])
    return dict(p.facts, **res, version=version('litdata'))


if __name__ == '__main__': main(write, load)
