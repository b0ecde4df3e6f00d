"""Puts MovieLens-100k where fastai's `untar_data(URLs.ML_100k)` looks for it, without asking the GroupLens server.

The data's licence forbids passing it on, so it is not part of this repository. The `recbole` wheel on PyPI carries it
in RecBole's own text format; this script takes that wheel, rewrites the files in the original layout, and checks them.

    python tests/get_movielens.py       # prints the folder
"""
import hashlib, os, subprocess, sys, tempfile, zipfile
from pathlib import Path

from fastcore.xtras import Config

WHEEL = 'recbole==1.2.1'
INSIDE = 'recbole/dataset_example/ml-100k/ml-100k'
SHA256 = {
    'u.data': '06416e597f82b7342361e41163890c81036900f418ad91315590814211dca490',
    'u.user': 'f120e114da2e8cf314fd28f99417c94ae9ddf1cb6db8ce0e4b5995d40e90e62c',
}
GENRES = ['unknown', 'Action', 'Adventure', 'Animation', "Children's", 'Comedy', 'Crime', 'Documentary', 'Drama', 'Fantasy',
    'Film-Noir', 'Horror', 'Musical', 'Mystery', 'Romance', 'Sci-Fi', 'Thriller', 'War', 'Western']


def movielens_folder() -> Path:
    "Where fastai keeps the unpacked data: decided by its config file, read in the same way as fastai does"
    home = Path(os.getenv('FASTAI_HOME', '~/.fastai'))
    cfg = Config(home, 'config.ini', create=dict(data='data', archive='archive', storage='tmp', model='models'))
    return Path(cfg.path('data'))/'ml-100k'


def rows(zf: zipfile.ZipFile, ext: str) -> list:
    "Rows of one RecBole file, without its header of `name:type` fields"
    lines = zf.read(f'{INSIDE}.{ext}').decode('utf-8').splitlines()
    return [line.split('\t') for line in lines[1:]]


def ratings_text(rows: list) -> str:
    "`u.data`: user, movie, rating, timestamp, separated by tabs"
    return ''.join(f'{user}\t{item}\t{int(float(rating))}\t{int(float(time))}\n' for user, item, rating, time in rows)


def users_text(rows: list) -> str:
    "`u.user`: user, age, gender, occupation, zip code, separated by |"
    return ''.join('|'.join(row)+'\n' for row in rows)


def items_text(rows: list) -> str:
    "`u.item`: movie, title with year, release date (only the year is known), two empty fields, a flag per genre"
    def line(item, title, year, genres):
        flags = '|'.join(str(int(g in genres.split(' '))) for g in GENRES)
        if not year.isdigit(): return f"{item}|{title.replace('unkonwn', 'unknown')}||||{flags}\n"
        return f'{item}|{title} ({year})|01-Jan-{year}|||{flags}\n'
    return ''.join(line(*row) for row in rows)


def download(folder: Path) -> Path:
    "The wheel, taken by pip as for any other package"
    cmd = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--disable-pip-version-check', '--dest', str(folder), WHEEL]
    done = subprocess.run(cmd, capture_output=True, text=True)
    if done.returncode: raise RuntimeError(f'MovieLens-100k is not at hand and {WHEEL}, which carries it, cannot be had from PyPI: {done.stderr.strip()[-500:]}')
    return next(folder.glob('recbole-*.whl'))


def write_files(wheel: Path, folder: Path) -> None:
    "Rewrite the files of the wheel in the original layout"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as zf:
        (folder/'u.data').write_text(ratings_text(rows(zf, 'inter')), encoding='latin-1')
        (folder/'u.user').write_text(users_text(rows(zf, 'user')), encoding='latin-1')
        (folder/'u.item').write_text(items_text(rows(zf, 'item')), encoding='latin-1')
    for name, digest in SHA256.items():
        found = hashlib.sha256((folder/name).read_bytes()).hexdigest()
        if found != digest: raise RuntimeError(f'{name} made from {WHEEL} has SHA-256 {found}, expected {digest}: the wheel holds other data')


def ensure_movielens() -> Path:
    "The folder with the real `u.data` and `u.user`; downloaded once, then found at once"
    folder = movielens_folder()
    if all((folder/name).exists() for name in SHA256): return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix='.ml-100k-') as tmp:
        write_files(download(Path(tmp)), Path(tmp)/'ml-100k')
        folder.mkdir(exist_ok=True)
        for made in sorted((Path(tmp)/'ml-100k').iterdir()): made.replace(folder/made.name)
    return folder


if __name__ == '__main__': print(ensure_movielens())
