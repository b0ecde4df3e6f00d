"""`fastseqprep text`, `preview` and `export`: exit codes as recorded, one line for an error."""
import json
from pathlib import Path
import numpy as np, pytest
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

# ---- preview

@pytest.fixture
def shards(place, capsys):
    packed = {**GOOD, 'preprocessing':dict(min_chars=1, packing_strategy='bfd', max_packed_len=32)}
    (place/'packed.json').write_text(json.dumps(packed))
    for c,out in ('c.json','plain'),('packed.json','packed'): assert main(f'text a.jsonl b.jsonl -o {out} -c {c} --tokenizer_path tok --quiet'.split())==0
    assert capsys.readouterr()==('','')
    return place

@pytest.mark.parametrize('line,words', [
    ('preview c.json a.jsonl --tokenizer_path tok', ['a.jsonl:1','«Hello to everyone.»']),
    ('preview c.json a.jsonl b.jsonl --record 1 --tokenizer_path tok', ['b.jsonl:1','«Hello.»']),
    ('preview c.json inputs --tokenizer-path tok', ['inputs/a.jsonl:1','«Hello to everyone.»']),
    ('preview plain --tokenizer_path tok', ['record 0 of 2','«Hello to everyone.»']),
    ('preview plain --record 1 --tokenizer_path tok', ['record 1 of 2','«Hello.»']),
    ('preview plain/__default__/shard_0000 --record 1 --tokenizer_path tok', ['record 1 of 2','«Hello.»']),
    ('preview packed --bin 0 --tokenizer_path tok', ['bin 0 of 1','record 0','record 1']),
    ('preview plain --max_tokens 3 --tokenizer_path tok', ['are not shown'])])
def test_preview(shards, capsys, line, words):
    assert main(line.split())==0
    out,err = capsys.readouterr()
    assert err=='' and all(o in out for o in words) and '\x1b' not in out

@pytest.mark.parametrize('line,code,words', [
    ('preview', 2, 'CONFIG|SHARDS'),
    ('preview nothing --tokenizer_path tok', 2, 'nothing does not exist'),
    ('preview c.json --tokenizer_path tok', 2, 'give a file of records after it'),
    ('preview c.json none.jsonl --tokenizer_path tok', 2, 'none.jsonl does not exist'),
    ('preview c.json a.jsonl', 2, 'params does not exist'),
    ('preview plain', 2, 'params does not exist'),
    ('preview plain a.jsonl --tokenizer_path tok', 2, 'shown without a.jsonl'),
    ('preview c.json a.jsonl --bin 0 --tokenizer_path tok', 2, 'for folders of shards'),
    ('preview plain --bin 0 --record 1 --tokenizer_path tok', 2, 'not allowed with'),
    ('preview plain --record x --tokenizer_path tok', 2, 'expected 0 or more'),
    ('preview plain --record -1 --tokenizer_path tok', 2, '--record'),
    ('preview plain --recrod 1 --tokenizer_path tok', 2, 'did you mean'),
    ('preview broken.json a.jsonl --tokenizer_path tok', 1, 'broken.json'),
    ('preview refused.json a.jsonl --tokenizer_path tok', 1, 'max_seq_len'),
    ('preview c.json bad.jsonl --tokenizer_path tok', 1, 'bad.jsonl:1'),
    ('preview c.json broken.json --tokenizer_path tok', 1, 'broken.json'),
    ('preview c.json a.jsonl --record 1 --tokenizer_path tok', 1, 'there is no record 1'),
    ('preview c.json a.jsonl --tokenizer_path empty', 1, 'tokenizer.json does not exist'),
    ('preview plain --record 2 --tokenizer_path tok', 1, 'there is no record 2'),
    ('preview plain --bin 0 --tokenizer_path tok', 1, 'no bins'),
    ('preview plain --part train --tokenizer_path tok', 1, 'train'),
    ('preview plain --domain x --tokenizer_path tok', 1, "no domain 'x'"),
    ('preview inputs --tokenizer_path tok', 1, 'no token shards')])
def test_preview_errors(shards, capsys, line, code, words):
    assert main(line.split())==code
    out,err = capsys.readouterr()
    assert out=='' and words in err and len(err.strip().splitlines())==1 and 'Traceback' not in err

def test_preview_looks_without_writing(shards):
    before = sorted((o.relative_to(shards), o.stat().st_mtime_ns) for o in shards.rglob('*'))
    for line in 'preview c.json a.jsonl --tokenizer_path tok','preview packed --bin 0 --tokenizer_path tok': main(line.split())
    assert sorted((o.relative_to(shards), o.stat().st_mtime_ns) for o in shards.rglob('*'))==before

# ---- export

def test_export(shards, capsys):
    import pyarrow.parquet as pq
    assert main('export packed rows.parquet'.split())==0 and '2 rows' in capsys.readouterr().out
    t = pq.read_table(shards/'rows.parquet')
    assert t.num_rows==2 and {'sequence','domain','bin'}<={*t.column_names}
    assert main('export packed few.parquet --key sequence --domain __default__'.split())==0
    assert 'position_ids' not in pq.read_schema(shards/'few.parquet').names
    assert main('export plain meg --format megatron'.split())==0
    assert np.fromfile(shards/'meg.bin', np.int32).tolist()==[i for row in t['sequence'].to_pylist() for i in row]
    assert main('export plain meg --format megatron --overwrite'.split())==0

@pytest.mark.parametrize('line,code,words', [
    ('export none a.parquet', 2, 'none is no folder'),
    ('export plain a', 2, '--format'),
    ('export plain a --format hdf5', 2, "invalid choice: 'hdf5'"),
    ('export plain a.parquet --key sequense', 1, "did you mean 'sequence'"),
    ('export plain a.parquet --domain x', 1, "domain"),
    ('export plain a --format megatron --key sequence --key position_ids', 2, 'one output'),
    ('export plain c.json --format parquet', 1, 'overwrite')])
def test_export_errors(shards, capsys, line, code, words):
    assert main(line.split())==code
    out,err = capsys.readouterr()
    assert words in err and len(err.strip().splitlines())==1 and not list(shards.glob('a*.parquet')) and not out

# ---- what the other commands say of token shards

def test_verify_counts_shards_once(shards, capsys):
    assert main(['verify','plain'])==0
    out = capsys.readouterr().out
    n = sum(json.loads((shards/'plain/__default__/shard_0000/meta.json').read_text())['sequence']['shape'])
    assert f'text, 1 shard, 2 rows, {n} tokens' in out

@pytest.mark.parametrize('line,words', [
    ('inspect plain', 'see them by fastseqprep preview plain'),
    ('inspect plain/__default__/shard_0000', 'fastseqprep preview'),
    ('text b.jsonl -o plain -c c.json --tokenizer_path tok', 'give --overwrite to replace it'),
    ('text a.jsonl -o b.jsonl -c c.json --tokenizer_path tok', 'b.jsonl is a file, expected a folder')])
def test_advice_is_for_the_command_line(shards, capsys, line, words):
    assert main(line.split()) and words in (err := capsys.readouterr().err) and len(err.strip().splitlines())==1 and 'True' not in err and 'Errno' not in err
