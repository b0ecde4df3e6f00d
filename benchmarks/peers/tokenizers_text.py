"""The limit: nothing but `encode_batch_fast` of tokenizers over the same texts, which are in memory; what comes out is dropped. See `_probe.main`."""
import json
from importlib.metadata import version
from pathlib import Path

from _probe import Probe, main
from _text import records, rendered


def write(task):
    from tokenizers import Tokenizer
    folder = Path(task['tokenizer'])
    t, n = Tokenizer.from_file(str(folder/'tokenizer.json')), 0
    if task['kind'] == 'docs': texts = [r['text'] for r in records(task['data'])]
    else: texts = rendered(task['data'], json.loads((folder/'tokenizer_config.json').read_text())['chat_template'])
    with Probe() as p:
        for i in range(0, len(texts), 1000): n += sum(map(len, t.encode_batch_fast(texts[i:i+1000], add_special_tokens=False)))
    return dict(p.facts, tokens=n, records=len(texts), version=version('tokenizers'))


if __name__ == '__main__': main(write, None)
