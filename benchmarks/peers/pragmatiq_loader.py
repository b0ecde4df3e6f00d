"""pragmatiq 1.1.0's loader on its own shards, in one process: it has no workers. Run by its own Python, see `_probe.main`."""
from _probe import main
from pragmatiq_events import load

if __name__ == '__main__': main(None, load)
