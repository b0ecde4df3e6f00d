"""fastseqprep on a declared data set: fit and write, or load. See `_probe.main`."""
from importlib.metadata import version
from pathlib import Path

from _probe import Probe, main, stream


def write(task):
    from fastseqprep.events import PRAGMADataset
    from fastseqprep.source import DataSource
    d, data = task['sources'], Path(task['data'])

    def source(s, **kw):
        cols = {k: s[k] for k in ('cats','conts','signed_conts','texts','lifelong','time_col','name') if k in s}
        return DataSource.from_file(data/s['file'], entity_col=d['entity_col'], **cols, **s.get('csv', {}), **kw)
    with Probe() as p:
        ds = PRAGMADataset(source(d['profile'], is_profile=True), [source(s) for s in d['events']], entity_col=d['entity_col'], out_path=task['out'])
        tok = ds.fit_tokenizer(num_buckets=task['num_buckets'], cardinality_threshold=100, bpe_vocab_size=task['bpe'])
        ds.write_kv(d['eval_time'], n_shards=task['n_shards'])
    import polars as pl
    files = sorted(Path(task['out']).glob('shard_*.parquet'))
    return dict(p.facts, version=version('fastseqprep'), n_vals=tok.n_vals, tokens=pl.scan_parquet(files).select(pl.len()).collect().item(),
        files=len(files), out_mb=sum(f.stat().st_size for f in files)/2**20)


def load(task):
    from fastseqprep.dataloader import PRAGMADataLoader
    with Probe() as p:
        dl = PRAGMADataLoader.from_path(task['out'], entity_col=task['sources']['entity_col'], max_tokens=task['max_tokens'], shuffle=True, mask=task['mask'])
        res = stream(lambda: dl, lambda b: len(b['event_tokens']) + int(b['profile_mask'].sum()) + int(b['lifelong_mask'].sum()),
            lambda b: len(b['uids']), task['seconds'])
    return dict(p.facts, **res, version=version('fastseqprep'))


if __name__ == '__main__': main(write, load)
