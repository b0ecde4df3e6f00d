"""Hugging Face datasets: JSON lines to a data set of ids on disk by `map`. Documents go through tokenizers in batches of 1,000; chats through the
chat template of transformers, with a mask of what the assistant wrote (`masks`), or as plain Jinja and ids alone. With `pack`, rows are
packed by TRL afterwards. `load` reads back an export. See `_probe.main`."""
import json, shutil, time
from importlib.metadata import version
from pathlib import Path

from _probe import Probe, main
from _text import files


def on_documents(tokenizer):
    from tokenizers import Tokenizer
    t = Tokenizer.from_file(f'{tokenizer}/tokenizer.json')
    end = t.token_to_id('<|endoftext|>')
    return lambda batch: dict(input_ids=[[*e.ids, end] for e in t.encode_batch_fast(batch['text'], add_special_tokens=False)])


def on_chats(tokenizer, masks):
    if masks:
        from transformers import AutoTokenizer
        t = AutoTokenizer.from_pretrained(tokenizer)

        def both(batch):
            res = t.apply_chat_template(batch['messages'], return_dict=True, return_assistant_tokens_mask=True)
            return dict(input_ids=res['input_ids'], assistant_masks=res['assistant_masks'])
        return both
    from jinja2 import Environment
    from tokenizers import Tokenizer
    t = Tokenizer.from_file(f'{tokenizer}/tokenizer.json')
    source = json.loads(Path(tokenizer, 'tokenizer_config.json').read_text())['chat_template']
    render = Environment(trim_blocks=True, lstrip_blocks=True).from_string(source.replace('{% generation %}', '').replace('{% endgeneration %}', '')).render
    return lambda batch: dict(input_ids=[e.ids for e in t.encode_batch_fast([render(messages=m) for m in batch['messages']], add_special_tokens=False)])


def write(task):
    import datasets
    import pyarrow.compute as pc
    datasets.disable_progress_bars()
    shutil.rmtree(task['out'], ignore_errors=True)
    f, more = on_documents(task['tokenizer']) if task['kind'] == 'docs' else on_chats(task['tokenizer'], task['masks']), {}
    with Probe() as p:
        ds = datasets.load_dataset('json', data_files=files(task['data']), split='train', cache_dir=task['out'])
        ds = ds.map(f, batched=True, batch_size=1000, remove_columns=ds.column_names, num_proc=task['workers'] or None)
        if task.get('pack'):
            from trl import pack_dataset
            begin = time.perf_counter()
            packed = pack_dataset(ds, task['pack'], 'bfd')
            more = dict(pack_s=time.perf_counter()-begin, bins=len(packed))
    count = lambda d: sum(pc.sum(pc.list_value_length(c)).as_py() for c in d.with_format('arrow').data.column('input_ids').chunks)
    if more: more |= dict(fill=count(packed)/(more['bins']*task['pack']), packer=version('trl'))
    return dict(p.facts, tokens=count(ds), records=len(ds), version=version('datasets'), **more)


def load(task):
    "Rows of an exported Parquet file, and a digest of them"
    import datasets, hashlib
    import numpy as np
    ds = datasets.load_dataset('parquet', data_files=str(Path(task['exports'])/'rows.parquet'), split='train', cache_dir=task['exports']).with_format('numpy')
    rows = [np.asarray(r) for r in ds[task['key']]] if not hasattr(ds[task['key']], 'iter') else [np.asarray(r) for b in ds.iter(1000) for r in b[task['key']]]
    values, lengths = np.concatenate(rows), np.array([len(r) for r in rows])
    return dict(rows=len(rows), digest=hashlib.sha256(values.astype('<i8').tobytes()+lengths.astype('<i8').tobytes()).hexdigest(), version=version('datasets'))


if __name__ == '__main__': main(write, load)
