"Sources: the same rows from any kind of table, in the same order, exact ids and times, and one clear error for what is wrong"
import datetime as dt,gzip,json,pickle,random,subprocess,sys,zoneinfo
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import fsspec, numpy as np, pandas as pd, polars as pl, pyarrow as pa, pytest
from hypothesis import given, settings, strategies as st
from fastseqprep.source import *
from fastseqprep.times import TimeRule, Where, read_times

at = Where('ratings', 'ts', 'r.csv')
roles = dict(cats=['movie','rating'], conts='price', texts='note', time_col='ts', entity_col='user')

def table(n=1000, seed=0):
    g = np.random.default_rng(seed)
    return pl.DataFrame(dict(user=g.integers(1,50,n), movie=[f'm{i}' for i in g.integers(0,99,n)], rating=g.integers(1,6,n), price=g.random(n).round(3)+.0005,
        note=[None if i%7==0 else f'note {i}, "quoted"\nline' for i in g.integers(0,99,n)], ts=g.integers(874724710,893286638,n), unused=g.random(n)))

def rows_of(src, rows=500_000): return pl.concat([c for _,_,c in src.chunks(rows)])
def read(vals, *, dtype=None, **kw): return read_times(pl.Series(vals, dtype=dtype, strict=False), TimeRule(**kw), at)
def fails(error, *words, call):
    with pytest.raises(error) as e: call()
    for w in words: assert w in str(e.value), f'{w!r} not in: {e.value}'
    return str(e.value)

# --- tables of all kinds ---
writers = dict(csv=lambda d,f: d.write_csv(f), tsv=lambda d,f: d.write_csv(f, separator='\t'), parquet=lambda d,f: d.write_parquet(f, row_group_size=300),
    ipc=lambda d,f: d.write_ipc(f), feather=lambda d,f: d.write_ipc(f, compression='zstd'), arrow=lambda d,f: d.write_ipc(f), jsonl=lambda d,f: d.write_ndjson(f), ndjson=lambda d,f: d.write_ndjson(f))
def gz(name): return lambda d,f: (writers[name](d, p:=f.with_suffix('.plain')), f.write_bytes(gzip.compress(p.read_bytes())), p.unlink())
writers |= {'csv.gz':gz('csv'), 'jsonl.gz':gz('jsonl'), 'data':writers['csv']}

@pytest.mark.parametrize('suffix', writers)
@pytest.mark.parametrize('rows', [1_000_000, 170, 1000])
def test_files_of_all_kinds(tmp_path, suffix, rows):
    df = table()
    writers[suffix](df, tmp_path/f'r.{suffix}')
    src = DataSource.from_file(tmp_path/f'r.{suffix}', **roles)
    assert src.name=='r' and src.col_names==df.columns and src.df.collect().equals(df) and src.head().equals(df.head())
    chunks = list(src.chunks(rows))
    assert [o for _,o,_ in chunks]==list(range(0,1000,rows)) and {l for l,_,_ in chunks}=={f'r.{suffix}'}
    got = pl.concat([c for _,_,c in chunks])
    assert got.columns==['user','ts','movie','rating','price','note']
    assert got.with_columns(pl.col('rating').cast(pl.Int64)).equals(df.select(got.columns))
    typed = not any(o in suffix for o in ('csv','tsv','json','data'))
    assert got.schema['rating']==(pl.Int64 if typed else pl.String) and got.schema['user']==pl.Int64

def test_frames_of_all_kinds():
    df = table()
    want = df.select('user','ts','movie','rating','price','note')
    for o in (df, df.lazy(), df.to_pandas(), df.to_arrow(), pa.Table.from_pandas(df.to_pandas()), df.lazy().filter(pl.col('user')>0)):
        for src in (DataSource(o, **roles), DataSource.from_df(o, **roles)):
            assert src.scan_specs() is None and src.files is None and src.name=='df'
            for rows in (33, 10_000): assert rows_of(src, rows).equals(want)
            assert [l for l,_,_ in src.chunks()]==[None]
            assert src.head().equals(df.head())

def test_names(tmp_path):
    pdf = table(3).to_pandas()
    pdf.attrs['name'] = 'stars'
    assert DataSource.from_df(pdf, **roles).name=='stars' and DataSource.from_df(pdf, name='x', **roles).name=='x'
    table(3).write_csv(tmp_path/'u.data')
    assert DataSource.from_file(str(tmp_path/'u.data'), **roles).name=='u' and DataSource.from_file(tmp_path/'u.data', name='r', **roles).name=='r'

def test_documented_example(tmp_path):
    (tmp_path/'u.data').write_text('196\t242\t3\t881250949\n186\t302\t3\t891717742\n')
    (tmp_path/'u.user').write_text('1|24|M|technician|85711\n2|53|F|other|94043\n3|23|M|writer|T8H1N\n')
    u = DataSource.from_file(tmp_path/'u.user', separator='|', has_header=False, new_columns=['user_id','age','gender','occupation','zip_code'],
        cats=['gender','zip_code'], conts=['age'], texts=['occupation'], entity_col='user_id', is_profile=True, name='users')
    r = DataSource.from_file(tmp_path/'u.data', separator='\t', has_header=False, new_columns=['user_id','movie_id','rating','timestamp'],
        cats=['movie_id','rating'], time_col='timestamp', entity_col='user_id', name='ratings')
    assert u.df.collect().schema==dict(user_id=pl.Int64, age=pl.Int64, gender=pl.String, occupation=pl.String, zip_code=pl.String)
    assert r.df.collect().schema==dict(user_id=pl.Int64, movie_id=pl.Int64, rating=pl.Int64, timestamp=pl.Int64)
    assert [f[:2] for f in u.fields]==[('gender','cat'),('zip_code','cat'),('age','num'),('occupation','text')]
    assert r.normalised(rows_of(r)).rows()==[(196,881250949,881250949,881250949*10**9,False,'242','3'), (186,891717742,891717742,891717742*10**9,False,'302','3')]
    assert u.normalised(rows_of(u)).row(2)==(3,0,0,0,False,'M','T8H1N',23,'writer')
    assert "name='ratings'" in repr(r) and '891717742' in repr(r) and '<table' in r._repr_html_()

# --- many files ---
def test_file_layout_does_not_matter(tmp_path):
    df = table().with_row_index('i')
    kw = roles|dict(texts=['note','i'])
    for k,cuts in enumerate(([0,1000], [0,1,400,400,1000], list(range(0,1001,100)))):
        (folder:=tmp_path/str(k)).mkdir()
        order = list(range(len(cuts)-1))
        random.Random(k).shuffle(order)                       # written in any order, read by name
        for i in order: df[cuts[i]:cuts[i+1]].write_csv(folder/f'part-{i:03}.csv')
        for path in (folder, f'{folder}/*.csv', f'{folder}/part-*'):
            src = DataSource.from_file(path, **kw)
            got = rows_of(src, 77)
            assert got['i'].to_list()==[str(i) for i in range(1000)]
            assert got.schema==dict(user=pl.Int64, ts=pl.Int64, movie=pl.String, rating=pl.String, price=pl.Float64, note=pl.String, i=pl.String)
        assert [s.label for s in src.scan_specs()]==[f'part-{i:03}.csv' for i in sorted(order)]
        assert pl.concat([c for s in src.scan_specs() for _,_,c in read_chunks(s)]).equals(got)

def test_files_that_differ(tmp_path):
    pl.DataFrame(dict(user=[1], x=[1], c=[None], ts=[dt.datetime(2021,1,1)], extra=['a'])).cast({'ts':pl.Datetime('ms'),'user':pl.Int32}).write_parquet(tmp_path/'a.parquet')
    pl.DataFrame(dict(ts=[dt.datetime(2021,1,2)], c=['k'], x=[.5], user=[2**40], other=[[1]])).cast({'ts':pl.Datetime('ns')}).write_parquet(tmp_path/'b.parquet')
    src = DataSource.from_file(tmp_path, cats='c', conts='x', time_col='ts', entity_col='user')
    got = src.normalised(rows_of(src))
    assert got.rows()==[(1,1609459200*10**9,1609459200,1609459200*10**9,False,None,1.), (2**40,1609545600*10**9,1609545600,1609545600*10**9,False,'k',.5)]
    assert src.col_names==['user','x','c','ts'] and src.df.collect().height==2
    pl.DataFrame(dict(user=['u'], x=['1'], ts=[1])).write_parquet(tmp_path/'c.parquet')
    fails(ValueError, "'user' is Int32 in a.parquet but Int64 in b.parquet but String in c.parquet", "'x' is Int64 in a.parquet but Float64 in b.parquet but String in c.parquet",
          "'c' is missing in c.parquet", "'ts' is Datetime", call=lambda: DataSource.from_file(tmp_path, cats='c', conts='x', time_col='ts', entity_col='user'))

def test_csv_files_that_differ(tmp_path):
    (tmp_path/'a.csv').write_text('user,zip,x,ts\n1,12345,1,10\n')
    (tmp_path/'b.csv').write_text('ts,x,zip,user\n20,2.5,T8H1N,2\n')
    (tmp_path/'c.csv').write_text('user,zip,x,ts\n')           # a header only
    (tmp_path/'d.csv').write_text('user,zip,x,ts\n3,,,30\n')    # nothing in two columns
    src = DataSource.from_file(tmp_path, cats='zip', conts='x', time_col='ts', entity_col='user')
    assert rows_of(src).rows()==[(1,10,'12345',1.), (2,20,'T8H1N',2.5), (3,30,None,None)]
    (tmp_path/'e.csv').write_text('user,zip,ts\nu9,5,soon\n')
    fails(ValueError, "'user' is Int64 in a.csv, b.csv, d.csv but String in e.csv: say schema_overrides={'user': ...}", "'x' is missing in e.csv", "'ts' is Int64 in a.csv, b.csv, d.csv but String in e.csv",
          call=lambda: DataSource.from_file(tmp_path, cats='zip', conts='x', time_col='ts', entity_col='user'))

def test_json_files_that_differ(tmp_path):
    (tmp_path/'a.jsonl').write_text('{"user":1,"c":5,"ts":10}\n')
    (tmp_path/'b.jsonl').write_text('{"user":2,"c":"T8","ts":20}\n')
    kw = dict(cats='c', time_col='ts', entity_col='user')
    assert rows_of(DataSource.from_file(tmp_path, **kw)).rows()==[(1,10,'5'),(2,20,'T8')]
    (tmp_path/'c.jsonl').write_text('{"user":3,"c":[1],"ts":20}\n')
    fails(ValueError, "'c' is Int64 in a.jsonl but String in b.jsonl but List(Int64) in c.jsonl", call=lambda: DataSource.from_file(tmp_path, **kw))

def test_partitioned_folders(tmp_path):
    for day in ('2021-05-03','2021-05-04'):
        (tmp_path/f'day={day}').mkdir()
        pl.DataFrame(dict(user=[1])).write_parquet(tmp_path/f'day={day}/0.parquet')
    src = DataSource.from_file(tmp_path, time_col='day', entity_col='user')
    assert src.normalised(rows_of(src))['__time'].to_list()==[1620000000,1620086400]
    assert [l for l,_,_ in src.chunks()]==['day=2021-05-03/0.parquet','day=2021-05-04/0.parquet']

def test_remote(tmp_path):
    fs = fsspec.filesystem('memory')
    try:
        fs.pipe('/shop/b.csv', b'user,ts\n2,20\n')
        fs.pipe('/shop/a.csv', b'user,ts\n1,10\n')
        for path in ('memory://shop', 'memory://shop/*.csv'):
            src = DataSource.from_file(path, time_col='ts', entity_col='user')
            assert [(l,c.rows()) for l,_,c in src.chunks()]==[('a.csv',[(1,10)]),('b.csv',[(2,20)])]
        table().write_parquet(tmp_path/'r.parquet')
        fs.put(str(tmp_path/'r.parquet'), '/shop2/r.parquet')
        assert rows_of(DataSource.from_file('memory://shop2/r.parquet', **roles)).height==1000
        fails(FileNotFoundError, 'memory://none', call=lambda: DataSource.from_file('memory://none', time_col='ts'))
    finally: fs.rm('/shop', recursive=True)

# --- text files: what is guessed, what is kept ---
def big_csv(f, row, n=10_000, header='user,zip,ts,x', first='1,12345,10,5'):
    f.write_text(header+'\n'+(first+'\n')*n+row+'\n')
    return lambda **kw: rows_of(DataSource.from_file(f, **(dict(cats='zip', conts='x', time_col='ts', entity_col='user')|kw)), 3000)

@pytest.mark.parametrize('zip', ['T8H1N','0012','1.50','True','','-0',' 7'])
def test_categories_are_as_written(tmp_path, zip):
    assert big_csv(tmp_path/'f.csv', f'1,{zip},10,5')()['zip'][[0,-1]].to_list()==['12345', zip or None]
    assert big_csv(tmp_path/'g.csv', f'1,{zip},10,5', n=3)()['zip'][[0,-1]].to_list()==['12345', zip or None]

@pytest.mark.parametrize('row,kw,words', [
    ('T8,1,10,5', {}, ["column 'user', row 10,001", "'T8'", "schema_overrides={'user': pl.String}"]),
    ('+12,1,10,5', {}, ["row 10,001", "'+12'"]),
    ('0012,1,10,5', {}, ["column 'user', row 10,001", "'0012'", 'plain Int64']),
    ('18446744073709551615,1,10,5', {}, ["row 10,001", "'18446744073709551615'"]),
    (',1,10,5', {}, ["column 'user', row 10,001", 'the id is null']),
    ('1,1,10,2.5', {}, ["column 'x', row 10,001", "'2.5'", 'pl.Float64']),
    ('1,1,10,n/a', {}, ["column 'x', row 10,001", "'n/a'", 'pl.String']),
    ('1,1,10.5,5', {}, ["column 'ts', row 10,001", "'10.5'", 'pl.Float64']),
    ('1,1,soon,5', {}, ["column 'ts', row 10,001", "'soon'"]),
    ('1,1,10,5,6', {}, ['cannot be read as csv', 'more fields']),
    ('1,1,10,5,6', dict(cats=None, conts=None), ['cannot be read as csv', 'more fields'])])      # in columns that nobody asked for, too
def test_what_the_head_did_not_tell(tmp_path, row, kw, words):
    call = big_csv(tmp_path/'f.csv', row)
    assert 'polars' not in fails(ValueError, 'f (f.csv)', *words, call=lambda: call(**kw))

def test_types_that_are_given(tmp_path):
    assert big_csv(tmp_path/'f.csv', '0012,1,10,2.5')(schema_overrides=dict(user=pl.String, x=pl.Float64))[-1].row(0)==('0012',10,'1',2.5)
    assert big_csv(tmp_path/'f.csv', f'{2**64-1},7,10,5')(schema_overrides=dict(user=pl.UInt64, zip=pl.Int32))[-1].row(0)==(2**64-1,10,7,5)
    schema = dict(user=pl.UInt64, zip=pl.String, ts=pl.Int64, x=pl.Float32)
    assert big_csv(tmp_path/'f.csv', '1,0012,10,2.5')(schema=schema).schema==dict(user=pl.UInt64, ts=pl.Int64, zip=pl.String, x=pl.Float32)
    assert big_csv(tmp_path/'f.csv', '1,1,10,NA')(null_values='NA')['x'][-1] is None
    got = big_csv(tmp_path/'f.csv', '1,1,2021-05-03,5', first='1,1,2021-05-01,5')(try_parse_dates=True)
    assert got.schema['ts']==pl.Date and got['ts'][-1]==dt.date(2021,5,3)
    assert big_csv(tmp_path/'f.csv', '1,1,10,2.5')(infer_schema_length=None).schema['x']==pl.Float64

def test_ids_are_exact(tmp_path):
    ids = [2**63-1, 2**63, 2**64-1, 2**53+1, 0]
    df = pl.DataFrame(dict(user=pl.Series(ids, dtype=pl.UInt64), ts=range(5)))
    for name,write in writers.items():
        write(df, f:=tmp_path/f'r.{name}')
        got = rows_of(DataSource.from_file(f, time_col='ts', entity_col='user'))['user']
        assert got.to_list()==ids, name
    for o in (df, df.to_pandas(), df.to_arrow()): assert rows_of(DataSource(o, time_col='ts', entity_col='user')).schema['user']==pl.UInt64
    (tmp_path/'z.csv').write_text('user,ts\n12,1\n0012,2\n012,3\n')       # three different entities
    assert rows_of(DataSource.from_file(tmp_path/'z.csv', time_col='ts', entity_col='user'))['user'].to_list()==['12','0012','012']
    for dtype in (pl.Categorical, pl.Enum(['a','b'])):
        src = DataSource(pl.DataFrame(dict(user=pl.Series(['b','a'], dtype=dtype), ts=[1,2])), time_col='ts', entity_col='user')
        assert rows_of(src)['user'].to_list()==['b','a'] and rows_of(src).schema['user']==pl.String

@pytest.mark.parametrize('line,words', [('{"user":1,"ts":10,"x":"free"}', ["column 'x', row 10,001", "'free'"]), ('{"user":"a","ts":10,"x":5}', ["column 'user', row 10,001"]),
    ('{"user":1,"ts":10,"x":1.5}', ["column 'x', row 10,001", 'Float64']), ('not json', ['cannot be read as jsonl']), ('{"ts":10,"x":5}', ['the id is null'])])
def test_json_lines_late(tmp_path, line, words):
    (f:=tmp_path/'f.jsonl').write_text('{"user":1,"ts":10,"x":5}\n'*10_000+line+'\n')
    fails(ValueError, 'f (f.jsonl)', *words, call=lambda: rows_of(DataSource.from_file(f, conts='x', time_col='ts', entity_col='user')))

@pytest.mark.parametrize('name,content,words', [('f.csv', b'', ['f (f.csv): the file is empty']), ('f.parquet', b'x', ['f (f.parquet): cannot be read as parquet']),
    ('f.arrow', b'x'*100, ['f (f.arrow): cannot be read as ipc']), ('f.csv', 'user,ts\né,1\n'.encode('latin1'), ['f (f.csv): cannot be read as csv'])])
def test_files_that_are_not_what_they_say(tmp_path, name, content, words):
    (tmp_path/name).write_bytes(content)
    fails(ValueError, *words, call=lambda: DataSource.from_file(tmp_path/name, time_col='ts', entity_col='user'))

def test_no_rows(tmp_path):
    (tmp_path/'h.csv').write_text('user,ts\n')
    table().clear().write_parquet(tmp_path/'h.parquet')
    for o in ('h.csv','h.parquet'):
        src = DataSource.from_file(tmp_path/o, time_col='ts', entity_col='user', name='shop')
        fails(ValueError, f"source 'shop': no rows in {o}", call=lambda: list(src.chunks()))
        assert repr(src)
    fails(ValueError, "source 'df': no rows", call=lambda: list(DataSource(table().clear(), **roles).chunks()))

def test_the_constructor_reads_only_heads(tmp_path):
    (f:=tmp_path/'f.csv').write_text('user,ts\n'+'1,10\n'*1_000_000+'broken,,,,\n')
    src = DataSource.from_file(f, time_col='ts', entity_col='user')
    assert len(src.head())==5
    with pytest.raises(ValueError): rows_of(src)
    def never(_): raise AssertionError('read too early')
    DataSource(table().lazy().map_batches(never, schema=table().schema), **roles)

# --- declarations ---
def test_all_problems_in_one_error():
    msg = fails(ValueError, "source 'ratings'", "cats 'movi' is not a column, did you mean 'movie'?", "'rating' is named twice in cats", "'price' is in both conts and texts",
        "'ts' is in both time_col and lifelong", "signed_conts 'prize' is not in conts, did you mean 'price'?", "time_unit is 'sec'", "time_zone 'Europe/Warsav' is not a known zone; did you mean 'Europe/Warsaw'",
        "null_time is 'skip'", "num_buckets is 0", 'the columns are user, movie,', call=lambda: DataSource(table(), cats=['movi','rating','rating'], conts='price', texts='price',
        signed_conts='prize', time_col='ts', lifelong='ts', entity_col='user', time_unit='sec', time_zone='Europe/Warsav', null_time='skip', num_buckets=0, name='ratings'))
    assert msg.count('\n')==0

@pytest.mark.parametrize('kw,words', [
    (dict(), ["entity_col 'entity_id' is not a column", 'events need a time_col']), (dict(entity_col='usr', time_col='t'), ["did you mean 'user'?", "time_col 't' is not a column"]),
    (dict(entity_col='user', time_col='ts', cats='user'), ["'user' is in both entity_col and cats"]), (dict(entity_col='user', time_col='user'), ["'user' is in both entity_col and time_col"]),
    (dict(entity_col='price', time_col='ts'), ["entity_col 'price' is Float64, expected integers or text", 'cast it to Int64']), (dict(entity_col='flag', time_col='ts'), ["entity_col 'flag' is Boolean"]),
    (dict(entity_col='tags', time_col='ts'), ["entity_col 'tags' is List"]), (dict(entity_col='user', time_col='flag'), ["'flag' is Boolean, expected dates, datetimes"]),
    (dict(entity_col='user', time_col='took'), ["'took' is Duration", 'add it to a start time']), (dict(entity_col='user', time_col='ts', lifelong='took'), ["'took' is Duration"]),
    (dict(entity_col='user', time_col='ts', cats='tags', conts='took', texts='box'), ["'tags' is List(Int64), expected one plain value", "'took' is Duration", "'box' is Struct"]),
    (dict(entity_col='user', time_col='ts', cats='lifelong'), ["'lifelong' is a reserved name"]), (dict(entity_col='user', time_col='ts', cats='__time'), ["'__time' is a reserved name"]),
    (dict(entity_col='user', time_col='ts', conts='price', signed_conts='price', cats='price_sign'), ["'price_sign' is needed for the sign of 'price'"]),
    (dict(entity_col='user', time_col='ts', bad_time='null'), ["bad_time='null' leaves events without a time"]), (dict(entity_col='user', time_col='ts', time_format='ymd'), ["time_format is 'ymd'"]),
    (dict(entity_col='user', time_col='day', time_format='%Y'), ["'day' is Date, which time_format does not apply to"])])
def test_declarations_refused(kw, words):
    df = table(3).with_columns(flag=True, tags=pl.lit([1]), took=pl.duration(days=1), box=pl.struct(a=1), lifelong=1, __time=1, price_sign=1, day=pl.date(2021,1,1))
    fails(ValueError, *words, call=lambda: DataSource(df, **kw))

def test_declarations_accepted():
    p = DataSource(table(3), cats='movie', entity_col='user', is_profile=True, time_col='nowhere')     # a profile's time is not looked at
    assert p.normalised(rows_of(p)).columns==['user','__instant','__time','__past','__bad_time','movie']
    s = DataSource(table(3), ('movie','rating'), ['price'], ['price'], 'note', 'ts', None, 10, 5, 'user', False, 'r')      # positions as documented
    assert (s.cats,s.conts,s.signed_conts,s.texts,s.time_col,s.lifelong,s.num_buckets,s.cardinality_threshold,s.entity_col,s.is_profile,s.name)==(['movie','rating'],['price'],['price'],['note'],'ts',[],10,5,'user',False,'r')
    assert s.fields[2]==Field('price','num',True)

@pytest.mark.parametrize('kw,error,words', [(dict(seperator=','), TypeError, ["'seperator', did you mean 'separator'?"]), (dict(cat='movie'), TypeError, ["'cat', did you mean 'cats'?"]),
    (dict(n_rows=3), TypeError, ["'n_rows'"]), (dict(format='xls'), ValueError, ["format is 'xls', expected one of csv"])])
def test_options_refused(tmp_path, kw, error, words):
    table().write_csv(tmp_path/'r.csv')
    fails(error, *words, call=lambda: DataSource.from_file(tmp_path/'r.csv', **(roles|kw)))

def test_paths_refused(tmp_path):
    fails(FileNotFoundError, 'nope.csv: no such file', call=lambda: DataSource.from_file(tmp_path/'nope.csv', **roles))
    fails(FileNotFoundError, 'no file fits', call=lambda: DataSource.from_file(tmp_path/'*.csv', **roles))
    fails(FileNotFoundError, 'no files there', call=lambda: DataSource.from_file(tmp_path, **roles))
    fails(TypeError, 'from_file', call=lambda: DataSource(str(tmp_path), **roles))
    fails(TypeError, 'expected a polars, pandas or Arrow table', call=lambda: DataSource([1,2], **roles))

def test_pandas_faults():
    pdf = pd.DataFrame(dict(user=[1,2], x=[1,'a'], ts=[1,2]))
    fails(ValueError, "column 'x' of this pandas frame", call=lambda: DataSource(pdf, cats='x', time_col='ts', entity_col='user'))
    fails(ValueError, 'columns of the same name', call=lambda: DataSource(pd.DataFrame([[1,2]], columns=['a','a'])))
    fails(ValueError, "entity_col 'user' is Float64", call=lambda: DataSource(pd.DataFrame(dict(user=[1,None], ts=[1,2])), time_col='ts', entity_col='user'))
    assert rows_of(DataSource(pd.DataFrame(dict(user=pd.array([1,2], dtype='Int64'), ts=[1,2])), time_col='ts', entity_col='user')).schema['user']==pl.Int64

def test_null_ids_are_counted(tmp_path):
    df = pl.DataFrame(dict(user=[1,2,None,None], ts=[1,2,3,4]))
    df.write_parquet(tmp_path/'r.parquet')
    for src,name in ((DataSource(df, time_col='ts', entity_col='user'), 'df:'), (DataSource.from_file(tmp_path/'r.parquet', time_col='ts', entity_col='user'), 'r (r.parquet):')):
        fails(ValueError, f"{name} column 'user', row 3: the id is null; 2 of 4 rows", call=lambda: rows_of(src))
        fails(ValueError, "row 3: the id is null; 1 of 1 rows", call=lambda: rows_of(src, 1))

# --- times ---
ten = 1620036000  # 2021-05-03T10:00:00Z

@pytest.mark.parametrize('vals,kw', [
    ([ten], {}), ([ten*1000+999], dict(unit='ms')), ([ten*10**6], dict(unit='us')), ([ten*10**9+1], dict(unit='ns')), ([ten+.9], {}), ([str(ten)], {}), ([f'{ten}.7'], {}), ([f'{ten}000'], dict(unit='ms')),
    (['2021-05-03T10:00:00Z'], {}), (['2021-05-03 10:00:00'], {}), (['2021-05-03T10:00'], {}), (['2021-05-03T10:00:00.999999Z'], {}), (['2021-05-03T10:00:00,5'], {}), (['2021-05-03T12:00:00+02:00'], {}),
    (['2021-05-03T12:00:00+0200'], {}), (['2021-05-03T12+02'.replace('T12','T12:00')], {}), (['2021-05-03T09:30-00:30'], {}), (['2021-05-03 12:00:00'], dict(zone='Europe/Warsaw')),
    (['03/05/2021 10:00'], dict(format='%d/%m/%Y %H:%M')), (['03/05/2021 12:00 +02:00'], dict(format='%d/%m/%Y %H:%M %z')), ([dt.datetime(2021,5,3,10)], {}), ([dt.datetime(2021,5,3,12)], dict(zone='Europe/Warsaw')),
    ([dt.datetime(2021,5,3,12,tzinfo=zoneinfo.ZoneInfo('Europe/Warsaw'))], dict(zone='Asia/Tokyo')), ([f'  {ten} '], {})])
def test_ten_o_clock(vals, kw): assert read(vals, **kw).seconds.to_list()==[ten]

def test_floors_and_cuts():
    assert read([dt.datetime(1969,12,31,23,59,59,500_000)]).seconds.to_list()==[-1]
    assert read([-500,-1000,-1], unit='ms').seconds.to_list()==[-1,-1,-1]
    assert read([-.5,.5,-10.9,10.9]).seconds.to_list()==[0,0,-10,10]
    assert read(['-0.5','1969-12-31T23:59:59.5Z']).seconds.to_list()==[0,-1]
    assert read([dt.date(2021,5,3)]).seconds.to_list()==[ten-36000] and read([dt.date(2021,5,3)], zone='Asia/Tokyo').seconds.to_list()==[ten-36000-32400]
    assert read(['2021-05']).seconds.to_list()==[1619827200]

def test_order_is_kept():
    for vals,kw in (([ten*10**6+i for i in range(9)], dict(unit='us')), ([f'2021-05-03T10:00:00.{i:06}Z' for i in range(9)], {}), ([ten*10**9+i for i in range(9)], dict(unit='ns')),
                    ([ten+i/8 for i in range(9)], {}), (['2021-05-03T10:00:00.5Z','2021-05-03T12:00:00.6+02:00',str(ten+1)], {}), ([f'2021-05-03T10:00:00.{i:09}Z' for i in range(9)], dict(unit='ns'))):
        i = read(vals, **kw).instant
        assert i.dtype==pl.Int64 and i.is_sorted() and i.n_unique()==len(vals), vals

@settings(max_examples=80, deadline=None)
@given(st.lists(st.datetimes(dt.datetime(1900,1,1), dt.datetime(2200,1,1), timezones=st.sampled_from([None, dt.timezone.utc, dt.timezone(dt.timedelta(hours=5,minutes=45)), dt.timezone(-dt.timedelta(hours=3,minutes=30))])), min_size=1, max_size=8),
       st.sampled_from('T '))
def test_iso_text_as_python_reads_it(ts, sep):
    vals = [t.isoformat(sep) for t in ts]
    us = [round(((t if t.tzinfo else t.replace(tzinfo=dt.timezone.utc))-dt.datetime(1970,1,1,tzinfo=dt.timezone.utc))/dt.timedelta(microseconds=1)) for t in ts]
    t = read(vals)
    assert t.instant.to_list()==us and t.seconds.to_list()==[o//10**6 for o in us] and not t.bad.any()

@pytest.mark.parametrize('val', ['soon','2021-02-30','2021-13-01','2021-5-3','2021-05-03T24:00:00','2021-05-03T10','03/05/2021','2021-05-03T10:00:00+25:00','2021-05-03T10:00:00 CET','nan','inf','1e400','2021-05-03T10:00:00ZZ','١٦٢٠','12:30','20210503T1000'])
def test_unreadable_text(val):
    msg = fails(ValueError, "ratings (r.csv): column 'ts', row 2:", repr(val), 'bad_time=', call=lambda: read(['2021-05-03',val,None]))
    assert "1 of 3 rows" in msg
    t = read(['2021-05-03',val,None,''], bad='null')
    assert t.bad.to_list()==[False,True,False,False] and t.seconds.null_count()==3

@pytest.mark.parametrize('vals,kw,words', [
    ([ten*1000], {}, ["set time_unit='ms' (2021-05-03)"]), ([ten*10**6], dict(unit='ms'), ["set time_unit='us'"]), ([ten*10**9], {}, ["set time_unit='ns'"]), ([str(ten*1000)], {}, ["set time_unit='ms'"]),
    ([float(ten*1000)], {}, ["set time_unit='ms'"]), ([ten*1000], dict(bad='null'), ["set time_unit='ms'"]), ([20210503,20210504], {}, ["set time_format='%Y%m%d'"]), (['20210503'], {}, ["set time_format='%Y%m%d'"]),
    ([1,253402300800000], {}, ['row 2'])])
def test_wrong_units(vals, kw, words): fails(ValueError, "column 'ts'", *words, call=lambda: read(vals, **kw))

@pytest.mark.parametrize('as_text', [False,True])
def test_clock_changes(as_text):
    make = lambda *a: [str(dt.datetime(*a))] if as_text else [dt.datetime(*a)]
    autumn,spring = make(2021,10,31,2,30),make(2021,3,28,2,30)
    fails(ValueError, "row 1: 2021-10-31 02:30:00 comes twice in Europe/Warsaw", "ambiguous='earliest' or 'latest'", call=lambda: read(autumn, zone='Europe/Warsaw'))
    fails(ValueError, 'comes twice', call=lambda: read(autumn, zone='Europe/Warsaw', bad='null'))
    early,late = (read(autumn, zone='Europe/Warsaw', ambiguous=a).seconds[0] for a in ('earliest','latest'))
    assert late-early==3600 and early==int(dt.datetime(2021,10,31,0,30,tzinfo=dt.timezone.utc).timestamp())
    for a in ('raise','earliest','latest'): fails(ValueError, '2021-03-28 02:30:00 does not exist in Europe/Warsaw', call=lambda: read(spring, zone='Europe/Warsaw', ambiguous=a))
    assert read(spring, zone='Europe/Warsaw', bad='null').bad.to_list()==[True]
    offsets = read(['2021-10-31T02:30+02:00','2021-10-31T02:30+01:00'], zone='Europe/Warsaw')             # said by the data, nothing to choose
    assert offsets.seconds.to_list()==[early,late]

def test_two_offsets_of_one_zone():
    local = pd.Series(pd.date_range('2021-10-30 23:00', periods=50, freq='h', tz='America/Mexico_City'))
    s = DataSource(pd.DataFrame(dict(user=1, ts=local)), time_col='ts', entity_col='user')
    t = s.normalised(rows_of(s))['__time']
    assert t.diff().drop_nulls().unique().to_list()==[3600] and t.to_list()==[int(o.timestamp()) for o in local]
    assert calendar(t.to_numpy(), 'America/Mexico_City').tolist()==[[o.hour,o.isoweekday(),o.day] for o in local]

@pytest.mark.parametrize('policy', ['drop','profile'])
def test_null_times(policy):
    df = pl.DataFrame(dict(user=[1,2,3,4], ts=['2021-05-03',None,'soon','']))
    fails(ValueError, "df (a.csv): column 'ts', row 102: no time; 1 of 2 events", "null_time='drop'", call=lambda: DataSource(df, time_col='ts', entity_col='user').normalised(df[:2], 'a.csv', 100))
    fails(ValueError, "'soon' cannot be read", call=lambda: DataSource(df, time_col='ts', entity_col='user', null_time=policy).normalised(df))
    out = DataSource(df, time_col='ts', entity_col='user', null_time=policy, bad_time='null').normalised(df)
    assert out.height==4 and out['__time'].to_list()==[1619999999+1,None,None,None] and out['__bad_time'].to_list()==[False,False,True,False]

def test_bad_times_in_csv_are_counted_not_fatal(tmp_path):
    src = lambda **kw: DataSource.from_file(tmp_path/'f.csv', time_col='ts', entity_col='user', **kw)
    (tmp_path/'f.csv').write_text('user,ts\n'+'1,10\n'*10_000+'1,soon\n')
    s = src(bad_time='null', null_time='drop')
    assert s.normalised(rows_of(s))['__bad_time'].sum()==1
    (tmp_path/'f.csv').write_text('user,ts\n1,03052021\n1,13052021\n')                                   # the leading zero matters
    s = src(time_format='%d%m%Y')
    assert s.normalised(rows_of(s))['__time'].to_list()==[1620000000,1620864000]

def test_lifelong():
    df = pl.DataFrame(dict(user=[1,2], joined=['2021-05-03',None], died=[dt.date(2021,5,3),None], left=[ten,None]))
    s = DataSource(df, lifelong=['joined','died','left'], entity_col='user', is_profile=True)
    assert s.normalised(rows_of(s)).rows()==[(1,0,0,0,False,1620000000,1620000000,ten,1620000000*10**9), (2,0,0,0,False,None,None,None,None)]   # last, the instant of `joined` in nanoseconds
    fails(ValueError, "column 'joined', row 1: 'soon'", call=lambda: s.normalised(df.with_columns(joined=pl.lit('soon'))))

@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-2**33, 4*10**9), min_size=1, max_size=20), st.sampled_from(['UTC','Europe/Warsaw','America/St_Johns','Australia/Lord_Howe','Asia/Kathmandu']))
def test_calendar_as_python_has_it(secs, zone):
    got = calendar(np.array(secs), zone)
    py = [dt.datetime.fromtimestamp(0, zoneinfo.ZoneInfo('UTC')) + dt.timedelta(seconds=s) for s in secs]
    assert got.dtype==np.float32 and got.tolist()==[[p.hour,p.isoweekday(),p.day] for p in (o.astimezone(zoneinfo.ZoneInfo(zone)) for o in py)]

def test_eval_time():
    for o in (ten, ten+.9, np.int64(ten), '2021-05-03T10:00:00Z', '2021-05-03 10:00', dt.datetime(2021,5,3,10), pd.Timestamp('2021-05-03 12:00', tz='Europe/Warsaw'), np.datetime64('2021-05-03T10:00')): assert parse_eval_time(o)==ten
    assert parse_eval_time('2026-01-01')==1767225600 and parse_eval_time('2021-05-03 12:00', 'Europe/Warsaw')==ten
    for o in ('soon', None, True, pd.NaT, float('nan'), ten*1000, '20210503'): fails(ValueError, 'eval_time', call=lambda: parse_eval_time(o))
    fails(ValueError, 'not a known zone', call=lambda: parse_eval_time(0, 'Mars'))

# --- other processes, memory ---
def in_worker(spec): return [(l, o, spec.roles.normalised(c, l, o).rows()) for l,o,c in read_chunks(spec, 90)]

def test_specs_work_in_spawned_processes(tmp_path):
    df = table(400).with_columns(ts=pl.from_epoch('ts').dt.to_string('%d/%m/%Y %H:%M:%S'))
    for i in range(4): df[i*100:i*100+100].write_csv(tmp_path/f'{i}.data', separator='|', include_header=False)
    src = DataSource.from_file(tmp_path, format='csv', separator='|', has_header=False, new_columns=df.columns, time_format='%d/%m/%Y %H:%M:%S', time_zone='Europe/Warsaw', ambiguous='latest', schema_overrides=dict(user=pl.String), **roles)
    here = [in_worker(s) for s in src.scan_specs()]
    with ProcessPoolExecutor(2, mp_context=get_context('spawn')) as ex: there = list(ex.map(in_worker, src.scan_specs()))
    assert here==there and [o for f in here for _,o,_ in f]==[0,90]*4
    assert here[0][0][2][0][0]==str(df['user'][0])
    assert pickle.loads(pickle.dumps(src)).scan_specs()[3].label=='3.data' and len(pickle.dumps(src))<10_000

def test_memory_is_bounded(tmp_path):
    n = 500_000
    df = pl.DataFrame(dict(user=np.arange(n), a=np.random.default_rng(0).random(n), ts=np.arange(n)))
    for i in range(16): df.write_parquet(tmp_path/f'{i:02}.parquet', row_group_size=50_000)               # 8 million rows, 190 MB in memory
    code = f"""
import resource
from fastseqprep.source import DataSource
src = DataSource.from_file({str(tmp_path)!r}, conts='a', time_col='ts', entity_col='user')
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss>>10
n = first = 0
for i,(l,o,c) in enumerate(src.chunks(50_000)):
    n += len(c)
    if i==20: first = peak()
print(n, peak()-first)"""
    n_read,grown = map(int, subprocess.run([sys.executable,'-c',code], capture_output=True, text=True, check=True).stdout.split())
    assert n_read==16*n and grown<64, f'{grown} MB more after 160 chunks than after 20'
