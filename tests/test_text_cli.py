"""`fastseqprep text`: exit codes as recorded, one line for an error."""
import json
from pathlib import Path
import pytest
from fastseqprep.cli import main

CASES = Path(__file__).parent/'cases/text'
GOOD = dict(input=dict(sections=[dict(field='text', action='train')]), preprocessing=dict(min_chars=1))

@pytest.fixture
def place(tmp_path, monkeypatch):
    parts = json.loads((CASES/'tokenizers.json').read_text(encoding='utf-8'))
    for o in 'tok','empty','inputs': (tmp_path/o).mkdir()
    (tmp_path/'tok/tokenizer.json').write_text(json.dumps(parts['tokenizer']))
    for name,text in {'a.jsonl':'{"text":"Hello to everyone."}\n', 'b.jsonl':'{"text":"Hello."}\n', 'bad.jsonl':'{"text":{}}\n', 'c.json':json.dumps(GOOD), 'broken.json':'{', 'refused.json':json.dumps({**GOOD, 'preprocessing':dict(max_seq_len=0)})}.items(): (tmp_path/name).write_text(text)
    (tmp_path/'inputs/a.jsonl').write_text('{"text":"Hello to everyone."}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path

@pytest.mark.parametrize('line,code,words', [
    ('text a.jsonl -o out -c c.json --tokenizer_path tok', 0, ''),
    ('text a.jsonl b.jsonl --output_dir out --config c.json --tokenizer_path tok --batch_size 1', 0, ''),
    ('text inputs -o out -c c.json --tokenizer_path tok', 0, ''),          # a folder is read here
    ('text *.jsonl -o out -c c.json --tokenizer_path tok', 1, 'bad.jsonl:1'), # and so is a pattern
    ('text -o out -c c.json --tokenizer_path tok', 2, 'INPUT'),
    ('text missing.jsonl -o out -c c.json --tokenizer_path tok', 2, 'missing.jsonl does not exist'),
    ('text x*.jsonl -o out -c c.json --tokenizer_path tok', 2, 'does not exist'),
    ('text a.jsonl -c c.json --tokenizer_path tok', 2, 'output_dir'),
    ('text a.jsonl -o out --tokenizer_path tok', 2, 'config'),
    ('text a.jsonl -o out -c none.json --tokenizer_path tok', 2, 'none.json does not exist'),
    ('text a.jsonl -o out -c broken.json --tokenizer_path tok', 1, 'broken.json'),
    ('text a.jsonl -o out -c refused.json --tokenizer_path tok', 1, 'max_seq_len'),
    ('text a.jsonl -o out -c c.json', 2, 'params does not exist'),
    ('text a.jsonl -o out -c c.json --tokenizer_path empty', 1, 'tokenizer.json does not exist'),
    ('text a.jsonl -o out -c c.json --tokenizer_path tok --batch_size 0', 2, '1 or more'),
    ('text a.jsonl -o out -c c.json --tokenizer_path tok --batch_size x', 2, '1 or more'),
    ('text a.jsonl -o out -c c.json --tokenizer_path tok --batchsize 2', 2, 'did you mean'),
    ('text bad.jsonl -o out -c c.json --tokenizer_path tok', 1, 'bad.jsonl:1')])
def test_exit_codes(place, capsys, line, code, words):
    assert main(line.split())==code
    out,err = capsys.readouterr()
    if code: assert words in err and len(err.strip().splitlines())==1 and not (place/'out').exists()
    else: assert '__default__' in out and (place/'out/manifest.json').exists()

def test_help(capsys):
    with pytest.raises(SystemExit) as e: main(['text','--help'])
    assert not e.value.code and '--tokenizer_path' in capsys.readouterr().out
