"""Run one task in a fresh process of a given Python, and put several runs together."""
import json, os, subprocess, sys, tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent


def run(python, script, task, timeout=3600):
    "The JSON that `peers/<script>` hands back for `task`; its output is shown only if it fails. Loaders get one thread for torch"
    with tempfile.TemporaryDirectory() as tmp:
        spec, res = Path(tmp)/'task.json', Path(tmp)/'result.json'
        spec.write_text(json.dumps(task))
        done = subprocess.run([str(python), str(HERE/'peers'/script), str(spec), str(res)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=timeout, env={**os.environ, 'TOKENIZERS_PARALLELISM': 'true', **(dict(OMP_NUM_THREADS='1') if task['mode']=='load' else {})})
        if done.returncode or not res.exists():
            raise RuntimeError(f'{script} failed on {task["mode"]} of {task["data"]}:\n{done.stdout[-4000:]}')
        return json.loads(res.read_text())


def medians(runs):
    "One result from several of the same task: the median of every number, the first of everything else"
    return {k: median(r[k] for r in runs) if isinstance(v, (int, float)) else v for k, v in runs[0].items()}


def spread(runs, key):
    "Lowest and highest value of `key`"
    vals = [r[key] for r in runs]
    return min(vals), max(vals)


def venv(folder, *packages):
    "The Python of a virtual environment that holds `packages`, made if it is not there"
    folder = Path(folder)
    python = folder/('Scripts/python.exe' if os.name == 'nt' else 'bin/python')
    mark = folder/'installed.txt'
    if mark.exists() and mark.read_text().split() == list(packages): return python
    print(f'installing {" ".join(packages)} in an environment of its own', flush=True)
    subprocess.run([sys.executable, '-m', 'venv', '--clear', str(folder)], check=True)
    subprocess.run([str(python), '-m', 'pip', 'install', '-q', *packages], check=True)
    mark.write_text('\n'.join(packages))
    return python
