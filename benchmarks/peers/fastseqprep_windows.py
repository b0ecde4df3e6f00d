"""Our loader over stored windows: opening, then epochs of shuffled batches. Used by windows.py."""
import json, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _windows import epochs, rss_mb

task = json.loads(Path(sys.argv[1]).read_text())
import torch
torch.set_num_threads(1)
from fastseqprep.window_loader import window_dl

if task['mmap'] and task['format'] == 'parquet': # the cache is made beforehand
    import subprocess
    subprocess.run([sys.executable, '-c', f"from fastseqprep.window_data import StoredWindows; StoredWindows({task['path']!r})"], check=True)
before, start = rss_mb(), time.perf_counter()
dl = window_dl(task['path'], task['batch_size'], task.get('shuffle', True), context_length=task['context'], inputs=task['inputs'], targets=task['targets'], mmap=task['mmap'], seed=1)
opened = time.perf_counter()-start


def batches(epoch):
    dl.set_epoch(epoch)
    return iter(dl)


res = epochs(batches, lambda b: b['inputs/'+task['inputs'][0]], task)
Path(sys.argv[2]).write_text(json.dumps(dict(res, open_s=opened, grown_mb=res.pop('peak_mb')-before)))
