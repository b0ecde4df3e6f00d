"""The limit: records in memory, gathered by numpy and nothing else; and the same with the plainest masks. See `_probe.main`."""
import numpy as np

from _probe import Probe, main, stream
from _records import Records


def starts(lengths, budget):
    "Where batches begin"
    out, n = [0], 0
    for i, x in enumerate(lengths.tolist()):
        if n and n+x > budget: out.append(i); n = 0
        n += x
    return [*out, len(lengths)]


def gather(r, idx):
    "The batch of some records, all of its fields: slices of the arrays, side by side"
    at = {k: list(zip(o[idx].tolist(), o[idx+1].tolist())) for k, o in r.offsets.items() if k in ('tokens','events','fixed')}
    take = lambda k, where, **kw: np.concatenate([r.flat[k][i:j] for i, j in at[where]], **kw)
    n_events, n_fixed = ([j-i for i, j in at[k]] for k in ('events','fixed'))
    offsets = np.zeros(sum(n_events)+1, np.int64)
    np.cumsum(take('lengths', 'events'), out=offsets[1:])
    users = np.arange(len(idx))
    return dict(event_tokens=take('tokens', 'tokens', dtype=np.int64), event_offsets=offsets, event_user=np.repeat(users, n_events), event_time=take('time', 'events'),
        cal=take('cal', 'events'), fixed=take('fixed', 'fixed', dtype=np.int64), fixed_user=np.repeat(users, n_fixed), uids=r.uid[idx].tolist())


def mask(b, rng, p_tok=.15, p_event=.1, p_key=.1):
    "Hide tokens, whole events, and all values of some keys"
    t = b['event_tokens']
    hide = rng.random(len(t)) < p_tok
    hide |= np.repeat(rng.random(len(b['event_offsets'])-1) < p_event, np.diff(b['event_offsets']))
    hide |= (rng.random(t[:, 0].max(initial=0)+1) < p_key)[t[:, 0]]
    b['event_labels'] = np.where(hide, t[:, 1], -100)
    b['mlm_mask'] = hide
    t[hide, 1] = 1
    return b


def load(task):
    rng = np.random.default_rng(0)
    with Probe() as p:
        r = Records(task['records'])

        def epoch():
            order = rng.permutation(len(r))
            cuts = starts(r.n_toks[order], task['max_tokens'])
            for i, j in zip(cuts, cuts[1:]):
                b = gather(r, order[i:j])
                yield mask(b, rng) if task['mask'] else b
        res = stream(epoch, lambda b: len(b['event_tokens'])+len(b['fixed']), lambda b: len(b['uids']), task['seconds'])
    return dict(p.facts, **res, version=np.__version__)


if __name__ == '__main__': main(None, load)
