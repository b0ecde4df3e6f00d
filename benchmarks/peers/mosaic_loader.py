"""mosaicml-streaming on the records of a set: write its shards, or load and pack them. Run by its own Python, see `_probe.main`."""
import shutil
from importlib.metadata import version
from pathlib import Path

from _probe import Probe, main, stream
from _records import Records, n_records, n_tokens, packed, tensors, torch_loader
from streaming import MDSWriter, StreamingDataset


def write(task):
    shutil.rmtree(task['out'], ignore_errors=True)
    with Probe() as p:
        r = Records(task['records'])
        kinds = {k: f'ndarray:{v.dtype}' for k, v in r.flat.items()}
        with MDSWriter(out=task['out'], columns=dict(uid='str', **kinds), size_limit=4 << 20) as w:
            for i in range(len(r)): w.write(r[i])
    return dict(p.facts, version=version('mosaicml-streaming'))


class Packed(StreamingDataset):
    def __init__(self, max_tokens, **kw):
        self.max_tokens = max_tokens
        super().__init__(**kw)
    def __iter__(self): return map(tensors, packed(super().__iter__(), self.max_tokens))


def load(task):
    from streaming.base.util import clean_stale_shared_memory
    clean_stale_shared_memory()
    with Probe() as p:
        dl = torch_loader(Packed(task['max_tokens'], local=task['out'], shuffle=True, shuffle_seed=0, batch_size=1), task['workers'])
        res = stream(lambda: dl, n_tokens, n_records, task['seconds'])
    return dict(p.facts, **res, version=version('mosaicml-streaming'))


if __name__ == '__main__': main(write, load)
