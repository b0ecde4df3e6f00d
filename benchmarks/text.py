"""Documents and chats to token shards: fastseqprep beside Hugging Face datasets, TRL, datatrove, and bare tokenizers.

    python benchmarks/text.py                      # everything; makes the texts, and an environment for each peer
    python benchmarks/text.py --quick              # a few minutes: one round, 1,500 chats and 3,000 documents
    python benchmarks/text.py --no-peers           # fastseqprep and the limit
    python benchmarks/text.py --parts speed pack   # only these
    python benchmarks/text.py --peers FOLDER       # of environments that are there already: hf, trl, datatrove, megatron, encoders

Needs the package with its extra `fast`, and some 8 GB of disk for 500,000 documents. Each run is a fresh process, from JSON lines to files that can be trained from; all
take turns (A B C A B C ...), every figure is a median, every ratio the median of the rounds' ratios. Plans of packing have a benchmark of their own, `pack.py`.
"""
import argparse, json, shutil, sys, tempfile
from datetime import date
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from _measure import medians, run, spread, venv
from _text_data import chats, documents, tokenizer
from events import busy, machine, ratio, table

PEERS = dict(hf=['datasets==5.2.0', 'transformers==5.24.0', 'jinja2'], trl=['trl==1.16.0', 'datasets==5.2.0', 'jinja2'], datatrove=['datatrove[io,processing]==0.10.1', 'tokenizers'], megatron=['megatron-core', 'datasets==5.2.0'], encoders=['gigatoken==0.10.0', 'tiktoken==0.14.0', 'fastokens==0.3.5', 'tokenizers', 'numpy'])
LIMIT, PLAIN, FAST = 'encode_batch_fast alone', 'fastseqprep, plain', 'fastseqprep, fast'
MAP, MASKS = 'datasets.map + tokenizers', 'datasets.map + transformers, masks'
WAYS = {  # name: (environment, script, task)
    LIMIT: ('own', 'tokenizers', {}),
    PLAIN: ('own', 'fastseqprep', dict(fast=False, workers=0)),
    FAST: ('own', 'fastseqprep', dict(fast=True, workers=0)),
    'fastseqprep, fast, 2 workers': ('own', 'fastseqprep', dict(fast=True, workers=2)),
    MAP: ('hf', 'datasets', dict(workers=0, masks=False)),
    f'{MAP}, num_proc=2': ('hf', 'datasets', dict(workers=2, masks=False)),
    MASKS: ('hf', 'datasets', dict(workers=0, masks=True)),
    f'{MASKS}, num_proc=2': ('hf', 'datasets', dict(workers=2, masks=True)),
    'datatrove, one worker': ('datatrove', 'datatrove', dict(workers=1)),
    'datatrove, 2 workers': ('datatrove', 'datatrove', dict(workers=2))}
TAKING_PART = dict(docs=[w for w in WAYS if not w.startswith(MASKS)], chats=[w for w in WAYS if 'datatrove' not in w])


def args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--parts', nargs='+', default=['speed','pack','memory','export','encoders'], choices=['speed','pack','memory','export','encoders'], help='what to measure')
    p.add_argument('--documents', type=int, default=50_000)
    p.add_argument('--chats', type=int, default=20_000)
    p.add_argument('--memory-documents', type=int, nargs='+', default=[50_000, 500_000], help='documents of the memory table')
    p.add_argument('--bin', type=int, default=2048, help='tokens in a packed bin')
    p.add_argument('--repeats', type=int, default=3, help='rounds in which each has its turn')
    p.add_argument('--quick', action='store_true', help='one round, 1,500 chats, 3,000 documents, 3,000 and 12,000 for memory')
    p.add_argument('--no-peers', action='store_true', help='fastseqprep and the limit only')
    p.add_argument('--peers', type=Path, help='a folder of environments, instead of making them')
    p.add_argument('--work', type=Path, default=Path(tempfile.gettempdir())/'fastseqprep-benchmarks', help='folder for data, environments and outputs')
    p.add_argument('--results', type=Path, default=Path(__file__).parent/'RESULTS-text.md', help='markdown file to write')
    a = p.parse_args()
    if a.quick: a.repeats, a.chats, a.documents, a.memory_documents = 1, 1_500, 3_000, [3_000, 12_000]
    return a


def pythons(a):
    "The Python of each environment"
    if a.no_peers: return dict(own=sys.executable)
    return dict(own=sys.executable, **{k: a.peers/k/'bin'/'python' if a.peers else venv(a.work/'env'/k, *v) for k, v in PEERS.items()})


def data(a, kind, n):
    "Texts of a kind, made if they are not there"
    folder = (documents if kind == 'docs' else chats)(a.work/'data'/f'text-{kind}-{n}', n)
    (folder/'sources.json').write_text('{}')
    return folder


def one(a, pys, way, kind, n, mode='write', **more):
    "One run; its output stays for who reads it"
    env, script, task = WAYS[way]
    name = way.replace(' ', '').replace(',', '-')
    return run(pys[env], f'{script}_text.py', dict(task, mode=mode, kind=kind, data=str(data(a, kind, n)), tokenizer=str(tokenizer(a.work/'data'/'text-tokenizer')), out=str(a.work/'text-out'/f'text-{name}'), **more))


def rounds(a, pys, kind, n, ways, **more):
    "All runs on texts of a kind: {way: [result per round]}; one that fails is left out, and says why"
    res, failed = {w: [] for w in ways if WAYS[w][0] in pys}, {}
    for i in range(a.repeats):
        for w in list(res):
            try: r = one(a, pys, w, kind, n, **more)
            except Exception as e:
                failed[w] = str(e).strip().splitlines()[-1][:200]
                del res[w]
                print(f'{kind:6} round {i+1}  {w:40} FAILED: {failed[w]}', flush=True)
                continue
            r['tokens_per_s'] = r['tokens']/r['wall_s']
            res[w].append(r)
            print(f"{kind:6} round {i+1}  {w:40} {r['wall_s']:7.2f} s {r['tokens_per_s']/1e6:8.2f} M tokens/s", flush=True)
    return res, failed


def agreed(runs, records):
    "Refuse to compare what is not the same work: tokens differ by no more than the end token of each document"
    counts = {w: rs[0]['tokens'] for w, rs in runs.items() if rs}
    if counts and max(counts.values())-min(counts.values()) > records: raise SystemExit(f'token counts differ: {counts}')


def speed_table(runs, title):
    rows = []
    for w, rs in runs.items():
        m, (lo, hi) = medians(rs), spread(rs, 'tokens_per_s')
        against = [ratio(runs, w, 'tokens_per_s', than=o) if o in runs and runs[o] and o != w else None for o in (FAST, PLAIN)]
        rows.append([f"{w} ({m['version']})", f"{m['wall_s']:.2f}", f"{m['cpu_s']:.1f}", f"{m['tokens_per_s']/1e6:.2f} ({lo/1e6:.2f}-{hi/1e6:.2f})", *('' if x is None else f'{x:.2f}' for x in against)])
    return table([title, 's', 'CPU s', 'M tokens/s', 'fast / it', 'plain / it'], rows)


def speed_part(a, pys):
    out, reached = '', []
    for kind, n, title, base, aim in (('docs', a.documents, 'documents', MAP, 15), ('chats', a.chats, 'chats', MASKS, 10)):
        runs, failed = rounds(a, pys, kind, n, TAKING_PART[kind])
        runs = {w: rs for w, rs in runs.items() if rs}
        agreed(runs, n)
        tokens = medians(runs[LIMIT])['tokens'] if LIMIT in runs else 0
        out += f'\n## {title.capitalize()}\n\n{n:,} {title}, {tokens:,.0f} tokens.\n\n' + speed_table(runs, title) + ''.join(f'\n{w} failed: {why}\n' for w, why in failed.items())
        if LIMIT in runs and PLAIN in runs: reached.append([title, 'plain tokenizers at 85% of bare encode_batch_fast or more', x := ratio(runs, LIMIT, 'tokens_per_s', than=PLAIN), x >= .85])
        if base in runs and FAST in runs: reached.append([title, f'fast at {aim} times {base} or more', x := ratio(runs, base, 'tokens_per_s', than=FAST), x >= aim])
        if kind == 'chats' and MAP in runs and FAST in runs: reached.append([title, f'fast, with masks, at {aim} times {MAP} without masks or more', x := ratio(runs, MAP, 'tokens_per_s', than=FAST), x >= aim])
    return out, reached


def pack_part(a, pys):
    "Documents in bins, best fit first: ours in the job over all of them, TRL's after `map`, a thousand rows at a time"
    rows = []
    for name, way, env in (('fastseqprep, fast', FAST, 'own'), ('datasets.map + TRL', MAP, 'trl')):
        if env not in pys: continue
        rs = [one(a, {**pys, WAYS[way][0]: pys[env]}, way, 'docs', a.documents, pack=a.bin) for _ in range(a.repeats)]
        m = medians(rs)
        rows.append([f"{name} ({m.get('packer', m['version'])})", f"{m['wall_s']:.2f}", f"{m['pack_s']:.2f}" if 'pack_s' in m else '', f"{m['bins']:,.0f}", f"{m['fill']:.2%}"])
        print(*rows[-1], sep=' | ', flush=True)
    return f'\n## Packed\n\n{a.documents:,} documents, cut to {a.bin:,} tokens and packed into bins of as many by best fit, longest first.\n\n' + table(['packed', 's', 'of this packing s', 'bins', 'fill'], rows), []


def memory_part(a, pys):
    "Memory as the input grows"
    rows, own = [], {}
    for way in (FAST, PLAIN, MAP):
        if WAYS[way][0] not in pys or way == PLAIN and not a.quick: continue      # the plain one takes minutes for half a million, and differs in the encoder alone
        for n in a.memory_documents:
            if way == MAP and n != a.memory_documents[0]: continue
            r = one(a, pys, way, 'docs', n)
            rows.append([f'{way}, {n:,} documents', f"{r['tokens']:,}", f"{r['wall_s']:.1f}", f"{r['added_mb']:,.0f}", f"{r['own_mb']:,.0f}" if 'own_mb' in r else ''])
            if way == FAST: own[n] = r['own_mb']
            print(*rows[-1], sep=' | ', flush=True)
            shutil.rmtree(a.work/'text-out', ignore_errors=True)
    lo, hi = own[a.memory_documents[0]], own[a.memory_documents[-1]]
    note = '\nAdded is what the process grew by, pages of mapped files included, which the system takes back when it needs them; own is without those.\n'
    return '\n## Memory\n\n' + table(['memory', 'tokens', 's', 'added MB', 'own MB'], rows) + note, [['documents', f'own memory at {a.memory_documents[-1]:,} documents at most a quarter more than at {a.memory_documents[0]:,}', hi/lo, hi <= 1.25*lo]]


def export_part(a, pys):
    "Shards as Megatron's files and as Parquet, read back by others"
    n = min(a.documents, 5000)
    one(a, pys, FAST, 'docs', n)
    exports = str(a.work/'text-out'/'text-exports')
    ours, rows, reached = one(a, pys, FAST, 'docs', n, mode='load', exports=exports), [], []
    for env, script, who in (('megatron', 'megatron', "megatron-core's IndexedDataset"), ('hf', 'datasets', 'Hugging Face datasets')):
        if env not in pys: continue
        r = run(pys[env], f'{script}_text.py', dict(mode='load', data=str(data(a, 'docs', n)), exports=exports, key=ours['key']))
        same = r['digest'] == ours['digest'] and r['rows'] == ours['rows']
        rows.append([f"{who} ({r['version']})", f"{r['rows']:,}", 'all equal' if same else 'different'])
        reached.append(['documents', f'an export is read back the same by {who}', float(same), same])
    print(rows, flush=True)
    return f"\n## Exports\n\n{ours['rows']:,} documents, {ours['tokens']:,} tokens.\n\n" + table(['read back by', 'rows', 'rows and ids'], rows), reached


def encoders_part(a, pys):
    "Which encoder is the quickest of those that give the ids of `tokenizers`"
    if 'encoders' not in pys: return '', []
    n, names = min(a.documents, 10_000), ('tokenizers', 'fastokens', 'gigatoken', 'tiktoken')
    runs = {k: [] for k in names}
    for _ in range(a.repeats):
        for k in names: runs[k].append(run(pys['encoders'], 'encoders_text.py', dict(mode='write', encoder=k, data=str(data(a, 'docs', n)), tokenizer=str(tokenizer(a.work/'data'/'text-tokenizer')))))
    want, rows = runs['tokenizers'][0]['digest'], []
    for k, rs in runs.items():
        m = medians([{x: v for x, v in r.items() if x != 'digest'} for r in rs])
        rows.append([f"{k} ({rs[0]['version']})", f"{m['wall_s']:.2f}", f"{m['cpu_s']:.1f}", f"{m['tokens']/m['wall_s']/1e6:.1f}", 'yes' if all(r['digest'] == want for r in rs) else 'no'])
        print(*rows[-1], sep=' | ', flush=True)
    return f"\n## Encoders\n\nIds of {n:,} documents from memory, a thousand at a time, as arrays; tokenizers opened before.\n\n" + table(['encoder', 's', 'CPU s', 'M tokens/s', 'ids of tokenizers'], rows), []


NOTES = """Texts are runs of lines out of the standard library and pydoc's topics, and conversations about them (`_text_data.py`, seeded); the tokenizer is a byte-level BPE of 32,000
tokens that cuts words as Llama 3 does. *encode_batch_fast alone* gets texts that are in memory, chats rendered before, and throws its results away; all others read JSON lines and write files. Ours
and datatrove write an end token after each document, and so does the function that `map` calls. Ours writes ids, offsets and, for chats, masks; opening the tokenizer, comparing the encoders and hashing what is written count.
Seconds are without imports. Everyone gets the whole machine: tokenizers uses all cores by itself, and *fast* is one process with two threads. Four tenths of a second of *fast* go into opening
and comparing the encoders, whatever the size of the input; workers are processes that start anew, import, and open the tokenizer each for itself, and that counts.
"""


def main():
    a, note, parts, reached = args(), busy(), '', []
    pys = pythons(a)
    tokenizer(a.work/'data'/'text-tokenizer')
    for part in a.parts:
        text, found = dict(speed=speed_part, pack=pack_part, memory=memory_part, export=export_part, encoders=encoders_part)[part](a, pys)
        parts, reached = parts+text, reached+found
    shutil.rmtree(a.work/'text-out', ignore_errors=True)
    aims = table(['texts', 'aim', 'reached', 'yes or no'], [[t, what, f'{x:.2f}', 'yes' if ok else 'no'] for t, what, x, ok in reached])
    text = f'# Text: documents and chats to token shards\n\nMade by `benchmarks/text.py` on {date.today()}; {machine()}; {a.repeats} rounds, medians (lowest and highest in brackets).{note}\n\n{NOTES}\n{aims}{parts}'
    if not a.quick: a.results.write_text(text)
    print('\n'+text)


if __name__ == '__main__': main()
