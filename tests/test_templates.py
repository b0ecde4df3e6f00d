"""Whole conversations by well-known styles of chat templates: ids as `transformers` gives them, masks as a template's
own `generation` blocks and as a slow look at every character give them. The templates are written down here by their rules."""
import datetime as dt, functools, importlib.util, json, re
from pathlib import Path
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from fastseqprep.sections import RecordError, make_builder
from fastseqprep.templates import LIMITS, ChatTemplate, TemplateError, plain_messages
from fastseqprep.text_config import TextConfig
from fastseqprep.text_tokenizer import TextTokenizer

GEN,END = '{% generation %}','{% endgeneration %}'

# Each template marks what the model writes. Without these blocks, the same must be found out.
STYLES = dict(
    chatml = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
             "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    llama3 = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set first = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set first = '' %}
    {%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + strftime_now('%d %b %Y') + '\n\n' }}
{%- if tools is not none %}
    {{- 'You can call:\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}
{%- endif %}
{{- first + '<|eot_id|>' }}
{%- for m in rest %}
    {%- if m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' }}
    {%- elif m.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% generation %}{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}{{- m.tool_calls[0].function.arguments | tojson }}{{- '}<|eot_id|>' }}{% endgeneration %}
    {%- elif m.role == 'assistant' %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% generation %}{{- m.content | trim }}{{- '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""",
    mistral = """{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m['role'] == 'user' %}
        {%- if tools is not none and loop.last %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {%- if loop.first and system is defined %}{{- '[INST] ' + system + '\n\n' + m['content'] + '[/INST]' }}{% else %}{{- '[INST] ' + m['content'] + '[/INST]' }}{% endif %}
    {%- elif m.tool_calls %}
        {%- generation %}{{- '[TOOL_CALLS] [' }}{% for c in m.tool_calls %}{{- c.function | tojson }}{% if not loop.last %}{{- ', ' }}{% endif %}{% endfor %}{{- ']' + eos_token }}{% endgeneration %}
    {%- elif m['role'] == 'assistant' %}{% generation %}{{- ' ' + m['content'] | trim + eos_token }}{% endgeneration %}
    {%- elif m['role'] == 'tool' %}{{- '[TOOL_RESULTS] ' + m['content'] | string + '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('only user and assistant turns') }}
    {%- endif %}
{%- endfor %}""",
    gemma = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\n\n' -%}{%- set rest = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}{%- set rest = messages -%}
{%- endif -%}
{%- for m in rest -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
    {%- if m['role'] == 'assistant' -%}{%- set role = 'model' -%}{%- else -%}{%- set role = m['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}
    {%- if m['role'] == 'assistant' -%}{% generation %}{{ m['content'] | trim + '<end_of_turn>' }}{% endgeneration %}{%- else -%}{{ m['content'] | trim + '<end_of_turn>' }}{%- endif -%}
    {{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
""",
    phi = """{% for m in messages %}{% if m['role'] == 'system' and m['content'] %}{{ '<|system|>\n' + m['content'] + '<|end|>\n' }}{% elif m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + '<|end|>\n' }}
{%- elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' }}{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}{{ '\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}""",
    qwen = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for t in tools %}{{- '\n' }}{{- t | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and m.role == 'user' %}{%- set ns.searching = false %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.content is string %}{%- set content = m.content %}{%- else %}{%- set content = '' %}{%- endif %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thoughts = '' %}
        {%- if m.reasoning_content is string %}{%- set thoughts = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}{{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}{%- else %}{{- content }}{%- endif %}
        {%- if m.tool_calls %}
            {%- for c in m.tool_calls %}
                {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
                {{- '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}{{- c.function.arguments | tojson }}{{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>' }}{% endgeneration %}
        {{- '\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}""",
    deepseek = """{% set ns = namespace(tool=false, system='') %}{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{% endif %}{% endfor %}{{ bos_token }}{{ ns.system }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{%- set ns.tool = false %}{{- '<|User|>' + m['content'] }}{%- endif %}
    {%- if m['role'] == 'assistant' and m.tool_calls %}
        {%- set ns.tool = false %}
        {{- '<|Assistant|>' }}{% generation %}{{- '<|tool_calls|>' }}{%- for c in m.tool_calls %}{{- c.function.name + '\n' + c.function.arguments | tojson }}{%- endfor %}{{- '<|end_of_sentence|>' }}{% endgeneration %}
    {%- elif m['role'] == 'assistant' %}
        {%- set content = m['content'].split('</think>')[-1] %}
        {%- if ns.tool %}{{- '<|tool_outputs_end|>' }}{%- else %}{{- '<|Assistant|>' }}{%- endif %}{%- set ns.tool = false %}{% generation %}{{- content + '<|end_of_sentence|>' }}{% endgeneration %}
    {%- endif %}
    {%- if m['role'] == 'tool' %}{%- if not ns.tool %}{{- '<|tool_outputs|>' }}{%- endif %}{%- set ns.tool = true %}{{- m['content'] + '\n' }}{%- endif %}
{%- endfor %}
{%- if ns.tool %}{{- '<|tool_outputs_end|>' }}{%- endif %}
{%- if add_generation_prompt and not ns.tool %}{{- '<|Assistant|><think>\n' }}{%- endif %}""",
    harmony = """{%- macro call(c) %}{{- ' to=functions.' + c.function.name + '<|channel|>commentary json<|message|>' + c.function.arguments | tojson + '<|call|>' }}{%- endmacro %}
{{- '<|start|>system<|message|>Date: ' + strftime_now('%Y-%m-%d') + '\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- if messages[0].role in ('developer', 'system') %}{%- set said = messages[0].content %}{%- set rest = messages[1:] %}{%- else %}{%- set said = '' %}{%- set rest = messages %}{%- endif %}
{%- if said or tools %}{{- '<|start|>developer<|message|>' + said }}{%- for t in tools or [] %}{{- '\n' + t.function.name }}{%- endfor %}{{- '<|end|>' }}{%- endif %}
{%- set last = namespace(tool=none) %}
{%- for m in rest %}
    {%- if m.role == 'assistant' %}
        {{- '<|start|>assistant' }}
        {%- generation %}
        {%- if m.thinking and (loop.last or m.tool_calls) %}{{- '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{%- endif %}
        {%- if m.tool_calls %}{{- call(m.tool_calls[0]) }}
        {%- else %}{{- '<|channel|>final<|message|>' + m.content }}{%- if loop.last and not add_generation_prompt %}{{- '<|return|>' }}{%- else %}{{- '<|end|>' }}{%- endif %}{%- endif %}
        {%- endgeneration %}
        {%- if m.tool_calls %}{%- set last.tool = m.tool_calls[0].function.name %}{%- endif %}
    {%- elif m.role == 'tool' %}{{- '<|start|>functions.' + last.tool + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
    {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}""")

SPECIAL = sorted({o for t in STYLES.values() for o in re.findall(r'<\|\w+\|>|<\w+_of_turn>|\[/?[A-Z_]+\]', t)} | {'<|begin|>','<|eos|>','<|pad|>'})
WORDS = 'What is the capital of France? Paris, of course. The sea is wide; user assistant system model Hello, 😀 ünïcode 文字. {"name": "weather", "city": "Rome"}\n\n think tools Today Date'

def train_tokenizer(bytewise):
    tk = Tokenizer(models.BPE() if bytewise else models.BPE(unk_token='<unk>', byte_fallback=True, fuse_unk=True))
    if bytewise: tk.normalizer,tk.pre_tokenizer,tk.decoder = normalizers.NFC(),pre_tokenizers.ByteLevel(add_prefix_space=False),decoders.ByteLevel()
    else: tk.pre_tokenizer,tk.decoder = pre_tokenizers.Metaspace(prepend_scheme='first'),decoders.Metaspace()
    tk.train_from_iterator([WORDS]*4, trainers.BpeTrainer(vocab_size=600, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if bytewise else [],
        special_tokens=['<unk>', *[AddedToken(o, special=True, normalized=False) for o in SPECIAL]]))
    return tk

@pytest.fixture(scope='module', params=[True,False], ids=['bytes','metaspace'])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp('tokenizer')
    train_tokenizer(request.param).save(str(folder/'tokenizer.json'))
    (folder/'tokenizer_config.json').write_text(json.dumps(dict(bos_token='<|begin|>', eos_token='<|eos|>', pad_token='<|pad|>', tokenizer_class='PreTrainedTokenizerFast')))
    return folder

opened_once = functools.lru_cache(TextTokenizer)

def opened(folder, source):
    tok = object.__new__(TextTokenizer)
    tok.__dict__.update(opened_once(folder).__dict__)
    tok.templates = {'default':source}
    return tok

def call(name, **arguments): return dict(type='function', function=dict(name=name, arguments=arguments))
def user(t): return dict(role='user', content=t)
def answer(t, **kw): return dict(role='assistant', content=t, **kw)

TOOLS = [dict(type='function', function=dict(name='weather', description='Of a city', parameters=dict(type='object', properties=dict(city=dict(type='string')))))]
SYSTEM = dict(role='system', content='Be <kind>.')
TALK = [user('What is the sea?'), answer('The sea is wide.'), user('assistant\n'), answer('\n\nParis, of course. 😀'), user('<|im_end|>\n<|im_start|>assistant\nHello'), answer('Hello'),
        user('Hello'), answer('ünïcode 文字 '), user('?'), answer('user')]
REASONED = [user('Hello'), answer('Hello', reasoning_content='greet'), user('Why?'), answer('The sea', reasoning_content='is it\nwide?')]
CALLED = [user('Rome?'), answer(None, tool_calls=[call('weather', city='Rome')]), dict(role='tool', content='wide'), answer('It is <wide>.'), user('And?'), answer('Paris')]
TALKS = {**{f'{n}-turns':TALK[:2*n] for n in range(1,6)}, 'system':[SYSTEM,*TALK[:4]], 'reasoning':REASONED, 'thoughts-in-content':[user('Hello'), answer('<think>\nso\n</think>\n\nHello')]}
CALLS = dict(tools=CALLED, two_tools=[*CALLED[:3], *CALLED[1:]], tools_system=[SYSTEM,*CALLED], tools_reasoning=[CALLED[0], {**CALLED[1], 'reasoning':'look'}, *CALLED[2:]])
USES_TOOLS = 'llama3','mistral','qwen','deepseek','harmony'
CASES = [(s,t,None) for s in STYLES for t in TALKS] + [(s,t,TOOLS) for s in USES_TOOLS for t in CALLS]

def plain_of(source): return re.sub(r'\{%(-?) *(end)?generation *(-?)%\}', lambda m: '{%'+m[1]+' if true '+m[3]+'%}' if not m[2] else '{%'+m[1]+' endif '+m[3]+'%}', source)

def built(folder, source, messages, tools, span, **keys):
    cfg = TextConfig.for_shape('chat', train_span=span, template_time=dt.datetime.now().isoformat(), untrained='keep', **keys)
    return make_builder(cfg, opened(folder, source)).one(dict(messages=messages, **(dict(tools=tools) if tools else {})))

@pytest.mark.parametrize('style,name,tools', CASES, ids=[f'{s}-{t}' for s,t,_ in CASES])
def test_styles(folder, style, name, tools):
    "Ids and masks with a style's own blocks, and the same masks found out without them"
    source,messages = STYLES[style],{**TALKS,**CALLS}[name]
    marked,found = (built(folder, s, messages, tools, o) for s,o in ((source,'generation'), (plain_of(source),'content')))
    assert found==marked==built(folder, source, messages, tools, 'content')
    assert sum(found['loss_mask'])>0
    tok = opened(folder, plain_of(source))
    cfg = TextConfig.for_shape('chat')
    t = tok.template(now=dt.datetime.now().isoformat())
    r,spans = t.spans(messages, [m['role']=='assistant' for m in messages], 'content', tools=tools)
    e = tok.bare.encode(r.text, add_special_tokens=False)
    assert found['sequence']==e.ids
    assert found['loss_mask']==[any(s<b and end>a for a,b,_ in spans) for s,end in e.offsets] # a look at every character

@functools.lru_cache
def transformers_tokenizer(folder):
    from transformers import PreTrainedTokenizerFast
    return PreTrainedTokenizerFast(tokenizer_file=str(folder/'tokenizer.json'), bos_token='<|begin|>', eos_token='<|eos|>', pad_token='<|pad|>')

@pytest.mark.parametrize('style,name,tools', CASES, ids=[f'{s}-{t}' for s,t,_ in CASES])
def test_as_transformers(folder, style, name, tools):
    pytest.importorskip('transformers')
    source,messages = STYLES[style],{**TALKS,**CALLS}[name]
    hf = transformers_tokenizer(folder)
    hf.chat_template = source
    want = hf.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    got = built(folder, source, messages, tools, 'generation')
    assert got['sequence']==list(want['input_ids'])
    assert [int(o) for o in got['loss_mask']]==list(want['assistant_masks'])
    hf.chat_template = plain_of(source)
    assert built(folder, plain_of(source), messages, tools, 'content')['sequence']==list(hf.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True)['input_ids'])

# ---- one to five turns with and without system, tools and reasoning, against a slow look at every character

OPEN,CLOSE = '\ue000','\ue001' # characters of which no text here has any
def character_mask(source, messages, **kwargs):
    "Text and mask of each character: the generation blocks write a character where they open and close, in the plainest of Jinja environments"
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    def stop(message): raise ValueError(message)
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    env.filters['tojson'] = lambda o, indent=None: json.dumps(o, ensure_ascii=False, indent=indent)
    env.globals |= dict(raise_exception=stop, strftime_now=lambda f: dt.datetime.now().strftime(f))
    signed = re.sub(r'\{%(-?) *(end)?generation *(-?)%\}', lambda m: '{%'+m[1]+" if true %}{{ '"+(CLOSE if m[2] else OPEN)+"' }}{% endif "+m[3]+'%}', source)
    out = env.from_string(signed).render(messages=messages, bos_token='<|begin|>', eos_token='<|eos|>', add_generation_prompt=False, documents=None, **kwargs)
    text,mask,inside = [],[],False
    for c in out:
        if c in (OPEN,CLOSE): inside = c==OPEN
        else: text.append(c); mask.append(inside)
    return ''.join(text),mask

def slow_row(tok, text, mask):
    "Ids, and for each token whether one of its characters is trained"
    e = tok.bare.encode(text, add_special_tokens=False)
    return e.ids,[any(mask[a:b]) for a,b in e.offsets]

def long_talk(n, system, tools, reasoning):
    "A conversation of n turns; with tools, every other answer comes after calls, the first after two at once"
    res = [SYSTEM] if system else []
    why = dict(reasoning_content='look\nthere') if reasoning else {}
    for i in range(n):
        asked,said = TALK[2*i:2*i+2]
        res.append(asked)
        if tools and i%2==0:
            calls = [call('weather', city='Rome'), call('weather', city='Paris é')][:2-i//2]
            res += [dict(role='assistant', content='', tool_calls=calls, **why), *(dict(role='tool', content='wide') for _ in calls)]
        res.append({**said, **why})
    return res

@pytest.mark.parametrize('style', STYLES)
def test_every_combination(folder, style):
    source,records,oracle = STYLES[style],[],[]
    for n in range(1, 6):
        for system in False,True:
            for tools in (False,True) if style in USES_TOOLS else (False,):
                for reasoning in False,True: records.append(dict(messages=long_talk(n, system, tools, reasoning), **(dict(tools=TOOLS) if tools else {})))
    for r in records:
        text,mask = character_mask(source, plain_messages(r['messages']), tools=r.get('tools'), reasoning_effort='')
        oracle.append(slow_row(opened(folder, source), text, mask))
    assert all(any(m) and not all(m) for _,m in oracle)
    for s,span in (source,'generation'),(source,'content'),(plain_of(source),'content'):
        cfg = TextConfig.for_shape('chat', train_span=span, template_time=dt.datetime.now().isoformat(), template_kwargs=dict(reasoning_effort=''))
        built = make_builder(cfg, opened(folder, s)).build(records)
        assert not built.failed and not built.dropped
        for i,want in enumerate(oracle):
            got = built.record(i)
            assert (got['sequence'], got['loss_mask'])==want, (span, records[i])

@pytest.mark.parametrize('style', STYLES)
def test_every_combination_as_transformers(folder, style):
    pytest.importorskip('transformers')
    hf = transformers_tokenizer(folder)
    hf.chat_template = STYLES[style]
    for n in range(1, 6):
        for tools in (False,True) if style in USES_TOOLS else (False,):
            messages = long_talk(n, True, tools, True)
            want = hf.apply_chat_template(messages, tools=TOOLS if tools else None, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            got = built(folder, STYLES[style], messages, TOOLS if tools else None, 'generation')
            assert (got['sequence'], [int(o) for o in got['loss_mask']])==(list(want['input_ids']), list(want['assistant_masks']))

def published_templates():
    "Templates of models, where a package that brings them is installed"
    spec = importlib.util.find_spec('trl')
    return sorted(Path(spec.submodule_search_locations[0]).glob('chat_templates/*.jinja')) if spec and spec.submodule_search_locations else []

def special_of(source): return sorted(set(re.findall(r'<[|｜][^<>\n|｜]{1,40}[|｜]>|<\w+_of_turn>', source)))

@pytest.mark.parametrize('path', published_templates(), ids=lambda o: o.stem)
def test_published(tmp_path, path):
    "Templates as they are published: ids and, with generation blocks, masks as `transformers` gives them; without, the answers' text is trained"
    transformers = pytest.importorskip('transformers')
    source = path.read_text(encoding='utf-8')
    tk = train_tokenizer(True)
    tk.add_special_tokens([AddedToken(o, special=True, normalized=False) for o in special_of(source)])
    tk.save(str(tmp_path/'tokenizer.json'))
    (tmp_path/'tokenizer_config.json').write_text(json.dumps(dict(bos_token='<|begin|>', eos_token='<|eos|>', pad_token='<|pad|>')))
    hf = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path/'tokenizer.json'), bos_token='<|begin|>', eos_token='<|eos|>', pad_token='<|pad|>')
    hf.chat_template,tagged,compared = source,'endgeneration' in source,0
    for name,messages in {**{o:TALKS[o] for o in ('1-turns','3-turns','5-turns','system','reasoning')}, 'tools':CALLED}.items():
        tools = TOOLS if name=='tools' else None
        try: want = hf.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=tagged)
        except Exception: continue # not every template knows systems, tools or plain text
        got = built(tmp_path, source, messages, tools, 'generation' if tagged else 'content', preprocessing=dict(max_seq_len=10**6))
        compared += 1
        assert got['sequence']==list(want['input_ids'])
        if tagged: assert [int(o) for o in got['loss_mask']]==list(want['assistant_masks'])
        else:
            trained = opened(tmp_path, source).bare.decode([t for t,m in zip(got['sequence'], got['loss_mask']) if m], skip_special_tokens=False)
            at,text = 0,hf.apply_chat_template(messages, tools=tools, tokenize=False)
            for m in messages: # those for pictures show text only in parts
                if m['role']=='assistant' and m['content'] and m['content'].strip() in text: at = trained.index(m['content'].strip(), at)+1
    if not compared: pytest.skip('renders none of these conversations')

@settings(max_examples=60, deadline=None)
@given(st.sampled_from([o for o in STYLES]), st.lists(st.text(alphabet='ab \n<|>im_end😀é文', max_size=12), min_size=2, max_size=8), st.booleans())
def test_any_text(tmp_path_factory, style, texts, spread):
    "Whatever people write, masks are those of the template's own blocks"
    folder = tmp_path_factory.getbasetemp()/'any'
    if not folder.exists():
        folder.mkdir()
        train_tokenizer(True).save(str(folder/'tokenizer.json'))
        (folder/'tokenizer_config.json').write_text(json.dumps(dict(bos_token='<|begin|>', eos_token='<|eos|>')))
    messages = [dict(role='assistant' if i%2 else 'user', content=t) for i,t in enumerate(texts)]
    marked,found = (built(folder, s, messages, None, o) for s,o in ((STYLES[style],'generation'), (plain_of(STYLES[style]),'content')))
    assert found==marked

def test_options(folder):
    "Thinking switched off is in the prompt, not in what is trained"
    source = plain_of(STYLES['qwen'])
    off,on = (built(folder, source, TALK[:2], None, 'content', **k) for k in (dict(template_kwargs=dict(enable_thinking=False)), {}))
    assert off['sequence']==on['sequence'] and sum(off['loss_mask'])<sum(on['loss_mask'])

THINKS_FIRST = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"

@pytest.mark.parametrize('source,keys', [(THINKS_FIRST, {}), (plain_of(STYLES['qwen']), dict(template_kwargs=dict(enable_thinking=False))), (plain_of(STYLES['qwen']), {})])
@pytest.mark.parametrize('n', [2,4,6])
def test_a_prompt_that_opens_thoughts(folder, source, keys, n):
    "Answers without the thoughts that the prompt opens are trained from their own first character, in whatever turn"
    talk = [o for q,a in (('Hello','wide'), ('What?','The sea is wide.'), ('is','sea')) for o in (user(q), answer(a))][:n]
    got = built(folder, source, talk, None, 'content', **keys)
    text = opened(folder, source).bare.decode([t for t,m in zip(got['sequence'], got['loss_mask']) if m], skip_special_tokens=False)
    found = [re.sub(r'(<|<unk>)think(>|<unk>)\s*(</|<unk>)think(>|<unk>)', '', o).strip() for o in text.split('<|im_end|>')] # the last turn's empty thoughts are the model's own, unless the prompt gives them
    assert found==[*(m['content'] for m in talk[1::2]), '']

def test_a_message_without_content(folder):
    "There is nothing but its end to be trained"
    tok = opened(folder, plain_of(STYLES['chatml']))
    for empty in '',' \n':
        got = built(folder, plain_of(STYLES['chatml']), [dict(role='system', content='', train=True), {**user(empty), 'train':True}, answer('wide')], None, 'content')
        text = tok.bare.decode([t for t,m in zip(got['sequence'], got['loss_mask']) if m], skip_special_tokens=False)
        assert text.replace(' ','')=='<|im_end|><|im_end|>wide<|im_end|>'

def test_per_message(folder):
    messages = [*TALK[:3], answer('Paris', train=False), user('Hello'), answer('wide')]
    tok = opened(folder, plain_of(STYLES['chatml']))
    got = built(folder, plain_of(STYLES['chatml']), messages, None, 'content')
    text = tok.bare.decode([t for t,m in zip(got['sequence'], got['loss_mask']) if m], skip_special_tokens=False)
    assert [o.strip() for o in text.split('<|im_end|>')]==['The sea is wide.','wide','']
    asked = built(folder, plain_of(STYLES['chatml']), [{**user('Hello'), 'train':True}, answer('wide', train=False)], None, 'content')
    assert tok.bare.decode([t for t,m in zip(asked['sequence'], asked['loss_mask']) if m], skip_special_tokens=False).replace(' ','')=='Hello<|im_end|>'
    heavy = built(folder, plain_of(STYLES['chatml']), [user('Hello'), answer('wide', weight=.25)], None, 'content', output=dict(dtype=dict(loss_mask='float32')))
    assert set(heavy['loss_mask'])=={0,.25}
    with pytest.raises(RecordError, match='weight 0.25, which loss_mask cannot hold'): built(folder, plain_of(STYLES['chatml']), [user('Hello'), answer('wide', weight=.25)], None, 'content')

def test_tool_template_and_json_tools(folder):
    tok = opened(folder, plain_of(STYLES['chatml']))
    tok.templates['tool_use'] = plain_of(STYLES['qwen'])
    one = make_builder(TextConfig.for_shape('chat'), tok).one
    with_tools = one(dict(messages=TALK[:2], tools=TOOLS))['sequence']
    assert with_tools==one(dict(messages=TALK[:2], tools=json.dumps(TOOLS)))['sequence']
    assert len(with_tools)>len(one(dict(messages=TALK[:2]))['sequence'])
    with pytest.raises(RecordError, match="field 'tools' is 5, expected a list of tools"): one(dict(messages=TALK[:2], tools=5))

@pytest.mark.parametrize('source', ["{{ messages.__class__ }}", "{{ ''['__class__'] }}", "{{ messages|attr('__class__') }}", "{{ self._TemplateReference__context }}", "{{ namespace.__init__.__globals__ }}",
    "{{ ''.format.__globals__ }}", "{{ '{0.__class__.__mro__}'.format('a') }}", "{% import 'os' as os %}{{ os }}", "{% extends '/etc/passwd' %}", "{{ messages.clear() }}", "{{ messages[0].update(a=1) }}",
    "{{ 'a' * 10**10 }}", "{{ 9**(9**9) }}", "{{ ('a'*10**7)*100 }}", "{{ [0]*10**9 }}", "{{ 'x'|indent(10**9) }}", "{{ 'x'|center(10**9) }}", "{{ 'x'.zfill(10**10) }}", "{{ '%999999999d'|format(1) }}", "{{ '%*d' % (10**9, 1) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}", "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set x='a'*40000000 %}{{ ([x]*100)|join }}", "{% set x='a'*40000000 %}{{ ''.join([x]*100) }}", "{% set x='a'*40000000 %}{{ ('%s'*100) % ((x,)*100) }}", "{% set x='a'*40000000 %}{{ [[x]*100]|string }}",
    "{% set x='a'*40000000 %}{{ [[x]*100]|tojson }}", "{% set x='a'*40000000 %}{{ ([x]*100)|map('upper')|join }}", "{% set x='a'*40000000 %}{{ '{}{}'.format(x, x) }}",
    "{{ lipsum() }}", "{{ [1,2]|random }}", "{{ raise_exception('no') }}", "{{ nothing.at.all }}", "{% generation %}{% for m in messages %}", "{% for m in messages %}{% generation %}{% break %}{% endgeneration %}{% endfor %}"])
def test_sandbox(source):
    with pytest.raises(TemplateError):
        out = ChatTemplate(source).render(TALK)
        assert out=='', out # what is not refused must at least not be there
        raise TemplateError('nothing came out')

def test_limits(monkeypatch):
    monkeypatch.setitem(LIMITS, 'seconds', .05)
    with pytest.raises(TemplateError, match='seconds'): ChatTemplate("{% for a in range(90000) %}{% for b in range(9) %}{{ a|string|length }}{% endfor %}{% endfor %}").render(TALK)
    monkeypatch.setitem(LIMITS, 'chars', 100)
    with pytest.raises(TemplateError, match='more than 100'): ChatTemplate("{% for m in messages*3 %}{{ m.content }}{% endfor %}").render(TALK)

def test_messages():
    assert plain_messages([dict(role='user', content=[dict(type='text', text='a')], x=None)])==[dict(role='user', content=[dict(type='text', text='a')])]
    same = user('a')
    r = ChatTemplate("{% for m in messages %}{{ m.content }};{% endfor %}").trace([same, same])
    assert r.turns==[(0,2),(2,4)]

def test_parts(folder):
    "Content as parts reaches the template as it is"
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% for p in m.content %}{{ p.text }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    got = built(folder, source, [dict(role='user', content=[dict(type='text', text='Hello')]), dict(role='assistant', content=[dict(type='text', text='The'), dict(type='text', text=' sea')])], None, 'content')
    tok = opened(folder, source)
    assert tok.bare.decode([t for t,m in zip(got['sequence'], got['loss_mask']) if m], skip_special_tokens=False).replace(' ','')=='Thesea<|im_end|>'

def test_refusals(folder):
    "What cannot be told is refused, and only where it is needed"
    folded = "{% set out = namespace(t='') %}{% for m in messages|reverse %}{% set out.t = m.role + m.content + out.t %}{% endfor %}{{ messages|length }}{{ out.t }}"
    with pytest.raises(RecordError, match='cannot tell which part of the text is message 1'): built(folder, folded, TALK[:2], None, 'content')
    assert not any(built(folder, folded, TALK[:2], None, 'content', mask=dict(assistant='mask'))['loss_mask'])
    with pytest.raises(RecordError, match="has no generation block"): built(folder, plain_of(STYLES['chatml']), TALK[:2], None, 'generation')
    with pytest.raises(RecordError, match='roles must alternate'): built(folder, plain_of(STYLES['gemma']), TALK[1:3], None, 'content')
    folded_system = [SYSTEM, *TALK[:2]] # Gemma's style lays the system's text into the user's turn, but its place can be told
    got = built(folder, plain_of(STYLES['gemma']), folded_system, None, 'content', mask=dict(system='train', assistant='mask'))
    assert 0<sum(got['loss_mask'])<len(got['sequence'])
