"""pragmatiq 1.1.0 on a declared data set: fit and write, or load. Run by its own Python, see `_probe.main`.

It is told which columns are categories and which are numbers, gets as many buckets, as large a BPE and as many shard files
as the others, and keeps its own defaults otherwise (6,500 events, 24 tokens per event and 200 per profile are the same).
"""
from importlib.metadata import version
from pathlib import Path

from _probe import Probe, main, stream


def write(task):
    import torch  # noqa: F401  part of what it needs to run; loaded before the clock starts, as on the other sides
    import pragmatiq.api, pragmatiq.data.sharding, pragmatiq.data.tokenizer, tokenizers, lmdb  # noqa: F401
    d = task['sources']
    srcs = [d['profile']] + d['events']
    cats = [c for s in srcs for c in s.get('cats', [])]
    conts = [c for s in srcs for c in s.get('conts', [])]
    fixed = d['n_fixed_values'] + len(conts)*(task['num_buckets']+1) + 2*len(d['events']) + 5
    with Probe() as p:
        man = pragmatiq.api.tokenize(Path(task['data'])/'pragmatiq', task['out'], rows_per_shard=task.get('rows_per_shard') or -(-d['n_entities']//task['n_shards']),
            config=dict(n_buckets=task['num_buckets'], categorical_threshold=5000, target_vocab=fixed+task['bpe'], force_categorical=tuple(cats), force_numeric=tuple(conts)))
    tok = pragmatiq.data.tokenizer.PragmaTokenizer.load(Path(task['out'])/'tokenizer')
    idx = pragmatiq.data.sharding.UserIndex(task['out'])
    files = list(Path(task['out'], 'shards').glob('*.parquet'))
    return dict(p.facts, version=version('pragmatiq'), n_vals=man['vocab_size'], tokens=int(idx.n_tokens.sum() + idx.n_prof_tokens.sum()), files=len(files),
        out_mb=sum(f.stat().st_size for f in files)/2**20, kinds=tok.field_kind, bpe=tok.bpe.get_vocab_size() if tok.bpe else 0)


def load(task):
    import torch
    from pragmatiq.data.dataset import DynamicBatchSampler, ShardDataLoader, ShardDataset
    from pragmatiq.training.masking import MaskingStrategy
    gen, mask = torch.Generator().manual_seed(0), MaskingStrategy()
    with Probe() as p:
        ds = ShardDataset(task['out'])
        dl = ShardDataLoader(ds, DynamicBatchSampler(ds.index, token_budget=task['max_tokens'], seed=0, shuffle=True))

        def epoch():
            for b in dl: yield (b, mask(b, gen)) if task['mask'] else (b, None)
        res = stream(epoch, lambda o: o[0].token_budget(), lambda o: o[0].n_users, task['seconds'])
    return dict(p.facts, **res, version=version('pragmatiq'))


if __name__ == '__main__': main(write, load)
