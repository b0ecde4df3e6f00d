"""Records from every kind of file, whole or damaged."""
import gzip, shutil, json
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq, pytest
from hypothesis import given, settings, strategies as st
from fastseqprep.pieces import RecordError
from fastseqprep.text_input import input_splits, list_inputs, read_split, text_file

DATA = [dict(text=f'line {i} é 数', n=i) for i in range(50)]
LINES = ''.join(json.dumps(o, ensure_ascii=False)+'\n' for o in DATA).encode()

def read(paths, size=8<<20, **kwargs):
    "Records of inputs, with their places"
    res,base,file = [],0,0
    for s in input_splits(list_inputs(paths), size):
        if s.file!=file: base,file = 0,s.file
        for o in read_split(s, **kwargs):
            if isinstance(o, int): base += o
            else: res += [(s.file, base+i, r) for i,r in zip(*o)]
    return res
def records(*args, **kwargs): return [o[2] for o in read(*args, **kwargs)]

def zst(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, 'zstd') as f: f.write(data)
    return sink.getvalue().to_pybytes()

def test_every_format(tmp_path):
    (tmp_path/'a.jsonl').write_bytes(LINES)
    (tmp_path/'a.ndjson').write_bytes(b'\xef\xbb\xbf'+LINES)
    (tmp_path/'a.json').write_bytes(json.dumps(DATA).encode())
    (tmp_path/'a.jsonl.gz').write_bytes(gzip.compress(LINES[:len(LINES)//2])+gzip.compress(LINES[len(LINES)//2:])) # two members
    (tmp_path/'a.jsonl.zst').write_bytes(zst(LINES))
    (tmp_path/'a.json.gz').write_bytes(gzip.compress(json.dumps(DATA).encode()))
    pq.write_table(pa.Table.from_pylist(DATA), tmp_path/'a.parquet', row_group_size=7)
    for f in sorted(tmp_path.iterdir()): assert records(f)==DATA, f
    assert [o[:2] for o in read(tmp_path/'a.parquet')]==[(0,i) for i in range(50)]
    assert len(records(tmp_path))==7*50 and len(records(f'{tmp_path}/*.jsonl*'))==3*50

def test_dataset_folder(tmp_path):
    t = pa.Table.from_pylist(DATA)
    for i,part in enumerate((t[:20], t[20:])):
        with pa.OSFile(str(tmp_path/f'data-{i:05d}-of-00002.arrow'), 'wb') as f, pa.ipc.new_stream(f, t.schema) as w: w.write_table(part, max_chunksize=6)
    (tmp_path/'state.json').write_text(json.dumps(dict(_data_files=[dict(filename=f'data-{i:05d}-of-00002.arrow') for i in (0,1)])))
    (tmp_path/'dataset_info.json').write_text('{}')
    with pa.OSFile(str(tmp_path/'cache-1.arrow'), 'wb') as f, pa.ipc.new_stream(f, t.schema) as w: w.write_table(t)
    assert records(tmp_path)==DATA
    both = tmp_path.parent/f'{tmp_path.name}-both'
    for o in 'test','train': shutil.copytree(tmp_path, both/o)
    assert records(both)==DATA*2                                # folders of datasets, without their caches
    (both/'dataset_dict.json').write_text('{"splits":["train","test"]}')
    with pytest.raises(ValueError, match='train, test.*: give the folder of one'): records(both)
    assert records(both/'train')==DATA
    (tmp_path/'data-00001-of-00002.arrow').unlink()
    with pytest.raises(FileNotFoundError, match='data-00001'): records(tmp_path)

@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=12), st.none()), max_size=12), st.integers(1, 60), st.booleans(), st.sampled_from(['\n','\r\n']), st.booleans())
def test_splits_lose_nothing(tmp_path_factory, texts, size, bom, end, last):
    "Cut anywhere, by any size: each line once, with its number"
    path = tmp_path_factory.mktemp('s')/'x.jsonl'
    lines = ['' if t is None else json.dumps(dict(t=t), ensure_ascii=False) for t in texts]
    data = end.join(lines)+(end if last and lines else '')
    path.write_bytes((b'\xef\xbb\xbf' if bom else b'')+data.encode('utf-8', 'surrogatepass'))
    want = [(0, i, dict(t=t)) for i,t in enumerate(texts) if t is not None]
    if not path.stat().st_size: assert read(path, size)==[]
    else: assert read(path, size, )==want

def test_damage(tmp_path):
    p = tmp_path/'x.jsonl'
    p.write_bytes(LINES[:-9])                                   # cut in a line
    *good,last = records(p)
    assert good==DATA[:-1] and isinstance(last, RecordError) and last.reason=='not JSON'
    p.write_bytes(b'{"a":"\xff"}\n{"a":1}\n[2]\n"x"\nnope\n'+b'['*100_000+b'\n')
    got = records(p)
    assert [getattr(o, 'reason', o) for o in got]==['bad text', {'a':1}, [2], 'x', 'not JSON', 'not JSON']
    p.write_bytes(b'{"a":1}\nnull\n\n{"a":2}\n')            # null is a record, though a wrong one
    assert [(i,o) for _,i,o in read(p)]==[(0,{'a':1}), (1,None), (3,{'a':2})]
    p.write_bytes(b'')
    assert records(p)==[]
    p.write_bytes(json.dumps(dict(text='x'*5_000_000)).encode()+b'\n{"text":"y"}')
    assert [len(o['text']) for o in records(p, size=1000)]==[5_000_000,1]
    for name,data,words in ('x.jsonl.gz',gzip.compress(LINES)[:-20],'damaged'), ('x.jsonl.zst',zst(LINES)[:-9],''), ('x.json',b'[1,','not JSON'), ('y.json',b'3','expected an object'), ('x.parquet',b'no','cannot be read'), ('x.arrow',b'no arrow here','cannot be read'):
        (tmp_path/name).write_bytes(data)
        with pytest.raises(ValueError, match=f'{name}.*{words}'): records(tmp_path/name)

def test_names(tmp_path):
    assert text_file('a/b.JSONL.GZ')[1:]==('jsonl','gzip') and text_file('b.txt')[1:]==('jsonl',None)
    with pytest.raises(FileNotFoundError, match='holds no files of records'): list_inputs(tmp_path)
    with pytest.raises(ValueError, match='no inputs'): list_inputs([])


def test_odd_names_of_local_files(tmp_path, monkeypatch):
    "Names that would mean something in an address, or as a user's home, are names"
    monkeypatch.chdir(tmp_path)
    for name in ('a::b.jsonl', '~nobody.jsonl', 'c [1]*.jsonl', 'é ü.jsonl'):
        (tmp_path/name).write_text('{"text": "a"}\n')
        for p in (name, tmp_path/name):
            files = list_inputs(p)
            assert [f.path for f in files] == [str(tmp_path/name)]
            assert [s.stop for s in input_splits(files)] == [14]
