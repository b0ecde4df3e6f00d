"What shapes give is what the program gives, for every style of template and for contents made to lead them astray"
import re

import numpy as np, pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import fastseqprep.sections as sections
from fastseqprep.sections import make_builder
from fastseqprep.text_config import TextConfig
from fastseqprep.text_tokenizer import TextTokenizer
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


@pytest.fixture(scope='module')
def tokenizer_of(tmp_path_factory):
    "A tokenizer of single bytes with a chat template"
    folder = tmp_path_factory.mktemp('bytes')
    t = Tokenizer(models.BPE({c:i for i,c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.add_special_tokens([*TOKENS.values(), '<|im_start|>','<|im_end|>','<|eot_id|>','</s>','<s>'])
    t.save(str(folder/'tokenizer.json'))
    def make(source):
        res = TextTokenizer(folder)
        res.templates,res.special_tokens = {'default':source},dict(TOKENS)
        return res
    return make


def outputs(built):
    o = built.outputs['sequence']
    return [built.rows.tolist(), o.values.values.tolist(), o.values.offsets.tolist(), o.mask.values.tolist(), None if o.turns is None else o.turns.values.tolist(), built.dropped, built.failed]


@pytest.mark.parametrize('keys', [{}, dict(train_span='turn'), dict(mask_default='train'), dict(overlong='split', prompt=True)], ids=str)
@pytest.mark.parametrize('style', sorted(SOURCES))
def test_records_like_others(style, keys, tokenizer_of, monkeypatch):
    "Conversations of the roles of earlier ones come to the same as if each was the first"
    tok,keys = tokenizer_of(SOURCES[style]),dict(keys)
    section = dict(field='messages', action='$role', template=True, add_generation_prompt=keys.pop('prompt', False))
    cfg = TextConfig(input=dict(sections=[section]), mask=dict(user='mask', system='mask', assistant='train'), template_time='2026-01-31', tools_field='tools', untrained='keep', **keys)
    rng = np.random.default_rng(len(style))
    records = [dict(messages=m, id=i, **(dict(tools=[dict(type='function', function=dict(name='look'))]) if rng.random()<.1 else {})) for i,m in enumerate(conversations(rng, 120))]
    records.insert(60, dict(messages=[dict(role='user', content='half \ud800 a pair'), dict(role='assistant', content='x')]))
    whole = make_builder(cfg, tok, turns=True)
    got = outputs(whole.build(records))
    assert outputs(whole.build(records))==got              # by now all are like others
    if style in ('chatml','llama3') and not keys: assert any(whole.sources['sequence'].recipes.values())
    monkeypatch.setattr(sections, 'plain_roles', lambda messages: None)
    slow = make_builder(cfg, tok, turns=True)
    assert outputs(slow.build(records))==got and not slow.sources['sequence'].recipes


def test_like_others_until_a_shape_is_wrong(tokenizer_of):
    cfg = TextConfig(input=dict(sections=[dict(field='messages', action='mask', template=True)]), untrained='keep')
    b = make_builder(cfg, tokenizer_of("{% for m in messages %}{{ m.content }}{% endfor %}"))
    records = [dict(messages=[dict(role='user', content=f'Hi {i}')]) for i in range(9)]
    def texts(): return outputs(b.build(records))
    first,source = texts(),b.sources['sequence']
    (shape,_), = source.recipes[next(iter(source.recipes))]
    shape.parts.append('wrong')
    assert texts()!=first
    source.templates['default'].shapes.program = False     # as when any shape of the template was found to be wrong
    assert texts()==first
