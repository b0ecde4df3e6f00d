"""Shards as Megatron's indexed dataset, read back byte by byte as the layout says, and as Parquet, read back by other libraries."""
import json, os, struct, tracemalloc
from pathlib import Path
import numpy as np, polars as pl, pyarrow.parquet as pq, pytest
from hypothesis import given, settings, strategies as st
import fastseqprep.text_export as text_export
from fastseqprep.files import StoreError
from fastseqprep.ragged import lengths_to_offsets
from fastseqprep.text_export import MEGATRON_TYPES, export_megatron, export_parquet
from fastseqprep.token_store import ShardArray, TokenStore, write_token_shard

def megatron(prefix):
    "Type, sequences, and documents as lists of sequences; every byte of both files is accounted for"
    raw,data = Path(f'{prefix}.idx').read_bytes(),Path(f'{prefix}.bin').read_bytes()
    magic,version,code,n,d = struct.unpack_from('<9sQBQQ', raw)
    assert (magic, version)==(b'MMIDIDX\0\0', 1)
    dtype = np.dtype({v:k for k,v in MEGATRON_TYPES.items()}[code])
    lengths = np.frombuffer(raw, '<i4', n, 34)
    pointers,documents = (np.frombuffer(raw, '<i8', k, at) for k,at in ((n,34+4*n),(d,34+12*n)))
    assert len(raw)==34+12*n+8*d and documents[0]==0 and documents[-1]==n and (np.diff(documents)>=0).all()
    assert pointers.tolist()==[0,*np.cumsum(lengths.astype(np.int64)*dtype.itemsize)[:-1].tolist()][:n] and len(data)==lengths.astype(np.int64).sum()*dtype.itemsize
    rows = [np.frombuffer(data, dtype, l, p).tolist() for l,p in zip(lengths, pointers)]
    return dtype,rows,[rows[i:j] for i,j in zip(documents[:-1], documents[1:])]

def write_shards(folder, shards, dtype='int32', bins=False):
    "Shards of given rows, as domain → list of shards"
    for domain,found in shards.items():
        for i,rows in enumerate(found):
            values,offsets = np.array([o for r in rows for o in r], dtype),lengths_to_offsets([len(r) for r in rows])
            where = folder/domain/f'shard_{i:04}'
            write_token_shard(lambda o: where/o, dict(sequence=ShardArray(values, dtype, offsets), loss_mask=ShardArray(values%2==1, 'bool', offsets)))
    return folder

ROWS = st.lists(st.lists(st.integers(0, 250), max_size=9), max_size=12)
@settings(max_examples=40, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=3), ROWS, st.sampled_from(['uint8','uint16','int16','int32','int64']), st.integers(1, 20))
def test_read_back(tmp_path_factory, a, b, dtype, most):
    "All rows, empty ones too, in the order of the store, whatever is copied at once"
    where = tmp_path_factory.mktemp('m')
    write_shards(where/'s', dict(a=a, b=[b]), dtype)
    rows = [r for o in [*a,b] for r in o]
    before,text_export.EXPORT_SLICE = text_export.EXPORT_SLICE,most
    try:
        told = export_megatron(where/'s', where/'m')
        export_parquet(where/'s', where/'p.parquet')
    finally: text_export.EXPORT_SLICE = before
    kind,found,documents = megatron(where/'m')
    assert (kind.name, found, documents)==(dtype, rows, [[r] for r in rows])
    assert told==dict(sequences=len(rows), documents=len(rows), tokens=sum(map(len, rows)))
    df = pl.read_parquet(where/'p.parquet')
    assert df['sequence'].to_list()==rows and df['domain'].to_list()==['a']*sum(map(len, a))+['b']*len(b)
    assert df['loss_mask'].to_list()==[[bool(x%2) for x in r] for r in rows] and df.columns==['sequence','loss_mask','domain']
    assert pq.ParquetFile(where/'p.parquet').metadata.num_rows==len(rows)

@pytest.mark.parametrize('dtype,code', MEGATRON_TYPES.items())
def test_types(tmp_path, dtype, code):
    values = np.array([0,1,127], dtype)
    write_token_shard(lambda o: tmp_path/'s'/o, dict(sequence=ShardArray(values, dtype, [0,3])))
    export_megatron(tmp_path/'s', tmp_path/'m')
    raw = (tmp_path/'m.idx').read_bytes()
    assert raw[17]==code and (tmp_path/'m.bin').read_bytes()==values.astype(values.dtype.newbyteorder('<')).tobytes()

def test_types_without_a_code(tmp_path):
    write_token_shard(lambda o: tmp_path/'s'/o, dict(sequence=ShardArray(np.array([1], 'uint32'), 'uint32', [0,1]), half=ShardArray(np.array([1.]), 'float16', [0,1])))
    for k,t in ('sequence','uint32'),('half','float16'):
        with pytest.raises(ValueError, match=f"{k} is of {t}.*output.dtype.{k}"): export_megatron(tmp_path/'s', tmp_path/'m', key=k)
    assert sorted(os.listdir(tmp_path))==['s']

def test_vocabulary_borders(tmp_path):
    "65,535 fits uint16 and stays what it is"
    write_token_shard(lambda o: tmp_path/'s'/o, dict(sequence=ShardArray(np.array([0,65_535,32_768]), 'uint16', [0,3])))
    export_megatron(tmp_path/'s', tmp_path/'m')
    export_parquet(tmp_path/'s', tmp_path/'p.parquet')
    assert megatron(tmp_path/'m')[1]==[[0,65_535,32_768]]==pl.read_parquet(tmp_path/'p.parquet')['sequence'].to_list()

def test_documents(tmp_path):
    "A record is a document: the rows of its list field, and pieces that follow one another, and only those"
    write_token_shard(lambda o: tmp_path/'g'/o, dict(prompts=ShardArray(np.arange(3), 'int32', [0,1,2,3]), responses=ShardArray(np.arange(7), 'int32', [0,2,2,5,7], [0,3,3,4])))
    export_megatron(tmp_path/'g', tmp_path/'r', key='responses')
    assert megatron(tmp_path/'r')[2]==[[[0,1],[],[2,3,4]],[],[[5,6]]]
    export_parquet(tmp_path/'g', tmp_path/'r.parquet')
    assert pl.read_parquet(tmp_path/'r.parquet')['responses'].to_list()==[[[0,1],[],[2,3,4]],[],[[5,6]]]
    pieces = [[4,0],[4,2],[4,7],[5,0],[4,3]] # the third has a gap before it, the last is elsewhere
    write_token_shard(lambda o: tmp_path/'p/shard_0'/o, dict(sequence=ShardArray(np.arange(10), 'int32', [0,2,4,6,8,10])), bins=[0,3,5], pieces=pieces)
    write_token_shard(lambda o: tmp_path/'p/shard_1'/o, dict(sequence=ShardArray(np.arange(10,13), 'int32', [0,1,3])), bins=[0,2], pieces=[[7,0],[7,1]])
    assert export_megatron(tmp_path/'p', tmp_path/'m')==dict(sequences=7, documents=5, tokens=13)
    assert megatron(tmp_path/'m')[2]==[[[0,1],[2,3]],[[4,5]],[[6,7]],[[8,9]],[[10],[11,12]]]
    export_parquet(tmp_path/'p', tmp_path/'m.parquet')
    assert pl.read_parquet(tmp_path/'m.parquet').select('record','first_token','bin').rows()==[(*o,b) for o,b in zip(pieces, (0,0,0,1,1))]+[(7,0,2),(7,1,2)]

def test_nothing_is_replaced_unasked(tmp_path):
    write_shards(tmp_path/'s', dict(a=[[[1,2]]]))
    write_shards(tmp_path/'t', dict(a=[[[3]]]))
    for there in 'm.bin','m.idx':
        (tmp_path/there).write_text('mine')
        with pytest.raises(FileExistsError, match=f'{there} is there already.*overwrite=True'): export_megatron(tmp_path/'s', tmp_path/'m')
        assert (tmp_path/there).read_text()=='mine'
        (tmp_path/there).unlink()
    (tmp_path/'p').write_text('mine')
    with pytest.raises(FileExistsError): export_parquet(tmp_path/'s', tmp_path/'p')
    assert (tmp_path/'p').read_text()=='mine'
    for o in 's','t':
        export_megatron(tmp_path/o, tmp_path/'m', overwrite=True)
        export_parquet(tmp_path/o, tmp_path/'p', overwrite=True)
    assert megatron(tmp_path/'m')[1]==[[3]]==pl.read_parquet(tmp_path/'p')['sequence'].to_list()

def test_a_failed_export_leaves_nothing_wrong(tmp_path, monkeypatch):
    "Where it fails in the middle, an index never tells of tokens that are not there"
    write_shards(tmp_path/'s', dict(a=[[[1,2]],[[3]]]))
    export_megatron(tmp_path/'s', tmp_path/'old')
    def broken(values): yield values[:1]; raise OSError('disk full')
    monkeypatch.setattr(text_export, '_sliced', broken)
    for name,overwrite in ('new',False),('old',True):
        with pytest.raises(OSError, match='disk full'): export_megatron(tmp_path/'s', tmp_path/name, overwrite=overwrite)
    assert sorted(os.listdir(tmp_path))==['old.bin','s'] # what remains has no index, so it is not opened
    monkeypatch.setattr(text_export, '_list_column', lambda *a: 1/0)
    with pytest.raises(ZeroDivisionError): export_parquet(tmp_path/'s', tmp_path/'p.parquet')
    assert sorted(os.listdir(tmp_path))==['old.bin','s']

def test_what_cannot_be_exported(tmp_path):
    write_shards(tmp_path/'s', dict(a=[[[1,2]]]))
    with pytest.raises(KeyError, match="did you mean 'loss_mask'"): export_megatron(tmp_path/'s', tmp_path/'m', key='los_mask')
    with pytest.raises(ValueError, match='no domain'): export_parquet(tmp_path/'s', tmp_path/'p', domains='b')
    with pytest.raises(FileNotFoundError): export_parquet(tmp_path/'nothing', tmp_path/'p')
    write_token_shard(lambda o: tmp_path/'d'/o, dict(domain=ShardArray(np.array([1]), 'int32', [0,1])))
    with pytest.raises(ValueError, match="output 'domain' has the name of a column"): export_parquet(tmp_path/'d', tmp_path/'p')
    (tmp_path/'s/a/shard_0000/meta.json').write_text(json.dumps(dict(sequence=dict(shape=[2], dtype='int32'))))
    for f in export_megatron,export_parquet:
        with pytest.raises(StoreError, match='does not say where records begin'): f(tmp_path/'s', tmp_path/'m')
    assert sorted(os.listdir(tmp_path))==['d','s']

def test_chosen_keys_and_domains(tmp_path):
    write_shards(tmp_path/'s', dict(a=[[[1,2]]], b=[[[3]]]))
    export_parquet(tmp_path/'s', tmp_path/'p', keys='loss_mask', domains='b')
    assert pl.read_parquet(tmp_path/'p').to_dict(as_series=False)==dict(loss_mask=[[True]], domain=['b'])
    export_megatron(tmp_path/'s', tmp_path/'m', key='loss_mask', domains=['a'])
    assert megatron(tmp_path/'m')[:2]==(np.dtype('uint8'), [[1,0]])

def test_memory_does_not_grow(tmp_path):
    "Slice by slice: what is held at once is a part of the data"
    rows = 40_000
    offsets = np.arange(rows+1)*200
    write_token_shard(lambda o: tmp_path/'s'/o, dict(sequence=ShardArray((np.full(200_000, i, 'int32') for i in range(40)), 'int32', offsets)))
    size = (tmp_path/'s/sequence.bin').stat().st_size
    before,text_export.EXPORT_SLICE = text_export.EXPORT_SLICE,100_000
    try:
        for export in lambda: export_megatron(tmp_path/'s', tmp_path/'m'), lambda: export_parquet(tmp_path/'s', tmp_path/'p'):
            tracemalloc.start()
            export()
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert size>30e6 and peak<size/4, peak
    finally: text_export.EXPORT_SLICE = before
    assert pq.ParquetFile(tmp_path/'p').num_row_groups==80 and megatron(tmp_path/'m')[1][-1]==[39]*200

def test_by_megatron(tmp_path):
    pytest.importorskip('megatron.core')
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    write_shards(tmp_path/'s', dict(a=[[[1,2],[],[3]]]))
    export_megatron(tmp_path/'s', tmp_path/'m')
    d = IndexedDataset(str(tmp_path/'m'))
    assert [d[i].tolist() for i in range(len(d))]==[[1,2],[],[3]] and d.document_indices.tolist()==[0,1,2,3]

def test_by_datasets(tmp_path):
    datasets = pytest.importorskip('datasets')
    write_shards(tmp_path/'s', dict(a=[[[1,2],[],[3]]]))
    export_parquet(tmp_path/'s', tmp_path/'p.parquet')
    d = datasets.load_dataset('parquet', data_files=str(tmp_path/'p.parquet'), split='train', cache_dir=str(tmp_path/'cache'))
    assert d['sequence'][:]==[[1,2],[],[3]] and d['loss_mask'][0]==[True,False]
