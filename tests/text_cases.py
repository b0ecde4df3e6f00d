"Recorded runs of the text job and of its data sets, as files to read."
import json
from pathlib import Path
import numpy as np

CASES = Path(__file__).parent/'cases/text'
def _read(name): return {o['name']:o for o in map(json.loads, (CASES/name).read_text(encoding='utf-8').splitlines())}
RUNS,DATASETS = _read('pipeline.jsonl'),_read('datasets.jsonl')

def tokenizers(root):
    "Folder with the recorded tokenizer in all its dressings"
    parts = json.loads((CASES/'tokenizers.json').read_text(encoding='utf-8'))
    for name,o in parts['dressings'].items():
        (root/name).mkdir(parents=True)
        (root/name/'tokenizer.json').write_text(json.dumps({**parts['tokenizer'], 'post_processor':o['post_processor']}))
        (root/name/'tokenizer_config.json').write_text(json.dumps(o['config']))
    return root

def write_tree(root, shards):
    "The folder that another tool has written: no manifest, offsets only where they were recorded"
    for name,o in shards.items():
        (root/name).mkdir(parents=True)
        for k,v in o['values'].items(): np.array(v).astype(o['meta'][k]['dtype']).tofile(root/name/f'{k}.bin')
        (root/name/'meta.json').write_text(json.dumps(o['meta']))
    return root

def starting(cases, number): return next(v for k,v in cases.items() if k.startswith(f'{number}-'))
def tree_of(number, root): return write_tree(root, starting(RUNS, number)['expected']['shards'])
