"""The texts that `text.py` runs on, made with a seed from what ships with Python: sources, their docstrings, pydoc's topics.

`documents(folder, n)` are runs of lines of a source or topic, some 3,000 characters on average, as pages of the web have, the longest 20 times that, in four files; `chats(folder, n)` are
conversations of one to four questions, with answers out of docstrings and sources, some of them with a system message.
`tokenizer(folder)` is a byte-level BPE of 32,000 tokens, trained on the same, that cuts words as Llama 3 does, with a ChatML template that
says what the assistant wrote. All are made once and kept.
"""
import ast, json, os
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

SEED = 42
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
            "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}")
QUESTIONS = ['What does `{}` do?', 'How do I use {} in my program?', 'Show me the source of {}, please.', 'I have read about {}, but do not understand it. Can you explain?', 'Is there an example of `{}`?']


def sources():
    "Texts of the standard library's modules and of pydoc's topics"
    lib = Path(os.__file__).parent
    files = sorted(p for p in lib.rglob('*.py') if not {'site-packages', 'test', 'tests', 'idlelib', '__pycache__', 'lib2to3'} & set(p.relative_to(lib).parts) and 'pydoc_data' not in p.parts)
    texts = []
    for p in files:
        try: texts.append(p.read_text(encoding='utf-8'))
        except UnicodeDecodeError: pass
    return [t for t in texts if len(t) > 2000] + [topics[k] for k in sorted(topics)]*3


def documented(texts):
    "(name, docstring, source) of functions and classes"
    res = []
    for t in texts:
        try: tree = ast.parse(t)
        except SyntaxError: continue
        lines = t.split('\n')
        for o in ast.walk(tree):
            if isinstance(o, (ast.FunctionDef, ast.ClassDef)) and (doc := ast.get_docstring(o)) and len(doc) > 60: res.append((o.name, doc, '\n'.join(lines[o.lineno-1:o.end_lineno])[:2500]))
    return res


def documents(folder, n, parts=4):
    "A JSON line for each document, in some files"
    if (folder/'complete').exists(): return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng, files = np.random.default_rng(SEED), [t.split('\n') for t in sources()]
    p = np.array([len(f) for f in files], float)
    which = rng.choice(len(files), n, p=p/p.sum())
    length = np.clip(rng.lognormal(4, .8, n), 3, 1500).astype(int)
    start = rng.random(n)
    for part in range(parts):
        with open(folder/f'part-{part}.jsonl', 'w', encoding='utf-8') as f:
            for i in range(n*part//parts, n*(part+1)//parts):
                lines, k = files[which[i]], length[i]
                at = int(start[i]*max(1, len(lines)-k))
                f.write(json.dumps(dict(id=f'd{i}', text='\n'.join(lines[at:at+k])), ensure_ascii=False)+'\n')
    (folder/'complete').touch()
    return folder


def chats(folder, n):
    "A JSON line for each conversation"
    if (folder/'complete').exists(): return folder
    folder.mkdir(parents=True, exist_ok=True)
    rng, known = np.random.default_rng(SEED), documented(sources())
    with open(folder/'part-0.jsonl', 'w', encoding='utf-8') as f:
        for i in range(n):
            messages = [dict(role='system', content=f'You answer questions about Python. Today is day {i%366}.')] if rng.random() < .3 else []
            for j in rng.integers(len(known), size=rng.integers(1, 5)):
                name, doc, source = known[j]
                messages += [dict(role='user', content=QUESTIONS[rng.integers(len(QUESTIONS))].format(name)), dict(role='assistant', content=f'{doc}\n\n```python\n{source}\n```' if rng.random() < .6 else doc)]
            f.write(json.dumps(dict(id=f'c{i}', messages=messages), ensure_ascii=False)+'\n')
    (folder/'complete').touch()
    return folder


def tokenizer(folder, size=32_000):
    "A tokenizer's folder"
    if (folder/'tokenizer_config.json').exists(): return folder
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    folder.mkdir(parents=True, exist_ok=True)
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), 'isolated'), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(sources(), trainers.BpeTrainer(vocab_size=size, special_tokens=['<|endoftext|>','<|im_start|>','<|im_end|>'], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.save(str(folder/'tokenizer.json'))
    (folder/'tokenizer_config.json').write_text(json.dumps(dict(tokenizer_class='PreTrainedTokenizerFast', eos_token='<|endoftext|>', pad_token='<|endoftext|>', chat_template=TEMPLATE)))
    return folder
