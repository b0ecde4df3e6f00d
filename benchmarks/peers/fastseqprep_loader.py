"""fastseqprep's loader on written shards, with any number of workers; `write` hands its records to the others. See `_probe.main`."""
from importlib.metadata import version

from _probe import Probe, main, stream


def write(task):
    import _records
    from fastseqprep.compiled import compile_records
    with Probe() as p: _records.save(task['records'], compile_records(task['out'], task['sources']['entity_col']))
    return dict(p.facts, version=version('fastseqprep'))


def load(task):
    from fastseqprep.dataloader import PRAGMADataLoader
    with Probe() as p:
        dl = PRAGMADataLoader.from_path(task['out'], entity_col=task['sources']['entity_col'], max_tokens=task['max_tokens'], shuffle=True, mask=task['mask'],
            num_workers=task['workers'], persistent_workers=task['workers'] > 0)
        res = stream(lambda: dl, lambda b: len(b['event_tokens']) + int(b['profile_mask'].sum()) + int(b['lifelong_mask'].sum()), lambda b: len(b['uids']), task['seconds'])
    from fastseqprep.plan import Plan
    lengths = dl.dataset.recs.ntoks
    fill = dict(fill=Plan(lengths, task['max_tokens'], shuffle=True).fill, fill_greedy=Plan(lengths, task['max_tokens'], shuffle=True, lookahead=0).fill)
    return dict(p.facts, **res, version=version('fastseqprep'), **fill)


if __name__ == '__main__': main(write, load)
