"""datatrove's DocumentTokenizer: JSON lines to files of ids, an end token after each document. See `_probe.main`."""
import shutil
from importlib.metadata import version
from pathlib import Path

from _probe import Probe, main


def write(task):
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    shutil.rmtree(task['out'], ignore_errors=True)
    steps = [JsonlReader(task['data'], glob_pattern='part-*.jsonl'),
             DocumentTokenizer(f"{task['out']}/ids", f"{task['tokenizer']}/tokenizer.json", eos_token='<|endoftext|>', shuffle_documents=False, batch_size=1000)]
    with Probe() as p: LocalPipelineExecutor(steps, tasks=4, workers=max(1, task['workers']), logging_dir=f"{task['out']}/log").run()
    size = sum(f.stat().st_size for f in Path(task['out']).rglob('*.ds'))
    return dict(p.facts, tokens=size//2, version=version('datatrove'))      # ids of two bytes: the vocabulary is smaller than 65,536


if __name__ == '__main__': main(write, None)
