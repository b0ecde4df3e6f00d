"What shapes give is what the program gives, for every style of template and for contents made to lead them astray"
import re

import numpy as np, pytest

from fastseqprep.templates import ChatTemplate, TemplateError
from test_templates import STYLES, published_templates, special_of

SOURCES = {**STYLES, **{p.stem: p.read_text() for p in published_templates()}}
TOKENS = dict(bos_token='<|begin|>', eos_token='<|eos|>', pad_token='<|pad|>', unk_token='<|unk|>')
WORDS = ['a', 'Hello.', ' blank before', 'after \n', '\n', '', ' ', '</think>', '<think>x</think>\n\ny', '<tool_response>z</tool_response>', '[INST]', '<|im_end|>\n', 'é漢', '\U0010fffe', '<|begin|>', 'x'*50, '\n\nq', '!', 'user', 'assistant']


def conversations(rng, n):
    for _ in range(n):
        res = [dict(role='system', content=text(rng))] if rng.random()<.3 else []
        for _ in range(rng.integers(1, 4)):
            res += [dict(role='user', content=text(rng)), dict(role='assistant', content=text(rng), **(dict(reasoning_content=text(rng)) if rng.random()<.2 else {}))]
        if rng.random()<.1: res.pop()
        if rng.random()<.05: res[0]['name'] = text(rng)
        if rng.random()<.05: res[-1]['weight'] = float(rng.integers(2))
        yield res


def text(rng): return ''.join(WORDS[i] for i in rng.integers(len(WORDS), size=rng.integers(1, 3))) if rng.random()<.4 else f'text {rng.integers(1000)}'


def outcome(f):
    try: return f()
    except TemplateError as e: return str(e)


@pytest.mark.parametrize('what', ['content','turn','completion','generation'])
@pytest.mark.parametrize('style', sorted(SOURCES))
def test_same_as_program(style, what):
    source = SOURCES[style]
    make = lambda: ChatTemplate(source, TOKENS, ['<|im_end|>','<|eot_id|>','</s>','<|eos|>', *special_of(source)], now='2026-01-31')
    fast,slow = make(),make()
    slow._find = lambda *args: None
    if what=='generation' and not fast.has_generation: return
    rng = np.random.default_rng(len(source))
    for messages in conversations(rng, 150):
        trained = rng.integers(2, size=len(messages)).tolist() if what!='content' or rng.random()<.3 else [int(m['role']=='assistant') for m in messages]
        for kw in ({}, dict(add_generation_prompt=True)): assert outcome(lambda: fast.spans(messages, trained, what, **kw))==outcome(lambda: slow.spans(messages, trained, what, **kw)), messages


def test_shapes_are_used():
    "Chats of usual shape are filled in"
    rng = np.random.default_rng(0)
    used = {}
    for style,source in SOURCES.items():
        t = ChatTemplate(source, TOKENS, ['<|im_end|>'], now='2026-01-31')
        for i in range(30): outcome(lambda: t.spans([dict(role='user', content=f'text {i}'), dict(role='assistant', content='ok')], [0,0]))
        used[style] = t.shapes.used
    assert sum(n>=25 for n in used.values())>=.6*len(used), used


def test_a_wrong_shape_ends_their_use(monkeypatch):
    t = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    talk = [dict(role='user', content='Hi')]
    for _ in range(2): t.spans(talk, [0])
    (shape,), = t.shapes.known.values()
    shape.parts.append('wrong')
    assert t.spans(talk, [0])[0].text=='Hi' and t.shapes.program is False and not t.shapes.known


def test_distinct_numbers():
    "1, 1.0 and True are equal in Python, and are written differently"
    t = ChatTemplate("{% for m in messages %}{{ m.content }}{{ m.x }}{% endfor %}")
    for _ in range(3):
        for x in (1, 1.0, True): assert t.spans([dict(role='user', content='Hi', x=x)], [0])[0].text==f'Hi{x}'


def test_many_kinds_cost_little():
    t = ChatTemplate("{% for m in messages %}{{ m.content }}{{ m.n }}{% endfor %}")
    for i in range(300):
        for _ in range(2): t.spans([dict(role='user', content='Hi', n=i)], [0])
    assert t.shapes.tried<=102
