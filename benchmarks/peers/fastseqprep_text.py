"""The text job on documents or chats, from JSON lines to shards. Run by `_probe.main`; `fast` says which encoder, `pack` how long bins are.
`export` writes shards as Megatron's files and as Parquet instead, with what is in them, for others to read."""
import json, shutil
from importlib.metadata import version
from pathlib import Path

from _probe import Probe, main
from _text import Own, files

KINDS = dict(docs=dict(input=dict(sections=[dict(field='text', action='train')]), append_eos=True),
             chats=dict(input=dict(sections=[dict(field='messages', action='$role', template=True)]), mask=dict(assistant='train')))


def write(task):
    from fastseqprep.text_pipeline import TextPipeline
    shutil.rmtree(task['out'], ignore_errors=True)
    packing = dict(packing_strategy='bfd', max_packed_len=task['pack']) if task.get('pack') else {}
    cfg = dict(KINDS[task['kind']], preprocessing={**dict(max_seq_len=task.get('pack') or 1_000_000, max_packed_len=1_000_000, min_chars=0), **packing}, output=dict(position_ids_mode='none'))
    with Own() as own, Probe() as p: res = TextPipeline(cfg, files(task['data']), task['out'], task['tokenizer'], n_workers=task['workers'], fast=task['fast'], progress=False).run()
    more = dict(bins=res.facts['packing']['bins'], fill=res.tokens/(res.facts['packing']['bins']*task['pack'])) if packing else {}
    return dict(p.facts, own_mb=own.added_mb, tokens=res.tokens, records=sum(s['records'] for s in res.shards), encoder=res.facts['tokenizer']['encoder'], version=version('fastseqprep'), **more)


def load(task):
    "Export, and a digest of what was exported"
    import hashlib
    import numpy as np
    from fastseqprep.text_export import export_megatron, export_parquet
    from fastseqprep.token_store import TokenStore
    folder = Path(task['exports'])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with Probe() as p:
        export_megatron(task['out'], folder/'megatron')
        export_parquet(task['out'], folder/'rows.parquet')
    store = TokenStore(task['out'])
    key = store.keys[0]
    rows = store.rows(key, np.arange(store.n_records))
    return dict(p.facts, rows=len(rows), tokens=len(rows.values), digest=hashlib.sha256(rows.values.astype('<i8').tobytes()+rows.lengths.astype('<i8').tobytes()).hexdigest(), key=key)


if __name__ == '__main__': main(write, load)
