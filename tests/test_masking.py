"Masks are exact at the corners, right on average, and a function of seed, epoch and record alone."
import hashlib, json, random
from pathlib import Path

import numpy as np, pytest, torch

from fastseqprep.hashing import stable_hash
from fastseqprep.masking import Masker, mask_batch

CASE = Path(__file__).parent/'cases'/'events'/'24_mask'/'expected-0.0.1'
RATES = dict(p_tok=0, p_event=0, p_key=0, p_unk=0)


def recorded():
    b, = json.loads((CASE/'batches.json').read_text())
    return {k: v if k == 'uids' else torch.tensor(v['data'], dtype=getattr(torch, v['dtype'])).reshape(v['shape']) for k, v in b.items()}


def ragged_batch(seed, n_records=12):
    "Records of 0 to 30 events of 1 to 9 tokens; key 9 holds text of several pieces. Also (record → its own batch)"
    rng = np.random.default_rng(seed)
    recs = []
    for uid in range(n_records):
        events = []
        for _ in range(rng.integers(0, 31)):
            toks = [(k, rng.integers(3, 99), 0) for k in (5, 6, 7, 8) if rng.random() < .7]
            toks += [(9, rng.integers(99, 999), p) for p in range(rng.integers(1, 6))]
            events.append(np.array(toks))
        recs.append((uid, events))
    return recs


def pack(recs):
    events = [e for _, evs in recs for e in evs]
    return dict(event_tokens=np.concatenate([np.zeros((0, 3), int), *events]), event_offsets=np.cumsum([0, *map(len, events)]),
                history_offsets=np.cumsum([0, *(len(evs)+1 for _, evs in recs)]), uids=[uid for uid, _ in recs])


def by_record(m):
    ends = m['event_offsets'][m['history_offsets'] - np.arange(len(m['history_offsets']))]
    return {u: (m['event_tokens'][s:t].tolist(), m['event_labels'][s:t].tolist()) for u, s, t in zip(m['uids'], ends, ends[1:])}


@pytest.mark.parametrize('i', range(5))
def test_corners_are_as_recorded(i):
    want = json.loads((CASE/'masks.json').read_text())[i]
    b = recorded()
    before = b['event_tokens'].clone()
    got = mask_batch(b, None, unk_targets=True, **want['args'])                # the rule that was recorded
    for k in 'event_tokens', 'event_labels', 'mlm_mask':
        assert got[k].tolist() == want[k]['data'] and str(got[k].dtype) == f"torch.{want[k]['dtype']}"
    assert bool((b['event_tokens'] == before).all()) and set(got) == set(b) | {'event_labels', 'mlm_mask'}
    assert all(got[k] is b[k] for k in b if k != 'event_tokens')


OPTIONS = [dict(), dict(whole_value=True), dict(exact_share=.25), dict(exact_share=.25, whole_value=True), dict(unk_targets=True), dict(whole_value=True, unk_targets=True), dict(p_tok=.5, p_unk=.5)]


@pytest.mark.parametrize('kw', OPTIONS, ids=str)
def test_a_record_is_masked_alike_in_any_company(kw):
    recs = ragged_batch(1)
    whole = by_record(mask_batch(pack(recs), None, **kw))
    rng = random.Random(2)
    for _ in range(20):
        some = rng.sample(recs, rng.randint(1, len(recs)))
        assert by_record(mask_batch(pack(some), None, **kw)).items() <= whole.items()


@pytest.mark.parametrize('kw', OPTIONS, ids=str)
def test_what_a_mask_may_change(kw):
    for seed in range(5):
        b = pack(ragged_batch(seed))
        m = mask_batch(b, None, seed=seed, **kw)
        old, new, labels = b['event_tokens'], m['event_tokens'], m['event_labels']
        changed, asked = old[:, 1] != new[:, 1], m['mlm_mask']
        assert (old[:, ::2] == new[:, ::2]).all()
        assert set(new[changed, 1]) <= {1, 2} and (new[asked, 1] == 1).all() and (new[changed & ~asked, 1] == 2).all()
        assert (labels[asked] == old[asked, 1]).all() and (labels[~asked] == -100).all()
        assert (changed == (asked | (new[:, 1] == 2))).all()


def test_draws_are_whole_where_they_should_be():
    b = pack(ragged_batch(3, 200))
    event = np.repeat(np.arange(len(b['event_offsets'])-1), np.diff(b['event_offsets']))
    user = np.repeat(np.arange(200), np.diff(b['history_offsets'])-1)[event]
    value = np.cumsum(b['event_tokens'][:, 2] == 0)
    pair = user*10 + b['event_tokens'][:, 0]

    def hidden(**kw): return mask_batch(b, None, **{**RATES, **kw})['mlm_mask']
    def rate(groups, hit):
        n, k = np.bincount(groups), np.bincount(groups, hit)
        assert ((k == 0) | (k == n))[n > 0].all(), 'a group is hidden in part'
        return (k > 0)[n > 0].mean()
    assert rate(event, hidden(p_event=.1)) == pytest.approx(.1, abs=.015)
    assert rate(pair, hidden(p_key=.1)) == pytest.approx(.1, abs=.03)
    assert rate(value, hidden(p_tok=.15, whole_value=True)) == pytest.approx(.15, abs=.015)
    assert hidden(p_tok=.15).mean() == pytest.approx(.15, abs=.01)
    assert (hidden(p_tok=.15) | hidden(p_event=.1) | hidden(p_key=.1)).tolist() == hidden(p_tok=.15, p_event=.1, p_key=.1).tolist()


def many(n_records=300, n_events=10, n_keys=20):
    toks = np.stack([np.tile(np.arange(5, 5+n_keys), n_records*n_events), np.full(n_records*n_events*n_keys, 50), np.zeros(n_records*n_events*n_keys, int)], 1)
    return dict(event_tokens=toks, event_offsets=np.arange(n_records*n_events+1)*n_keys, history_offsets=np.arange(n_records+1)*(n_events+1), uids=list(range(n_records)))


def test_the_share_of_targets():
    b, full = many(), 1-.85*.9*.9
    masks = [mask_batch(b, None, epoch=e) for e in range(4)]
    assert np.mean([m['mlm_mask'].mean() for m in masks]) == pytest.approx(.95*full, abs=.006)
    assert np.mean([(m['event_tokens'][:, 1] != 50).mean() for m in masks]) == pytest.approx(full, abs=.006)
    plain = mask_batch(b, None, p_tok=.3, p_event=0, p_key=0, p_unk=.2)
    assert plain['mlm_mask'].mean() == pytest.approx(.24, abs=.01) and (plain['event_tokens'][:, 1] == 2).mean() == pytest.approx(.06, abs=.006)


def test_epochs_and_seeds_are_unrelated():
    b = many(100)
    masks = np.array([mask_batch(b, None, p_event=0, p_key=0, seed=s, epoch=e)['mlm_mask'] for s in range(3) for e in range(3)], float)
    assert abs(np.corrcoef(masks) - np.eye(9)).max() < .05


@pytest.mark.parametrize('share', [.1, .3, 1.])
def test_an_exact_share(share):
    b = pack(ragged_batch(4, 60))
    counts = np.array([len(t) for t, _ in by_record({**b, 'event_labels': b['event_tokens'][:, 1]}).values()])
    n = np.array([np.sum(np.array(l) != -100) for _, l in by_record(mask_batch(b, None, exact_share=share, p_unk=0)).values()])
    assert (abs(n - share*counts) < 1).all()
    if share == 1: return
    lost = np.array([np.sum(np.array(l) != -100) for _, l in by_record(mask_batch(b, None, exact_share=share, p_unk=.3)).values()])
    assert (lost <= n).all() and ((lost == n).all() or (n - lost).sum() <= 3)


def test_a_share_that_labels_cannot_reach_is_refused():
    for kw, words in [(dict(exact_share=.96), 'p_unk=0.04 or exact_share=0.95'), (dict(exact_share=1), 'p_unk=0 or'), (dict(exact_share=.5, p_unk=.51), 'exact_share=0.49'), (dict(exact_share=.1, p_unk=1), 'exact_share=0.1 ')]:
        with pytest.raises(ValueError, match=words): Masker(**kw)
        with pytest.raises(ValueError, match=words): mask_batch(many(1), None, **kw)
    for kw in dict(exact_share=.95), dict(exact_share=1, p_unk=0), dict(exact_share=.7, p_unk=.3), dict(exact_share=.1, p_unk=.9): Masker(**kw)


def test_unknown_values_are_targets_only_if_asked():
    b = many(50)
    b['event_tokens'][::3, 1] = 2
    assert (mask_batch(b, None, unk_targets=True)['event_labels'] == 2).any()
    m = mask_batch(b, None)                                            # not unless told
    assert not (m['event_labels'] == 2).any() and (m['event_tokens'][::3, 1] == 2).all()

    class tok: val_vocab = {'[PAD]': 0, '[MASK]': 1, '[UNK]': 2, '[NULL]': 3}
    b['event_tokens'][1::3, 1] = 3
    for kw in {}, dict(exact_share=.2), dict(whole_value=True):
        m = mask_batch(b, tok, **kw)
        assert set(m['event_labels']) == {-100, 50} and (m['event_tokens'][::3, 1] == 2).all() and (m['event_tokens'][1::3, 1] == 3).all()
    assert set(mask_batch(b, tok, unk_targets=True)['event_labels']) == {-100, 2, 3, 50}


@pytest.mark.parametrize('kw', [dict(), dict(exact_share=.3), dict(p_tok=1., p_unk=0), dict(p_unk=.5)], ids=str)
def test_a_value_with_an_unknown_piece_is_not_hidden_in_part(kw):
    b = pack(ragged_batch(5, 100))
    toks = b['event_tokens']
    rng = np.random.default_rng(0)
    toks[rng.random(len(toks)) < .1, 1] = 2
    value = np.cumsum(toks[:, 2] == 0)
    m = mask_batch(b, None, whole_value=True, **kw)
    hidden, unknown = m['mlm_mask'] | (m['event_tokens'][:, 1] != toks[:, 1]), toks[:, 1] == 2
    n, k = np.bincount(value), np.bincount(value, hidden)
    assert ((k == 0) | (k == n)).all() and k.any()
    assert not k[np.bincount(value, unknown) > 0].any()
    one = dict(event_tokens=np.array([[9, 10, 0], [9, 2, 1], [9, 11, 2], [9, 12, 3]]), event_offsets=np.array([0, 4]), history_offsets=np.array([0, 2]), uids=['u'])
    assert not mask_batch(one, None, whole_value=True, **kw)['mlm_mask'].any()


def test_records_are_known_by_their_ids():
    b = many(20)
    for uids in ([f'user {i}' for i in range(20)], list(range(20)), [2**63 + i for i in range(20)]):
        b['uids'] = uids
        got = mask_batch(b, None)
        assert (got['event_labels'] == mask_batch(b, None, record_hash=stable_hash(uids))['event_labels']).all()
    assert (got['event_labels'] != mask_batch(dict(b, uids=[f'{i}' for i in range(20)]), None)['event_labels']).any()


@pytest.mark.parametrize('field', ['mlm_mask', 'event_labels'])
def test_a_masked_batch_is_not_masked_again(field):
    m = mask_batch(recorded(), None)
    with pytest.raises(ValueError, match='masked already'): mask_batch(m, None)
    with pytest.raises(ValueError, match=field): mask_batch(dict(recorded(), **{field: m[field]}), None)


def test_no_global_generator_is_touched():
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    mask_batch(recorded(), None)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_masks_never_change_from_release_to_release():
    "A stored experiment can be repeated: these are the masks of version 1"
    m = mask_batch(many(40), None, seed=3, epoch=2)
    assert hashlib.sha256(m['event_labels'].astype('<i8').tobytes()).hexdigest()[:16] == '98b569a961c8a751'


def test_wrong_shares_are_refused():
    for bad in dict(p_tok=-.1), dict(p_event=1.1), dict(p_unk=float('nan')), dict(exact_share=0), dict(exact_share=2):
        with pytest.raises(ValueError, match=next(iter(bad))): mask_batch(many(1), None, **bad)
    for seed in -1, 2**64, 1.5:
        with pytest.raises(ValueError, match='seed'): Masker(seed=seed)


def test_shares_are_numbers():
    for kw, words in [(dict(exact_share=True), 'exact_share=True'), (dict(exact_share='1'), "exact_share='1'"), (dict(p_tok=True, p_unk='x'), "p_tok=True, p_unk='x'"), (dict(p_key=None), 'p_key=None'),
                      (dict(exact_share=float('nan')), 'exact_share=nan')]:
        with pytest.raises(ValueError, match=words): Masker(**kw)
    Masker(p_tok=1, p_key=np.float32(.5), exact_share=np.float64(.2))
