"""Run a command and watch it with all its children: time, processor time, memory."""
import os, subprocess, time
from pathlib import Path

STEP = .02 # seconds between looks


def family(pid):
    "The process and all below it that are alive"
    res, todo = [], [pid]
    while todo:
        p = todo.pop()
        try: tasks = os.listdir(f'/proc/{p}/task')
        except OSError: continue
        res.append(p)
        for t in tasks:
            try: todo += map(int, Path(f'/proc/{p}/task/{t}/children').read_text().split())
            except (OSError, ValueError): pass
    return res


def resident_mb(pid):
    "Resident size of a process, pages that it shares with others counted in full"
    try: return int(Path(f'/proc/{pid}/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE')/2**20
    except (OSError, IndexError, ValueError): return 0.


def watch(cmd, cwd, env=None, timeout=3600):
    "Whole-process figures of a command: wall and CPU seconds (children included), peak of the sum of resident sizes, of the largest process, and of their number"
    with open(Path(cwd)/'log.txt', 'w') as log:
        start = time.perf_counter()
        p = subprocess.Popen([str(c) for c in cmd], cwd=cwd, env={**os.environ, **(env or {})}, stdout=log, stderr=subprocess.STDOUT)
        total = largest = most = 0
        while True:
            pid, status, use = os.wait4(p.pid, os.WNOHANG)
            if pid: break
            sizes = [resident_mb(o) for o in family(p.pid)]
            total, largest, most = max(total, sum(sizes)), max([largest, *sizes]), max(most, len(sizes))
            if time.perf_counter() - start > timeout: p.kill()
            time.sleep(STEP)
        wall = time.perf_counter() - start
    p.returncode = os.waitstatus_to_exitcode(status)
    if p.returncode: raise RuntimeError(f'{" ".join(map(str, cmd))} failed ({p.returncode}):\n{(Path(cwd)/"log.txt").read_text()[-3000:]}')
    return dict(wall_s=wall, cpu_s=use.ru_utime + use.ru_stime, peak_mb=total, largest_mb=largest, processes=most)
