"Any layout of the same rows gives the same sequences; what is wrong is named; every kind of value is kept or refused."
import gc, gzip
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np, polars as pl, pytest
from hypothesis import given, settings, strategies as st

from fastseqprep.arrange import int_codes
from fastseqprep.sequences import Sequences, read_sequences
from fastseqprep.tables import csv_types, joint_dtype, table_files
from fastseqprep.source import DataSource
from fastseqprep.spill import null_int

BOUNDED = dict(memory_limit=1)   # everything by way of the disk, in the smallest buckets
RULES = {'word':'unknown','x':'mean+indicator','n':'unknown','flag':'zero'}


def same(a:Sequences, b:Sequences):
    "Equal in every array, dtype and dictionary"
    assert a.ids.dtype==b.ids.dtype and a.ids.to_list()==b.ids.to_list()
    assert (a.id_map is None)==(b.id_map is None)
    for k in ('out_ids','offsets','positions','child_offsets','sub_positions'):
        x,y = getattr(a, k),getattr(b, k)
        assert (x is None)==(y is None), k
        if x is not None: assert x.dtype==y.dtype and np.array_equal(x, y), k
    assert list(a.columns)==list(b.columns)
    for c in a.columns:
        x,y = a.columns[c],b.columns[c]
        assert x.dtype==y.dtype and x.values.dtype==y.values.dtype and np.array_equal(x.values, y.values), c
        assert (x.nulls is None)==(y.nulls is None) and (x.nulls is None or np.array_equal(x.nulls, y.nulls)), c
        assert (x.dictionary is None)==(y.dictionary is None) and (x.dictionary is None or x.dictionary.equals(y.dictionary)), c

def every_way(src, *args, **kw):
    "In memory and by way of the disk, which must agree"
    a,ledger = read_sequences(src, *args, **kw)
    b,again = read_sequences(src, *args, **kw, **BOUNDED)
    same(a, b)
    assert ledger==again
    assert all(isinstance(c.values, np.memmap) for c in b.columns.values())
    return a,ledger

def reopened(s, folder): return Sequences.load(s.save(folder))

def table(ids, pos, **cols): return pl.DataFrame({'sequenceId':ids, 'itemPosition':pos, **cols})


# --- the same rows in any layout

words = st.text('abcéZ漢 ,"\n', max_size=4)
IDS = {'small': (st.integers(-5, 40), pl.Int64), 'wide': (st.integers(-2**63, 2**63-1), pl.Int64),
       'huge': (st.integers(2**63-2, 2**64-1), pl.UInt64), 'text': (st.text('aBé7_', min_size=1, max_size=5).map('u'.__add__), pl.String)}

@st.composite
def tables(draw):
    kind,dtype = IDS[draw(st.sampled_from(sorted(IDS)))]
    ids = draw(st.lists(kind, min_size=1, max_size=6, unique=True))
    rows = []
    for i in ids:
        n = draw(st.integers(1, 6))
        start = draw(st.one_of(st.integers(-3, 3), st.sampled_from([-2**63, 2**63-n])))
        rows += [(i, start+j) for j in range(n)]
    n = len(rows)
    col = lambda s: draw(st.lists(st.one_of(st.none(), s), min_size=n, max_size=n))
    cols = dict(word=col(words), x=col(st.floats(allow_nan=False, allow_infinity=False)), n=col(st.integers(-2**63, 2**63-1)), flag=col(st.booleans()))
    for k,v in dict(word='a', x=.5, n=7, flag=True).items(): cols[k][0] = v     # a column without any value has no type in CSV
    df = pl.DataFrame({'sequenceId':[o[0] for o in rows], 'itemPosition':[o[1] for o in rows], **cols},
                      schema={'sequenceId':dtype, 'itemPosition':pl.Int64, 'word':pl.String, 'x':pl.Float64, 'n':pl.Int64, 'flag':pl.Boolean})
    order = draw(st.permutations(range(n)))
    return df, list(order), sorted(draw(st.lists(st.integers(0, n), max_size=3)))

def oracle(df):
    "Rows sorted by a plain Python sort"
    return sorted(df.rows(), key=lambda r: (r[0], r[1]))

@settings(max_examples=60, deadline=None)
@given(tables())
def test_layouts(tmp_path_factory, case):
    df,order,cuts = case
    a,ledger = every_way(df, nulls=RULES)
    assert a.frame().rows()==oracle(df)
    assert a.columns['word'].dictionary.to_list()==sorted({w for w in df['word'] if w is not None})
    assert ledger.sources['df']['kept']==len(df)
    mixed,_ = every_way(df[order], nulls=RULES)
    same(a, mixed)
    d = tmp_path_factory.mktemp('t')
    edges = [0,*cuts,len(df)]
    for i,(lo,hi) in enumerate(zip(edges[:-1], edges[1:])):
        for fmt,write in (('parquet','write_parquet'),('csv','write_csv')):
            p = d/fmt/('abc'[i%3]*(i%2))/f'{i}.{fmt}'
            p.parent.mkdir(parents=True, exist_ok=True)
            getattr(df[order][lo:hi], write)(p)
    for fmt in ('parquet','csv'): same(a, every_way(d/fmt, nulls=RULES, read_format=fmt)[0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0,3), st.integers(0,6), st.integers(0,99)), min_size=1, max_size=25), st.sampled_from(['first','last','order']), st.integers(0,25))
def test_policies(tmp_path_factory, rows, duplicates, cut):
    "Duplicates and gaps, against a plain loop over rows in the order of files"
    df = table([r[0] for r in rows], [r[1] for r in rows], v=[r[2] for r in rows])
    want = []
    for i in sorted({r[0] for r in rows}):
        mine = sorted((r for r in rows if r[0]==i), key=lambda r: r[1])
        if duplicates!='order': mine = [[r for r in mine if r[1]==p][0 if duplicates=='first' else -1] for p in sorted({r[1] for r in mine})]
        want += [(i, mine[0][1]+k, r[2]) for k,r in enumerate(mine)]
    d = tmp_path_factory.mktemp('t')
    df[:cut].write_parquet(d/'a.parquet'); df[cut:].write_parquet(d/'b.parquet')
    for src in (df, d):
        s,ledger = every_way(src, gaps='renumber', duplicates=duplicates)
        assert s.frame().rows()==want
        entry = ledger.sources[s.name]
        assert entry['read']==len(rows)==entry['kept']+sum(entry['dropped'].values())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0,4), min_size=1, max_size=4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_nested(lengths, rnd):
    "Items of several rows, and of none"
    rows = []
    for i,items in enumerate(lengths):
        for p,n in enumerate(items): rows += [(i, p, k, 10*p+k) for k in range(n)] or [(i, p, None, None)]
    mixed = rows.copy(); rnd.shuffle(mixed)
    df = lambda rs: pl.DataFrame(rs, schema={'sequenceId':pl.Int64,'itemPosition':pl.Int64,'sub':pl.Int64,'v':pl.Int64}, orient='row')
    s,_ = every_way(df(mixed), sub_position_col='sub')
    assert s.frame().rows()==rows
    assert s.lengths.tolist()==[len(o) for o in lengths]
    assert np.diff(s.child_offsets).tolist()==[max(1,n) for o in lengths for n in o]
    assert ((s.sub_positions==null_int).sum())==sum(n==0 for o in lengths for n in o)


def test_ties_fall_by_file_then_row(tmp_path):
    (tmp_path/'z').mkdir()
    table([1,1], [0,0], v=[9,1]).write_csv(tmp_path/'b.csv')
    table([1], [0], v=[0]).write_csv(tmp_path/'z/a.csv')
    table([1], [0], v=[5]).write_csv(tmp_path/'c.csv')
    s,_ = every_way(tmp_path, gaps='renumber', duplicates='order')
    assert s.columns['v'].values.tolist()==[9,1,5,0]


# --- files

def test_first_rows_are_those_of_the_first_files(tmp_path):
    df = table([2,2,1,1,1], [1,0,2,1,0], v=list('abcde'))
    (tmp_path/'set').mkdir()
    for i in range(5): df[i:i+1].write_parquet(tmp_path/f'set/{i}.parquet')
    for n in range(1,6):
        kw = dict(max_rows=n, gaps='renumber')
        a,_ = every_way(tmp_path/'set', **kw)
        same(a, every_way(df, **kw)[0])
        same(a, every_way(df[:n], gaps='renumber')[0])
        df.write_csv(tmp_path/'one.csv')
        same(a, every_way(tmp_path/'one.csv', **kw)[0])
    same(every_way(tmp_path/'set', max_rows=0)[0], every_way(df)[0])
    for bad in (-1, True, 1.5):
        with pytest.raises(ValueError, match='max_rows'): read_sequences(df, max_rows=bad)

def test_the_first_rows_have_the_types_of_the_whole_table(tmp_path):
    p = tmp_path/'a.csv'
    p.write_text('sequenceId,itemPosition,k\n1,0,5\n1,1,6\n1,2,late\n')
    assert every_way(p, max_rows=2)[0].frame()['k'].to_list()==['5','6']

def test_empty_files_are_passed_over(tmp_path):
    df = table([1,1], [0,1], v=['a','b'])
    df[:0].cast({'v':pl.Int8}).write_parquet(tmp_path/'a.parquet')
    df.write_parquet(tmp_path/'b.parquet')
    same(every_way(tmp_path)[0], every_way(df)[0])
    d = tmp_path/'csv'; d.mkdir()
    (d/'a.csv').write_text(''); (d/'b.csv').write_text('sequenceId,itemPosition,v\n'); df.write_csv(d/'c.csv')
    same(every_way(d)[0], every_way(df)[0])

@pytest.mark.parametrize('text,words', [('', 'empty'), ('sequenceId,itemPosition,v\n', 'no rows')])
def test_nothing_to_read(tmp_path, text, words):
    (tmp_path/'a.csv').write_text(text)
    for src in (tmp_path, tmp_path/'a.csv'):
        with pytest.raises(ValueError, match=words) as e: read_sequences(src)
        assert 'a.csv' in str(e.value)
    with pytest.raises(ValueError, match='no rows'): read_sequences(table([], [], v=[]).cast({'sequenceId':pl.Int64,'itemPosition':pl.Int64}))

def test_names_of_paths(tmp_path):
    df = table([1,1], [0,1], v=['a','b'])
    for name in ('data','x.parquet','a folder','day=1'):
        (tmp_path/name).mkdir()
        df.write_parquet(tmp_path/name/'x.parquet.parquet')
        df.write_parquet(tmp_path/name/'noparquet.txt')
        for path in (tmp_path/name, f'{tmp_path/name}/'):
            s,_ = every_way(path, read_format='parquet')
            same(s, every_way(df)[0])
            assert s.name==name
    assert table_files(f'{tmp_path}/data/', 'parquet').labels==['x.parquet.parquet']
    with gzip.open(tmp_path/'z.csv.gz', 'wb') as f: f.write(df.write_csv().encode())
    same(read_sequences(tmp_path/'z.csv.gz')[0], read_sequences(df)[0])
    with pytest.raises(FileNotFoundError): read_sequences(tmp_path/'none')

def test_declared_source(tmp_path):
    (tmp_path/'log.csv').write_text('u;t;item\nb;2024-01-02;x\na;2024-01-02T10:00:00Z;y\nb;2023-12-31 23:59;z\n')
    src = DataSource.from_file(tmp_path/'log.csv', separator=';', cats='item', time_col='t', entity_col='u')
    with pytest.raises(ValueError, match="gaps='renumber'"): read_sequences(src)
    s,_ = every_way(src, gaps='renumber')
    assert s.frame().rows()==[('a',0,'y'),('b',0,'z'),('b',1,'x')]
    assert s.id_map.to_list()==['a','b'] and s.out_ids.tolist()==[0,1]


def test_declared_source_with_times_as_numbers():
    df = pl.DataFrame(dict(u=[2,2,1], t=[874724710.5,874724710.25,0.0], item=['x','y','z']))
    s,_ = every_way(DataSource.from_df(df, cats='item', time_col='t', entity_col='u'), gaps='renumber')
    assert s.frame().rows()==[(1,0,'z'),(2,0,'y'),(2,1,'x')]
    s,_ = every_way(DataSource.from_df(df.with_columns(t=pl.Series([11,10,5])), cats='item', time_col='t', entity_col='u'))   # without gaps they may stand as they are
    assert s.positions.tolist()==[5,10,11]

def test_frames_of_other_libraries():
    df = table([2,1,1], [0,1,0], item=['a','b','a'], x=[1.,2.,3.])
    want = every_way(df)[0]
    for other in (df.lazy(), df.to_arrow(), df.to_pandas()): same(want, every_way(other)[0])
    same(every_way(df, max_rows=2, gaps='renumber')[0], every_way(df.lazy(), max_rows=2, gaps='renumber')[0])

def test_addresses():
    import fsspec
    fs = fsspec.filesystem('memory')
    df = table([2,1,1], [0,1,0], item=['a','b','a'])
    for i in range(3):
        with fs.open(f'/tbl/{i}.parquet', 'wb') as f: df[i:i+1].write_parquet(f)
    same(read_sequences('memory://tbl')[0], read_sequences(df)[0])
    fs.rm('/tbl', recursive=True)


# --- types

def test_csv_types_come_from_all_rows(tmp_path):
    d = tmp_path/'set'; d.mkdir()
    n = 20_000
    head = table(np.zeros(n, int), np.arange(n), k=[1]*n, x=[1]*n, code=[7]*n, e=[None]*n, b=[True]*n)
    head.write_csv(d/'a.csv')
    (d/'b.csv').write_text(f'sequenceId,itemPosition,k,x,code,e,b\n0,{n},abc,1.5,007,3,0\n')
    s,_ = every_way(d, nulls={'e':'zero'})
    assert {c.name:c.dtype for c in s.columns.values()}==dict(k=pl.String, x=pl.Float64, code=pl.String, e=pl.Int64, b=pl.String)
    assert s.columns['k'].dictionary.to_list()==['1','abc'] and s.columns['code'].dictionary.to_list()==['007','7']
    assert s.columns['b'].dictionary.to_list()==['0','true'] and s.columns['x'].values[-1]==1.5

@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(['1','-2','0','007','+5','1.5','1e3','true','False','x','18446744073709551615',None]), min_size=1, max_size=8), st.integers(0,8))
def test_csv_types_do_not_depend_on_files(texts, cut):
    parts = [pl.DataFrame({'k':o}, schema={'k':pl.String}).lazy() for o in (texts, texts[::-1], texts[:cut], texts[cut:])]
    a = csv_types(parts[:1], ['k'])[0]
    assert a==csv_types(parts[1:2], ['k'])[0]==csv_types(parts[2:], ['k'])[0]==csv_types(parts[:1]+parts[3:], ['k'])[0]
    t = [o for o in texts if o is not None]
    num = lambda o,f: not _fails(f, o)
    want = pl.Null if not t else pl.String
    if t and all(num(o, int) for o in t): want = pl.String if any(o in ('007','+5') for o in t) else pl.Int128 if any(len(o)>15 for o in t) else pl.Int64
    elif t and all(num(o, float) for o in t): want = pl.Float64
    elif t and all(o.lower() in ('true','false') for o in t): want = pl.Boolean
    assert a['k']==want

def _fails(f, o):
    try: f(o)
    except ValueError: return True

def test_every_kind_of_value(tmp_path):
    big = 2**64-1
    df = table([1,1], [0,1], i8=pl.Series([-128,127], dtype=pl.Int8), u8=pl.Series([0,255], dtype=pl.UInt8), i64=[-2**63,2**63-1], u64=pl.Series([0,big], dtype=pl.UInt64),
               i128=pl.Series([-5,2**62], dtype=pl.Int128), w128=pl.Series([0,big], dtype=pl.Int128), f16=pl.Series([.5,2], dtype=pl.Float16), f32=pl.Series([.1,2], dtype=pl.Float32),
               f64=[1e308,5e-324], dec=pl.Series([Decimal('1.10'),Decimal('-2.25')]), flag=[True,False], cat=pl.Series(['b','a'], dtype=pl.Categorical),
               enum=pl.Series(['z','a'], dtype=pl.Enum(['z','a'])), text=['','é\n'])
    s,_ = every_way(df)
    got = {c.name:(c.dtype, c.series().to_list()) for c in s.columns.values()}
    kept = {c:(df[c].dtype, df[c].to_list()) for c in ('i8','u8','i64','u64','f16','f32','f64','flag','text')}
    assert {c:got[c] for c in kept}==kept
    same(s, reopened(s, tmp_path/'kept'))
    assert got['i128']==(pl.Int64, [-5,2**62]) and got['w128']==(pl.UInt64, [0,big]) and got['dec']==(pl.Float64, [1.1,-2.25])
    assert got['cat']==(pl.String, ['b','a']) and got['enum']==(pl.String, ['z','a']) and s.columns['enum'].dictionary.to_list()==['a','z']
    with pytest.raises(ValueError, match="'w128' holds 18446744073709551616"): read_sequences(df.with_columns(w128=pl.Series([0,2**64], dtype=pl.Int128)))
    with pytest.raises(ValueError, match="'raw' is Binary"): read_sequences(df.with_columns(raw=pl.lit(b'x')))

def test_dates_are_kept_as_their_integers(tmp_path):
    t = [datetime(1969,12,31,23,59,59,999999), datetime(2024,1,1)]
    df = table([1,1], [0,1], day=[date(1969,12,31), date(2024,1,1)], us=t, ns=pl.Series(t).cast(pl.Datetime('ns')), zone=pl.Series(t).cast(pl.Datetime('ms')).dt.replace_time_zone('Europe/Warsaw'))
    s,_ = every_way(df, temporal=['day','us','ns','zone'])
    assert s.columns['day'].values.tolist()==[-1,19723] and s.columns['ns'].values.tolist()==[-1000,1704067200*10**9]
    same(s, reopened(s, tmp_path/'kept'))
    for c in s.columns.values(): assert c.dtype==df[c.name].dtype and c.values.dtype==np.int64 and c.series().to_list()==df[c.name].to_list()
    with pytest.raises(ValueError) as e: read_sequences(df, temporal='day')
    assert all(f"'{c}' is Datetime" in str(e.value) for c in ('us','ns','zone')) and "'day'" not in str(e.value)
    with pytest.raises(ValueError, match="temporal names 'dya'.*'day'"): read_sequences(df, ['day'], temporal='dya')

def test_ids(tmp_path):
    for ids,dtype,mapped in ((pl.Series([3,-1],dtype=pl.Int8), pl.Int64, False), (pl.Series([3,1],dtype=pl.UInt64), pl.Int64, False), (pl.Series([2**64-1,2**63],dtype=pl.UInt64), pl.UInt64, True),
                             (pl.Series([2**100,-2**100],dtype=pl.Int128), pl.Int128, True), (pl.Series(['b','a'],dtype=pl.Categorical), pl.String, True), (pl.Series(['10','9']), pl.String, True)):
        s,_ = every_way(table(ids, [0,0]))
        same(s, reopened(s, tmp_path/'kept'))
        assert s.ids.dtype==dtype and s.ids.to_list()==sorted(ids.to_list())
        assert s.out_ids.tolist()==([0,1] if mapped else s.ids.to_list()) and (s.id_map is not None)==mapped
    for ids in ([1.0,2.0], [True,False], [[1],[2]]):
        with pytest.raises(ValueError, match='sequenceId'): read_sequences(table(ids, [0,0]))
    with pytest.raises(ValueError, match="'sequenceId', row 2"): read_sequences(table([1,None], [0,0]))

def test_ids_keep_their_digits(tmp_path):
    (tmp_path/'a.csv').write_text('sequenceId,itemPosition\n007,0\n7,0\n18446744073709551615,0\n')
    assert every_way(tmp_path/'a.csv')[0].ids.to_list()==['007','18446744073709551615','7']
    (tmp_path/'a.csv').write_text('sequenceId,itemPosition\n7,00\n18446744073709551615,01\n')
    assert every_way(tmp_path/'a.csv')[0].ids.to_list()==[7,2**64-1]

def test_positions():
    assert every_way(table([1,1], [1.0,0.0]))[0].positions.tolist()==[0,1]
    assert every_way(table([1,1], pl.Series([255,254], dtype=pl.UInt8)))[0].positions.tolist()==[254,255]
    for bad in ([0.0,.5], [0.0,float('nan')], [0.0,2.0**60], pl.Series([0,2**63], dtype=pl.UInt64), [0,None], ['a','b'], [True,False]):
        with pytest.raises(ValueError, match='itemPosition'): read_sequences(table([1,1], bad))

def test_casts():
    df = table([1,1,1], [0,1,2], a=[1,1000,-3], x=[1.9,-1.9,2.0], t=['1','2.5','3'])
    s,_ = every_way(df, casts=dict(a=pl.Int8, x=pl.Int8, t=pl.Float32))
    assert s.columns['a'].dtype==pl.Int64 and s.columns['a'].values.tolist()==[1,1000,-3]    # encoded first, cast later
    assert s.columns['x'].values.tolist()==[1,-1,2] and s.columns['t'].dtype==pl.Float32
    assert read_sequences(df, ['a'], casts=dict(a=pl.Float32))[0].columns['a'].values.dtype==np.float32
    with pytest.raises(ValueError, match="'t', row 2.*'b' cannot be made Float64"): read_sequences(df.with_columns(t=pl.Series(['1','b','c'])), casts=dict(t=pl.Float64))
    with pytest.raises(ValueError, match="'x', row 3.*1e[+]?300 is inf as Float32"): read_sequences(df.with_columns(x=pl.Series([1.,2.,1e300])), casts=dict(x=pl.Float32))
    with pytest.raises(ValueError, match="'x', row 1.*cannot be made Int64"): read_sequences(df.with_columns(x=pl.Series([1e300,2,1.])), casts=dict(x=pl.Int8))

def test_types_over_files(tmp_path):
    a,b = table([1], [0], v=pl.Series([1], dtype=pl.Int8), w=pl.Series(['a'], dtype=pl.Categorical)), table([1], pl.Series([1], dtype=pl.Int16), v=pl.Series([300], dtype=pl.Int64), w=['b'])
    a.write_parquet(tmp_path/'a.parquet'); b.write_parquet(tmp_path/'b.parquet')
    assert every_way(tmp_path)[0].frame().rows()==[(1,0,1,'a'),(1,1,300,'b')]
    b.with_columns(v=pl.lit(.5), w=pl.lit(1)).write_parquet(tmp_path/'b.parquet')
    with pytest.raises(ValueError, match="'v' is Int8 in a.parquet but Float64 in b.parquet.*'w' is"): read_sequences(tmp_path)
    assert every_way(tmp_path, ['v'], casts={'v':pl.Float32})[0].columns['v'].values.tolist()==[1,.5]
    assert every_way(tmp_path, ['v'], casts={'v':pl.Int8})[0].columns['v'].values.tolist()==[1,0]
    assert joint_dtype({'a':pl.UInt64(),'b':pl.Int8()})==pl.Int128()

@given(st.lists(st.integers(-128,127), max_size=50))
def test_int_codes(xs):
    for dtype in (np.int8, np.int64):
        used,codes = int_codes(np.array(xs, dtype))
        assert used.dtype==dtype and used.tolist()==sorted(set(xs)) and used[codes].tolist()==xs


# --- what is wrong

def base(**more): return table([0]*12+[1]*9, [*range(12), *range(9)], item=['a','b','c']*7, amount=[.5]*21).with_columns(**more)

def put(tmp_path, **files):
    d = tmp_path/'set'; d.mkdir(exist_ok=True)
    for k,df in files.items(): df.write_parquet(d/f'{k}.parquet')
    return d

@pytest.mark.parametrize('frame,words', [
    (base().drop('sequenceId'), ['sequenceId']), (base().drop('itemPosition'), ['itemPosition']),
    (base(day=date(2024,1,1)), ["'day' is Date"]), (base(pair=[[1.,2.]]*21), ["'pair' is List"]),
    (pl.concat([base(), base()[3:4]]), ['duplicate','position 3','sequence 0','row 4','row 22']),
    (pl.concat([base(subItemPosition=0), base(subItemPosition=1)[3:4]]), ['duplicate','depth_layouts']),
    (base().filter(pl.col('itemPosition')!=5), ['gap','sequence 0','4','6',"gaps='renumber'"]),
    (base(item=pl.when(pl.col('itemPosition')==5).then(None).otherwise('item')), ["'item', row 6",'sequence 0','null','2 of 21']),
    (base(amount=pl.when(pl.col('itemPosition')==5).then(None).otherwise('amount')), ["'amount', row 6",'null']),
    (base(amount=pl.when(pl.col('itemPosition')==5).then(float('nan')).otherwise('amount')), ["'amount', row 6",'nan','finite']),
    (base(amount=pl.when(pl.col('itemPosition')==5).then(float('-inf')).otherwise('amount')), ["'amount', row 6",'-inf','finite']),
    (base(__sequifier_split_value=1), ['__sequifier_split_value']),
])
def test_errors_of_rows(tmp_path, frame, words):
    put(tmp_path, d=frame)
    for kw in ({}, BOUNDED):
        for src,place in ((tmp_path/'set/d.parquet', 'd.parquet'), (tmp_path/'set', 'set'), (frame, 'df')):
            with pytest.raises(ValueError) as e: read_sequences(src, **kw)
            assert all(w in str(e.value) for w in [*words, place]), str(e.value)
            assert '\n' not in str(e.value)

@pytest.mark.parametrize('other,columns,words', [
    (base(amount=pl.col('amount').cast(pl.Float32)), None, ['amount','b.parquet']), (base(extra=1), None, ['extra','b.parquet']),
    (base().drop('amount'), ['item','amount'], ['amount','b.parquet']), (base(), ['colour'], ['colour','a.parquet']), (base(), ['Amount'], ["did you mean 'amount'"])])
def test_errors_over_files(tmp_path, other, columns, words):
    d = put(tmp_path, a=base()[:12], b=other[12:])
    with pytest.raises(ValueError) as e: read_sequences(d, columns)
    assert all(w in str(e.value) for w in words), str(e.value)

def test_columns_that_are_not_used_are_not_read(tmp_path):
    d = put(tmp_path, a=base(amount=None)[:12], b=base(extra=[[1]]*21)[12:])
    same(every_way(d, 'item')[0], every_way(base(), 'item')[0])
    s,_ = every_way(d, ['item','item','sequenceId'], casts=dict(sequenceId=pl.Float32, level=pl.Int8))
    assert list(s.columns)==['item'] and s.columns['item'].nulls is None

def test_damaged_file(tmp_path):
    (tmp_path/'a.parquet').write_bytes(b'PAR1 nothing')
    with pytest.raises(ValueError, match='a.parquet.*cannot be read as parquet'): read_sequences(tmp_path)

def test_arguments():
    df = base()
    for kw,word in ((dict(gaps='fill'),'gaps'), (dict(duplicates='any'),'duplicates'), (dict(duplicates='order'),"gaps='renumber'"), (dict(nulls='skip'),'nulls'),
                    (dict(nulls={'itm':'unknown'}),"did you mean 'item'"), (dict(nulls={'item':'drop_row+indicator'}),'indicator'), (dict(position_col='sequenceId'),'two things')):
        with pytest.raises(ValueError) as e: read_sequences(df, **kw)
        assert word in str(e.value)


# --- missing values

def test_null_rules(tmp_path):
    df = table([1,1,1,2], [0,1,2,0], item=['b',None,'a',None], x=[1.,2.,None,4.])
    s,_ = every_way(df, nulls={'item':'unknown+indicator','x':'mean'})
    assert s.columns['item'].values.tolist()==[1,-1,0,-1] and s.columns['item'].nulls.tolist()==[0,1,0,1]
    assert s.columns['x'].values.tolist()==[1,2,0,4] and s.columns['x'].nulls.tolist()==[0,0,1,0]
    s,ledger = every_way(df, nulls={'item':'unknown','*':'drop_row'})
    assert s.frame().rows()==[(1,0,'b',1.),(1,1,None,2.),(2,0,None,4.)] and ledger.sources['df']['dropped']=={'null in x':1}
    with pytest.raises(ValueError, match="gap in sequence 1.*dropped for nulls.*gaps='renumber'"): read_sequences(df, ['item'], nulls='drop_row')
    assert every_way(df, ['item'], nulls='drop_row', gaps='renumber')[0].frame().rows()==[(1,0,'b'),(1,1,'a')]
    s,ledger = every_way(df, nulls='drop_row', gaps='renumber')
    assert s.ids.to_list()==[1] and ledger.sources['df']['dropped']=={'null in item':2,'null in x':1}
    with pytest.raises(ValueError, match='no rows are left'): read_sequences(df.filter(pl.col('item').is_null()), nulls='drop_row')
    s,_ = every_way(df.with_columns(item=pl.lit(None, dtype=pl.Null)), nulls='unknown')
    assert s.columns['item'].dtype==pl.String and len(s.columns['item'].dictionary)==0 and s.columns['item'].nulls.all()

def test_row_numbers_are_those_of_the_file_after_drops():
    df = table([1,1,1], [0,1,2], item=[None,'a','b'], x=[1.,2.,float('inf')])
    with pytest.raises(ValueError, match="'x', row 3"): read_sequences(df, nulls={'item':'drop_row'})


# --- files of the disk path

def test_scratch(tmp_path):
    df = base()
    s,_ = read_sequences(df, memory_limit=1)
    folder = Path(s.folder)
    assert folder.exists() and not list(folder.glob('*.arrow'))
    del s; gc.collect()
    assert not folder.exists()
    s,_ = read_sequences(df, memory_limit=1, scratch=tmp_path/'s')
    assert Path(s.folder).parent==tmp_path/'s'
    del s; gc.collect()
    assert len(list((tmp_path/'s').iterdir()))==1
    with pytest.raises(ValueError): read_sequences(pl.concat([df,df]), memory_limit=1, scratch=tmp_path/'t')
    assert not list((tmp_path/'t').iterdir())

def test_many_chunks_and_buckets(tmp_path, monkeypatch):
    "Chunks and buckets of several sizes, enough rows that ids and texts spread over many"
    r = np.random.default_rng(0)
    n = 20_000
    ids = np.sort(r.integers(0, 300, n))
    pos = np.arange(n)-np.searchsorted(ids, ids)
    df = table(ids, pos, w=[f'w{i}' for i in r.integers(0, 9_000, n)], x=r.normal(size=n), b=r.random(n)<.5).with_columns(x=pl.when(pl.col('w')=='w7').then(None).otherwise('x'))
    df = df[r.permutation(n)]
    df.write_parquet(tmp_path/'a.parquet', row_group_size=3_000)
    kw = dict(nulls={'x':'zero'})
    a,_ = read_sequences(df, **kw)
    assert a.frame().equals(df.sort('sequenceId','itemPosition').rename({'sequenceId':'id','itemPosition':'position'}), null_equal=True)
    for limit in (1, 100_000, 400_000): same(a, read_sequences(tmp_path/'a.parquet', memory_limit=limit, **kw)[0])
    monkeypatch.setattr('fastseqprep.sequences._CHUNK_ROWS', 777)
    same(a, read_sequences(tmp_path/'a.parquet', **kw)[0])


@pytest.mark.parametrize('distinct', [1., .7, .4, .01])
def test_texts_that_mostly_differ(tmp_path, monkeypatch, distinct):
    "Chunks keep all texts of a column in which most differ, and distinct ones elsewhere; the result does not tell"
    monkeypatch.setattr('fastseqprep.sequences._CHUNK_ROWS', 1_500)
    r = np.random.default_rng(3)
    n = 7_000
    ids = np.sort(r.integers(0, 300, n))
    pos = np.arange(n)-np.searchsorted(ids, ids)
    number = r.integers(0, max(1, int(n*distinct)), n) if distinct<1 else r.permutation(n)
    df = table(ids, pos, w=[None if i%13==5 else f'order-{i:06d}' for i in number], v=[f'{i}é' for i in number])[r.permutation(n)]
    df.write_parquet(tmp_path/'a.parquet', row_group_size=1_500)
    kw = dict(nulls={'w':'unknown'})
    a,_ = every_way(tmp_path/'a.parquet', **kw)
    assert a.frame().equals(df.sort('sequenceId','itemPosition').rename({'sequenceId':'id','itemPosition':'position'}), null_equal=True)
    for c in 'wv': assert a.columns[c].dictionary.to_list()==sorted(set(df[c].drop_nulls()))
    monkeypatch.setattr('fastseqprep.sequences._CHUNK_ROWS', 500_000)
    same(a, read_sequences(df, **kw)[0])
