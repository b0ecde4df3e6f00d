"""The same bytes from every engine: in process, process pools, threads, Dask."""
import concurrent.futures as cf, multiprocessing as mp

import pytest

from events_tables import make_frames, run_job, write_files


@pytest.fixture(scope='module')
def inputs(tmp_path_factory): return write_files(tmp_path_factory.mktemp('inputs'), make_frames(), parts=3)


@pytest.fixture(scope='module')
def reference(inputs, tmp_path_factory):
    got = run_job(inputs, tmp_path_factory.mktemp('in_process'))
    assert len(got) == 5 and len(set(got.values())) == 5
    return got


@pytest.mark.parametrize('n_workers', [2, 3])
def test_process_pool(n_workers, inputs, reference, tmp_path): assert run_job(inputs, tmp_path, n_workers=n_workers) == reference


def test_spawned_executor(inputs, reference, tmp_path):
    with cf.ProcessPoolExecutor(2, mp_context=mp.get_context('spawn')) as ex: assert run_job(inputs, tmp_path, executor=ex) == reference


def test_thread_pool(inputs, reference, tmp_path):
    with cf.ThreadPoolExecutor(3) as ex: assert run_job(inputs, tmp_path, executor=ex) == reference


def test_dask(inputs, reference, tmp_path):
    distributed = pytest.importorskip('distributed')
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster, distributed.Client(cluster) as client:
        assert run_job(inputs, tmp_path, executor=client.get_executor()) == reference
