"""The same records for every loader under test: flat arrays in one folder, and the plainest packing there is.

A record is a dict: `uid`, `tokens` (n,3), `lengths` (e) tokens of each event, `time` (e), `cal` (e,3), `fixed` (p,3) the tokens
that belong to no event. The peers that read records of any kind store these in their own formats and pack them by `packed`.
"""
from pathlib import Path

import numpy as np

FLAT = 'tokens lengths time cal fixed'.split()


class Records:
    "Records in flat arrays, read into memory"
    def __init__(self, folder):
        self.uid = np.load(Path(folder)/'uid.npy')
        self.flat = {k: np.load(Path(folder)/f'{k}.npy') for k in FLAT}
        offsets = {k: np.load(Path(folder)/f'{k}_offsets.npy') for k in ('tokens','events','fixed')}
        self.offsets = {**offsets, 'lengths': offsets['events'], 'time': offsets['events'], 'cal': offsets['events']}
        self.n_toks = np.diff(offsets['tokens']) + np.diff(offsets['fixed'])

    def __len__(self): return len(self.uid)
    def __getitem__(self, i): return dict(uid=str(self.uid[i]), **{k: self.flat[k][self.offsets[k][i]:self.offsets[k][i+1]] for k in FLAT})


def save(folder, recs):
    "Write what `Records` reads, from `fastseqprep.RecordArrays`"
    folder, b = Path(folder), recs.gather(np.arange(len(recs)))
    folder.mkdir(parents=True, exist_ok=True)
    offsets = lambda n: np.concatenate([[0], np.cumsum(n)])
    events, tokens = offsets(np.diff(b['history_offsets'])-1), np.asarray(b['event_offsets'])
    fixed = [np.concatenate([b[p][i][b[f'{p}_mask'][i]] for p in ('profile','lifelong')]) for i in range(len(recs))]
    put = dict(uid=np.array([str(u) for u in b['uids']]), tokens=b['event_tokens'].astype(recs.tokens.values.dtype), lengths=np.diff(tokens).astype(np.int32), time=b['event_time'],
        cal=b['cal'], fixed=np.concatenate(fixed).astype(recs.tokens.values.dtype), tokens_offsets=tokens[events], events_offsets=events, fixed_offsets=offsets([len(f) for f in fixed]))
    for k, v in put.items(): np.save(folder/f'{k}.npy', np.asarray(v))


def packed(records, max_tokens):
    "Neighbouring records side by side, as many as the budget holds"
    held, n = [], 0
    for r in records:
        size = len(r['tokens']) + len(r['fixed'])
        if held and n+size > max_tokens:
            yield pack(held)
            held, n = [], 0
        held.append(r)
        n += size
    if held: yield pack(held)


def pack(recs):
    "Some records as one batch of arrays"
    lengths, n_events = np.concatenate([r['lengths'] for r in recs]), [len(r['lengths']) for r in recs]
    return dict(event_tokens=np.concatenate([r['tokens'] for r in recs]).astype(np.int64), event_offsets=np.concatenate([[0], np.cumsum(lengths)]),
        event_user=np.repeat(np.arange(len(recs)), n_events), event_time=np.concatenate([r['time'] for r in recs]), cal=np.concatenate([r['cal'] for r in recs]),
        fixed=np.concatenate([r['fixed'] for r in recs]).astype(np.int64), fixed_user=np.repeat(np.arange(len(recs)), [len(r['fixed']) for r in recs]), uids=[r['uid'] for r in recs])


def tensors(b):
    import torch
    return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in b.items()}


def n_tokens(b): return len(b['event_tokens']) + len(b['fixed'])
def n_records(b): return len(b['uids'])


def torch_loader(ds, workers, **kw):
    "A torch `DataLoader` that hands batches on as they are"
    from torch.utils.data import DataLoader
    return DataLoader(ds, batch_size=None, num_workers=workers, collate_fn=as_it_is, persistent_workers=workers > 0, **kw)


def as_it_is(b): return b
