"""What the runners of `text.py` share: reading texts, rendering chats, and watching the memory that is a process's own."""
import json, threading, time
from pathlib import Path

from _probe import status


def files(folder): return sorted(map(str, Path(folder).glob('part-*.jsonl')))


def records(folder):
    for f in files(folder):
        with open(f, encoding='utf-8') as lines: yield from map(json.loads, lines)


def rendered(folder, template):
    "Conversations as text, by plain Jinja"
    from jinja2 import Environment
    env = Environment(trim_blocks=True, lstrip_blocks=True)
    t = env.from_string(template.replace('{% generation %}', '').replace('{% endgeneration %}', ''))
    return [t.render(messages=r['messages']) for r in records(folder)]


class Own:
    "Largest memory of this process that is not pages of files, looked at 20 times a second: `with Own() as o: work()`, then `o.added_mb`"
    def __enter__(self):
        self.base, self.peak, self.stop = status('RssAnon') or 0, 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self):
        while not self.stop.is_set():
            self.peak = max(self.peak, status('RssAnon') or 0)
            time.sleep(.05)

    def __exit__(self, *exc):
        self.stop.set()
        self.thread.join()
        self.added_mb = max(self.peak, status('RssAnon') or 0)-self.base
