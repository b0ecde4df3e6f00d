"""The text job's configuration: recorded answers to right and wrong keys, and what is refused on purpose."""
import json
from pathlib import Path
import pytest
from fastseqprep.text_config import ASTRAI, SHAPES, ConfigError, TextConfig, text_schema

LINES = [json.loads(o) for o in (Path(__file__).parent/'cases/text/config.jsonl').read_text().splitlines()]
DEFAULTS,CASES = LINES[0]['defaults'],LINES[1:]

# Where nothing was said before, an error says it now: key → what the sentence holds
REFUSED = {'{"preprocessing": {"max_chars": -5}}': 'max_chars', '{"preprocessing": {"max_items": -1}}': 'max_items', '{"output": {"dtype": {"sequence": "int7"}}}': 'dtype.sequence',
           '{"mask": {"user": "maybe"}}': "mask.user: is 'maybe', expected 'train' or 'mask'", '{"mask_default": "other"}': 'mask_default', '{"version": 99}': 'version: is 99',
           '{"unknown": 1}': 'unknown: unknown key', '{"preprocessing": {"unknown": 1}}': 'preprocessing.unknown: unknown key', '{"input": {"sections": [{}]}}': 'sections.0.field: is missing'}

def laid(base, more): return {k:(laid(v, more[k]) if isinstance(v, dict) and isinstance(more.get(k), dict) and k!='mask' else more.get(k, v)) for k,v in base.items()}

@pytest.mark.parametrize('compat', [None,'astrai'])
@pytest.mark.parametrize('case', CASES, ids=lambda c: json.dumps(c['config']))
def test_recorded(case, compat):
    keys = case['config'] if compat is None else {**case['config'], 'compat':compat}
    if not case['ok'] or (why := REFUSED.get(json.dumps(case['config']))):
        with pytest.raises(ConfigError) as e: TextConfig(**keys)
        if case['ok']: assert why in str(e.value)
        return
    got = TextConfig(**keys).resolved()
    want = laid(DEFAULTS, case['differs'])
    assert {k:v if not isinstance(v, dict) else {a:got[k][a] for a in v} for k,v in want.items()}==want

def test_all_problems_at_once():
    with pytest.raises(ConfigError) as e:
        TextConfig(input=dict(sources=dict(a=dict(sections=[dict(field='a', action='trian')], list_feild=True))), preprocessing=dict(max_seq_len=0, pakcing_strategy='bfd'), rendr='message', template_time='soon', compat='astra')
    assert len(e.value.problems)==7, e.value
    for o in ("did you mean 'list_field'?", "did you mean 'packing_strategy'?", "did you mean 'render'?", "is 'trian'", 'template_time', "compat: is 'astra'"): assert o in str(e.value)

def test_preset():
    "The preset is only other defaults: what is said wins, and the default differs from each of its values"
    base,like = TextConfig(),TextConfig(compat='astrai')
    assert {k:getattr(like, k) for k in ASTRAI}==ASTRAI
    assert all(getattr(base, k)!=v for k,v in ASTRAI.items())
    assert {k for k in TextConfig.model_fields if getattr(base, k)!=getattr(like, k)}=={*ASTRAI,'compat'}
    assert TextConfig(compat='astrai', on_error='raise').on_error=='raise'

@pytest.mark.parametrize('shape', SHAPES)
def test_files(tmp_path, shape):
    cfg = TextConfig.for_shape(shape, output=dict(domain_key='ünit'))
    cfg.to_file(tmp_path/'a.json')
    assert 'ünit' in (tmp_path/'a.json').read_text(encoding='utf-8')
    assert TextConfig.from_file(tmp_path/'a.json')==cfg==TextConfig(**cfg.resolved())
    (tmp_path/'a.yaml').write_text(json.dumps(cfg.resolved()), encoding='utf-8') # JSON is YAML
    assert TextConfig.from_file(tmp_path/'a.yaml')==cfg
    (tmp_path/'bad.json').write_text('{"input": {"sections": [{"field": "a", "action": "train", "tempalte": true}]}}')
    with pytest.raises(ConfigError, match="bad.json: input.sections.0.tempalte: unknown key, did you mean 'template'?"): TextConfig.from_file(tmp_path/'bad.json')

def test_results_only():
    a,b = (TextConfig(preprocessing=dict(batch_size=n), tokenizer_path=p) for n,p in ((1,'a'),(2,'b')))
    assert a.resolved(True)==b.resolved(True) and a.resolved()!=b.resolved()

def test_masks():
    "Whether there is a mask is a matter of the configuration, not of a record"
    train,mask = dict(field='a', action='train'),dict(field='b', action='mask')
    one = lambda *s: TextConfig(input=dict(sections=list(s))).mask_key('sequence')
    assert (one(train), one(train, train), one(mask, train), one({**train, 'template':True}))==(None, None, 'loss_mask', 'loss_mask')
    many = TextConfig(input=dict(sources=dict(a=dict(sections=[train]), b=dict(sections=[train], mask_key='m'), c=dict(sections=[train], list_field=True), d=dict(sections=[dict(field='d', action='value')]), e={})))
    assert [many.mask_key(o) for o in many.sources]==[None,'m','c_mask',None]
    assert not TextConfig(input=dict(sections=[train], sources={})).is_multi

def test_schema(tmp_path):
    text_schema(tmp_path/'s.json')
    schema = json.loads((tmp_path/'s.json').read_text())
    def parts(o): return [o, *[p for v in o.values() for p in (parts(v) if isinstance(v, dict) else [])]]
    bare = [k for part in parts(schema) if 'properties' in part for k,v in part['properties'].items() if 'description' not in v and '$ref' not in v]
    assert bare==[]

def test_light():
    import subprocess, sys
    heavy = subprocess.run([sys.executable, '-c', "import sys, fastseqprep.text_config, fastseqprep.sections; print([o for o in ('torch','pandas','matplotlib','fastai','transformers') if o in sys.modules])"], capture_output=True, text=True)
    assert heavy.stdout.strip()=='[]', heavy.stderr
