"Token shards: what was written is what is read, as a stream, as rows and as bins, and what is wrong is said."
import json, os, pickle, re, unicodedata
import numpy as np, pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from text_cases import DATASETS, starting, tokenizers, tree_of, write_tree
from fastseqprep.files import StoreError, safe_join
from fastseqprep.ragged import lengths_to_offsets
from fastseqprep.store import Manifest, read_manifest, write_manifest
from fastseqprep.text_pipeline import TextPipeline
from fastseqprep.token_store import OFFSETS_INSIDE, Segment, ShardArray, TokenStore, domain_folders, safe_domain, window_starts, write_token_shard

def shard(folder, lengths, dtype='int32', start=0, key='sequence', **kwargs):
    o = lengths_to_offsets(lengths)
    write_token_shard(lambda f: folder/f, {key:ShardArray(np.arange(start, start+o[-1]), dtype, o)}, **kwargs)

# The recorded slices. [5,5] lies on a border of shards and is empty: it was an error of the joining, and is an empty array here.
def test_recorded_fetch(tmp_path):
    case = starting(DATASETS, '80')
    for i,v in enumerate((case['a'], case['b'])): write_tree(tmp_path, {f'd/shard_{i:04d}':dict(values=dict(sequence=v[0]), meta=dict(sequence=dict(shape=[len(v[0])], dtype='int32')))})
    store = TokenStore(tmp_path)
    assert len(store)==case['expected']['token_count']
    for o in case['expected']['fetch']:
        if o['span']==[5,5]: assert store.fetch(5, 5).tolist()==[]
        elif 'error' in o:
            with pytest.raises(ValueError): store.fetch(*o['span'])
        else:
            assert store.fetch(*o['span'], 'sequence').tolist()==o['data']
            assert store.fetch(*o['span'], ['sequence'])['sequence'].dtype==np.int32

def test_offsets_over_several_shards(tmp_path):
    "Each shard says where its records begin, so all of them are records: once there were none"
    store = TokenStore(write_tree(tmp_path, starting(DATASETS, '78')['shards']))
    assert store.n_records==4
    want = [o for s in starting(DATASETS, '78')['shards'].values() for o in np.split(s['values']['chosen'], s['meta']['chosen']['offsets'][1:-1])]
    assert [store.record(i)['chosen'].tolist() for i in range(4)]==[o.tolist() for o in want]

def test_shards_by_number(tmp_path):
    for i in 0,1,2,10,11: shard(tmp_path/f'd/shard_{i}', [1], start=i)
    assert TokenStore(tmp_path).fetch(0, 5).tolist()==[0,1,2,10,11]

sizes = st.lists(st.lists(st.integers(0, 6), min_size=0, max_size=6), min_size=1, max_size=5)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes, st.sampled_from(['uint16','int32','int64']), st.data())
def test_any_slices_and_rows(tmp_path_factory, shards, dtype, data):
    root,start = tmp_path_factory.mktemp('s'),0
    for i,lengths in enumerate(shards):
        shard(root/f'd/shard_{i:04d}', lengths, dtype, start)
        start += sum(lengths)
    store,flat = TokenStore(root),[n for s in shards for n in s]
    assert len(store)==start and store.n_records==len(flat) and store.lengths().tolist()==flat
    places = lengths_to_offsets(flat)
    if flat:
        idx = data.draw(st.lists(st.integers(0, len(flat)-1), max_size=8))
        got = store.rows('sequence', np.array(idx, np.int64))
        assert [o.tolist() for o in got.to_rows()]==[list(range(places[i], places[i+1])) for i in idx]
        assert got.values.dtype==np.dtype(dtype) and store.rows('sequence', np.array(idx, np.int64), np.int64).values.dtype==np.int64
    if start:
        a = data.draw(st.integers(0, start-1)); b = data.draw(st.integers(a, start))
        assert store.fetch(a, b).tolist()==list(range(a, b))
        starts = data.draw(st.lists(st.integers(0, start-1), max_size=6))
        lens = [data.draw(st.integers(0, start-o)) for o in starts]
        assert store.slices('sequence', starts, lens).tolist()==[x for o,n in zip(starts, lens) for x in range(o, o+n)]

@pytest.mark.parametrize('rows', [OFFSETS_INSIDE, OFFSETS_INSIDE+1])
def test_offsets_inside_or_beside(tmp_path, rows):
    lengths = np.arange(rows)%3
    groups = lengths_to_offsets([rows//2, rows-rows//2])
    o = lengths_to_offsets(lengths)
    files = write_token_shard(lambda f: tmp_path/f, dict(a=ShardArray(np.arange(o[-1]), 'int32', o, groups)))
    assert ('a.offsets.bin' in files)==(rows>OFFSETS_INSIDE)==('offsets' not in json.loads((tmp_path/'meta.json').read_text())['a'])
    assert list(files)[-1]=='meta.json'
    s = TokenStore(tmp_path)
    assert s.lengths().tolist()==lengths.tolist() and s.groups('a').tolist()==groups.tolist() and s.n_records==2

def test_slices_are_written_as_one(tmp_path):
    write_token_shard(lambda f: tmp_path/f, dict(a=ShardArray((np.arange(i, i+3) for i in (0,3,6)), 'uint16', [0,9])))
    assert TokenStore(tmp_path).fetch(0, 9).tolist()==list(range(9))
    assert (tmp_path/'a.bin').read_bytes()==np.arange(9, dtype='<u2').tobytes()
    assert (tmp_path/'meta.json').read_text()=='{"a": {"shape": [9], "dtype": "uint16", "offsets": [0, 9]}}'

def test_empty_arrays_map(tmp_path):
    write_token_shard(lambda f: tmp_path/f, dict(a=ShardArray(np.zeros(0), 'int32', [0,0])))
    s = TokenStore(tmp_path)
    assert (len(s), s.n_records, s.rows('a', [0]).values.tolist())==(0, 1, [])

def test_nothing_is_read_before(tmp_path):
    shard(tmp_path/'d/shard_0000', [2]*5)
    s = TokenStore(tmp_path)
    assert all(isinstance(v, np.memmap) for o in s.segments for v in o.values.values())
    back = pickle.loads(pickle.dumps(s))
    assert isinstance(back.segments[0].values['sequence'], np.memmap) and back.fetch(0, 10).tolist()==s.fetch(0, 10).tolist()

@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(st.characters(codec=None), max_size=12) | st.sampled_from(['CON','con','Nul.x','..','../x','/','a/b','a\\b','.','','x.',' x','%','é','e\u0301','a'*300,'a'*299+'b']), unique=True, max_size=6))
def test_domains_are_safe_and_apart(names):
    found = domain_folders(names)
    folders = [found[o] for o in names]
    assert len({unicodedata.normalize('NFC', o).casefold() for o in folders})==len(names)
    for name,o in zip(names, folders):
        assert o not in ('','.','..') and not set(o) & set('/\\:\0*?"<>|') and o[-1] not in '. ' and o[0]!='.' and len(o.encode())<=255
        assert o.partition('.')[0].lower() not in {'con','prn','aux','nul','com1','lpt9'}
        safe_join('out', o)
        if name.isascii() and name.isalnum() and name.lower()==name and name not in ('con','prn','aux','nul') and len(name)<100: assert safe_domain(name)==name

# What is wrong is found when the store is opened
def test_cut_file(tmp_path):
    shard(tmp_path/'d/shard_0000', [3,3])
    os.truncate(tmp_path/'d/shard_0000/sequence.bin', 20)
    with pytest.raises(StoreError, match='sequence.bin has 20 bytes, expected 24'): TokenStore(tmp_path)

def test_missing_file(tmp_path):
    shard(tmp_path/'d/shard_0000', [3,3])
    os.remove(tmp_path/'d/shard_0000/sequence.bin')
    with pytest.raises(StoreError, match='sequence.bin is missing'): TokenStore(tmp_path)

@pytest.mark.parametrize('offsets', [[0,3,2,6],[0,3],[1,6],[]])
def test_wrong_offsets(tmp_path, offsets):
    write_tree(tmp_path, {'d/shard_0000':dict(values=dict(a=[1]*6), meta=dict(a=dict(shape=[6], dtype='int32', offsets=offsets)))})
    with pytest.raises(StoreError, match="offsets of 'a' go wrong"): TokenStore(tmp_path)

def test_shards_that_differ(tmp_path):
    shard(tmp_path/'a/shard_0000', [2]); shard(tmp_path/'b/shard_0000', [2], 'uint16')
    with pytest.raises(StoreError, match='of uint16.*of int32'): TokenStore(tmp_path)
    shard(tmp_path/'c/shard_0000', [2], key='chosen')
    with pytest.raises(StoreError, match='has chosen, but'): TokenStore(tmp_path, domains=['a','c'])
    assert len(TokenStore(tmp_path, domains='a'))==len(TokenStore(tmp_path/'a'))==len(TokenStore(tmp_path/'a/shard_0000'))==2

def test_no_offsets_no_records(tmp_path):
    s = TokenStore(tree_of('04', tmp_path))
    assert s.n_records==0 and not s.has_offsets
    with pytest.raises(StoreError, match='without offsets'): s.record(0)

def test_a_name_that_leads_elsewhere(tmp_path):
    write_tree(tmp_path, {'d/shard_0000':dict(values=dict(a=[1]), meta=dict(a=dict(shape=[1], dtype='int32')))})
    (tmp_path/'d/shard_0000/meta.json').write_text('{"../../x": {"shape": [1], "dtype": "int32"}}')
    with pytest.raises(StoreError): TokenStore(tmp_path)

# A run is read by its manifest, or not at all
def run(folder, **output):
    "A finished run, and how to make it again"
    (folder/'in').mkdir()
    (folder/'in/d.jsonl').write_text(''.join(json.dumps(dict(text=f'the sea is {i}', site=f's{i%2}'))+'\n' for i in range(40)))
    toks = tokenizers(folder/'toks')/'plain'
    cfg = dict(input=dict(sections=[dict(field='text', action='train')]), preprocessing=dict(min_chars=0), **output)
    def again(**kwargs): return TextPipeline(cfg, folder/'in/d.jsonl', folder/'runs/out', toks, progress=False, **kwargs).run()
    again()
    return folder/'runs/out',again

def refused(path, match, part=None):
    with pytest.raises(StoreError, match=match): TokenStore(path, part)

@pytest.mark.parametrize('output', [{}, dict(validation=.3), dict(output=dict(domain_key='site')), dict(validation=.3, output=dict(domain_key='site'))])
def test_some_shards_of_a_killed_run(tmp_path, monkeypatch, output):
    "No folder over or under it is opened, as nobody knows which shards are missing"
    import fastseqprep.resume as resume
    real = resume.move_file
    def move(src, dst):
        real(src, dst)
        if dst.name=='meta.json': raise KeyboardInterrupt
    monkeypatch.setattr(resume, 'move_file', move)
    with pytest.raises(KeyboardInterrupt): run(tmp_path, **output)
    monkeypatch.undo()
    out = tmp_path/'runs/out'
    shards = [o.parent for o in out.rglob('meta.json') if '.run' not in o.parts]
    assert shards and (out/'.run/run.json').exists()
    folders = {p for s in shards for p in (s, *s.parents) if tmp_path/'runs' in (p, *p.parents)}
    assert {tmp_path/'runs', out}<folders
    for o in folders: refused(o, f'{re.escape(str(out))} holds a run that was not finished: run the job again')
    (tmp_path/'link').symlink_to(shards[0].parent)
    monkeypatch.chdir(shards[0])
    for o in tmp_path/'link','.','..': refused(o, 'out holds a run that was not finished')

def test_another_tools_shards_beside_a_killed_run(tmp_path):
    "Where no shard of the run is read, it does not matter"
    for o in 'run','a/run': (tmp_path/o/'.run').mkdir(parents=True); (tmp_path/o/'.run/run.json').write_text('{}')
    shard(tmp_path/'x/d/shard_0000', [2]); shard(tmp_path/'a/run/astrai/d/shard_0000', [2])
    assert len(TokenStore(tmp_path/'x'))==len(TokenStore(tmp_path/'a/run/astrai'))==2
    refused(tmp_path, 'a/run holds a run that was not finished')

@pytest.mark.parametrize('output', [{}, dict(domain_key='site')])
def test_parts_without_their_manifest(tmp_path, output):
    out,again = run(tmp_path, validation=.3, output=output)
    want = {o:TokenStore(out, o).fetch(0, 5).tolist() for o in ('train','validation')}
    for o in want: assert TokenStore(out/o).fetch(0, 5).tolist()==want[o]
    os.remove(out/'manifest.json')
    for path in out,out.parent:
        for part in None,'train','validation': refused(path, f'{re.escape(str(out))} holds train and validation, but the manifest.json .* is missing: open .*out/train or .*out/validation, or run the job again', part)
    for o in want: assert TokenStore(out/o).fetch(0, 5).tolist()==want[o]
    again(overwrite=True)
    assert TokenStore(out, 'validation').fetch(0, 5).tolist()==want['validation']

def test_domains_that_are_called_train_and_validation(tmp_path):
    "Another tool's domains are no parts: those have domains in them"
    for o in 'train','validation': shard(tmp_path/f'a/{o}/shard_0000', [2]); shard(tmp_path/f'{o}-b/{o}/d/shard_0000', [2])
    assert TokenStore(tmp_path/'a').domains==['train','validation']
    assert len(TokenStore(tmp_path/'train-b'))==len(TokenStore(tmp_path/'validation-b'))==2

def test_a_folder_of_finished_runs(tmp_path):
    out,_ = run(tmp_path, validation=.3)
    for o in out.parent,tmp_path: refused(o, f'{re.escape(str(o))} has no manifest.json, but holds shards of finished runs, in {re.escape(str(out))}: open that folder')
    shard(out.parent/'other/d/shard_0000', [2])
    refused(out.parent, 'finished runs, in .*out: open that folder')
    assert len(TokenStore(out.parent/'other'))==2 and len(TokenStore(out))
    shard(out.parent/'deep/a/b/c/shard_0000', [2]); write_manifest(out.parent/'deep', Manifest(job='text'))
    refused(out.parent, 'finished runs, in .*deep, .*out: open one of these folders')
    shard(out/'astrai/shard_0000', [2])
    assert len(TokenStore(out/'astrai'))==2 and TokenStore(out/'train/__default__').domains==['__default__']

@pytest.mark.parametrize('facts', [{}, dict(parts=['']), dict(parts=[], shards=[]), dict(parts='train', shards=[]), dict(parts=[''], shards=[{}]), dict(parts=[''], shards=None), dict(parts=[''], shards=['d/shard_0000'])])
def test_a_manifest_without_its_facts(tmp_path, facts):
    out,again = run(tmp_path)
    want = TokenStore(out).lengths().tolist()
    write_manifest(out, read_manifest(out).model_copy(update=dict(facts=facts)))
    for part in None,'train': refused(out, f'{re.escape(str(out))}/manifest.json is damaged.*: run the job again', part)
    again(overwrite=True)
    assert TokenStore(out).lengths().tolist()==want

@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 25))
def test_window_starts(n, w, s):
    want = [] if n<=w else [min(i*s, n-1-w) for i in range((n-1-w)//s+1)]
    assert window_starts(n, w, s).tolist()==want
