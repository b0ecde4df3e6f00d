"""fastpragma 0.0.20's loader on its own shards, with any number of workers. Run by its own Python, see `_probe.main`."""
from importlib.metadata import version
from pathlib import Path

from _probe import Probe, main, stream


def load(task):
    from fastpragma.data import Tokenizer
    from fastpragma.dataloader import pragma_dl
    shards = sorted(Path(task['out']).rglob('*.parquet'))
    tok = Tokenizer.load(str(Path(task['out'])/'tokenizer.json')) if task['mask'] else None
    with Probe() as p:
        dl = pragma_dl(shards, task['sources']['entity_col'], task['max_tokens'], True, tok, task['mask'], num_workers=task['workers'])
        res = stream(lambda: dl, lambda b: len(b['event_tokens']) + int(b['profile_mask'].sum()) + int(b['lifelong_mask'].sum()), lambda b: len(b['uids']), task['seconds'])
    return dict(p.facts, **res, version=version('fastpragma'))


if __name__ == '__main__': main(None, load)
