"Hands the metadata of settings.ini to setuptools."
from configparser import ConfigParser
from pathlib import Path
from setuptools import setup

here = Path(__file__).parent
parser = ConfigParser()
parser.read(here/'settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']
version = (here/'fastseqprep/__init__.py').read_text(encoding='utf-8').split('"')[1]
extras = {k.removesuffix('_requirements'): v.split() for k,v in cfg.items() if k.endswith('_requirements')}

setup(version=version, description=cfg['description'], author=cfg['author'], license=cfg['license'],
    keywords=cfg['keywords'].split(), python_requires=f">={cfg['min_python']}",
    install_requires=cfg['requirements'].split(), extras_require=extras, packages=['fastseqprep'],
    long_description=(here/'README.md').read_text(encoding='utf-8') if (here/'README.md').exists() else '',
    long_description_content_type='text/markdown',
    entry_points={'console_scripts': cfg['console_scripts'].split(), 'nbdev': ['fastseqprep=fastseqprep._modidx:d']})
