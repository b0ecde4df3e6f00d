"""Encoders beside each other: the same texts from memory by the one that the task names, and a digest of the ids. See `_probe.main`."""
import hashlib, json
from importlib.metadata import version
from pathlib import Path

import numpy as np
from _probe import Probe, main
from _text import records


def encoder(name, folder):
    "A function of texts that gives ids as one array, and how many each text has"
    path = str(folder/'tokenizer.json')
    if name == 'fastokens':
        from fastokens import Tokenizer
        t = Tokenizer.from_json_str(Path(path).read_text())
        def encode(texts):
            ids, ends = t.encode_batch_flat(texts, False)
            return np.frombuffer(ids, np.uint32), np.diff(np.frombuffer(ends, np.uint64).astype(np.int64))
        return encode
    if name == 'gigatoken':
        from gigatoken import Tokenizer
        t = Tokenizer(path)
        def encode(texts):
            rows = t.encode_batch(texts).layout
            ends = np.asarray(rows.offsets.data)
            return np.asarray(rows.content.data)[ends[0]:ends[-1]].astype(np.uint32, copy=False), np.diff(ends)
        return encode
    from tokenizers import Tokenizer
    t = Tokenizer.from_file(path)
    if name == 'tiktoken':
        import tiktoken
        state = json.loads(Path(path).read_text())
        table = byte_table()
        ranks = {bytes(table[c] for c in k): i for k, i in t.get_vocab(with_added_tokens=False).items()}
        pattern = next(p['pattern']['Regex'] for p in state['pre_tokenizer']['pretokenizers'] if p['type'] == 'Split')
        enc = tiktoken.Encoding('x', pat_str=pattern, mergeable_ranks=ranks, special_tokens={o['content']: o['id'] for o in state['added_tokens']})
        def batch(texts): return enc.encode_ordinary_batch(texts, num_threads=2)
    else:
        def batch(texts): return [o.ids for o in t.encode_batch_fast(texts, add_special_tokens=False)]
    def encode(texts):
        rows = batch(texts)
        return np.concatenate([np.asarray(r, np.uint32) for r in rows]), np.array([len(r) for r in rows])
    return encode


def byte_table():
    "The byte of each character of a byte-level vocabulary: printable ones stand for themselves, the others follow from 256 on"
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in own]
    return {**{chr(b): b for b in own}, **{chr(256+i): b for i, b in enumerate(rest)}}


def write(task):
    texts, digest, n = [r['text'] for r in records(task['data'])], hashlib.sha256(), 0
    encode = encoder(task['encoder'], Path(task['tokenizer']))
    encode(texts[:10])
    with Probe() as p:
        for i in range(0, len(texts), 1000):
            ids, lengths = encode(texts[i:i+1000])
            digest.update(ids.tobytes()+lengths.astype('<i8').tobytes())
            n += len(ids)
    return dict(p.facts, tokens=n, records=len(texts), digest=digest.hexdigest(), version=version(task['encoder']))


if __name__ == '__main__': main(write, None)
