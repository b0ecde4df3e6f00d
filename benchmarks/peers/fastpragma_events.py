"""fastpragma 0.0.20 on a declared data set: fit and write, or load. Run by its own Python, see `_probe.main`."""
from importlib.metadata import version
from pathlib import Path

from _probe import Probe, main, stream


def write(task):
    import polars as pl
    from fastpragma.data import DataSource, PRAGMADataset
    d, data = task['sources'], Path(task['data'])

    def source(s, **kw):
        path = data/s['file']
        df = pl.scan_csv(path, **s['csv']) if 'csv' in s else pl.scan_parquet(path)
        cols = {k: s[k] for k in ('cats','conts','signed_conts','texts','lifelong','time_col','name') if k in s}
        return DataSource(df, entity_col=d['entity_col'], **cols, **kw)
    with Probe() as p:
        ds = PRAGMADataset(source(d['profile'], is_profile=True), [source(s) for s in d['events']], entity_col=d['entity_col'], out_path=task['out'])
        tok = ds.fit_tokenizer(num_buckets=task['num_buckets'], cardinality_threshold=100, bpe_vocab_size=task['bpe'])
        ds.write_kv(d['eval_time'], n_shards=task['n_shards'])
    files = list(Path(task['out']).rglob('*.parquet'))
    return dict(p.facts, version=version('fastpragma'), n_vals=tok.n_vals, tokens=pl.scan_parquet(files).select(pl.len()).collect().item(),
        files=len(files), out_mb=sum(f.stat().st_size for f in files)/2**20)


def load(task):
    from fastpragma.data import Tokenizer
    from fastpragma.dataloader import pragma_dl
    shards = sorted(Path(task['out']).rglob('*.parquet'))
    tok = Tokenizer.load(str(Path(task['out'])/'tokenizer.json')) if task['mask'] else None
    with Probe() as p:
        dl = pragma_dl(shards, task['sources']['entity_col'], task['max_tokens'], True, tok, task['mask'])
        res = stream(lambda: dl, lambda b: len(b['event_tokens']) + int(b['profile_mask'].sum()) + int(b['lifelong_mask'].sum()),
            lambda b: len(b['uids']), task['seconds'])
    return dict(p.facts, **res, version=version('fastpragma'))


if __name__ == '__main__': main(write, load)
