"""sequifier's own data sets over stored windows: opening, then epochs of shuffled batches. Used by windows.py."""
import json, sys, time
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent))
from _windows import epochs, rss_mb

task = json.loads(Path(sys.argv[1]).read_text())
import loguru, torch
loguru.logger.remove()
torch.set_num_threads(1)
from sequifier.config.depth_layout import DepthLayoutRegistryModel
from sequifier.helpers import ModelWindowView, StoredWindowLayout

meta = task['meta']
config = SimpleNamespace(
    input_columns=task['inputs'], target_columns=task['targets'], read_format=task['format'], column_data_types=meta['column_data_types'], n_classes=meta['n_classes'],
    storage_layout=StoredWindowLayout(meta['window_lengths'][0], meta['max_target_offset'], 2), window_view=ModelWindowView(task['context'], 'causal', 1), window_stride=None,
    depth_layouts=DepthLayoutRegistryModel(), device='cpu', seed=1, project_root='.', training_spec=SimpleNamespace(batch_size=task['batch_size'], num_workers=0))
if task['how'] == 'file': from sequifier.io.sequifier_dataset_from_file import SequifierDatasetFromFile as Data
elif task['how'] == 'folder': from sequifier.io.sequifier_dataset_from_folder_pt import SequifierDatasetFromFolderPt as Data
else: from sequifier.io.sequifier_dataset_from_folder_pt_lazy import SequifierDatasetFromFolderPtLazy as Data
before, start = rss_mb(), time.perf_counter()
data = Data(str(Path(task['path']).absolute()), config, True)
opened = time.perf_counter()-start


def batches(epoch):
    data.set_epoch(epoch)
    return iter(data)


res = epochs(batches, lambda b: b.inputs[task['inputs'][0]], task)
Path(sys.argv[2]).write_text(json.dumps(dict(res, open_s=opened, grown_mb=res.pop('peak_mb')-before)))
