"Hands the metadata of settings.ini to setuptools."
from configparser import ConfigParser
from pathlib import Path
import re
from setuptools import setup

here = Path(__file__).parent
parser = ConfigParser()
parser.read(here/'settings.ini', encoding='utf-8')
cfg = parser['DEFAULT']
name = cfg['name']

version = re.search(r'__version__ = "(.+?)"', (here/name/'__init__.py').read_text(encoding='utf-8'))[1]
extras = {k.removesuffix('_requirements'): v.split() for k,v in cfg.items() if k.endswith('_requirements')}
extras['dev'] += [req for extra in cfg['dev_extras'].split() for req in extras[extra]]
classifiers = ['Programming Language :: Python :: 3 :: Only', 'Topic :: Scientific/Engineering :: Artificial Intelligence']
classifiers += [f'Programming Language :: Python :: {v}' for v in cfg['python_versions'].split()]

setup(version=version, description=cfg['description'], author=cfg['author'], license_expression=cfg['license'],
    keywords=cfg['keywords'].split(), classifiers=classifiers, python_requires=f">={cfg['min_python']}",
    install_requires=cfg['requirements'].split(), extras_require={k: sorted(set(v)) for k,v in extras.items()},
    packages=[name],
    long_description=(here/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    entry_points={'console_scripts': cfg['console_scripts'].split(), 'nbdev': [f'{name}={name}._modidx:d']})
