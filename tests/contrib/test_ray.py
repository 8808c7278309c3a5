"""A fleet on Ray: pretended hosts search a job, lose processes and hosts in the middle of it, and lose no result."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from gated import GATED, GatedProblem, waiting
from operations import FAULTY, FaultyProblem
from processes import gone

from scheduler.contrib.fleet import ray_cluster
from scheduler.core.errors import SchedulerError
from scheduler.search import jobs
from scheduler.search.task import SearchOptions, Task
from scheduler.store.store import Store
from search_spaces.matmul import MATMUL, MatmulProblem

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'tile-scheduler[ray]'")

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
HOST = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, "object_store_memory": 80 * 2**20}
SMALL = [Task(FAULTY, FaultyProblem(n, "ok"), SearchOptions(budget=2)) for n in (8, 16, 24, 32, 40, 48)]
SHIPPED = Task(MATMUL, MatmulProblem(16, 16, 16, "float32"), SearchOptions(budget=3))


@pytest.fixture(scope="module")
def cluster():
    """Two hosts of one core; their processes find this repository and its tests."""
    from ray.cluster_utils import Cluster

    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", short)  # the path of a socket has 107 bytes
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS.parent), str(TESTS)]))
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # whatever token its user has
        before = signal.getsignal(signal.SIGTERM)
        running = Cluster(initialize_head=True, head_node_args=HOST)
        running.add_node(**HOST)
        try:
            yield running
        finally:
            running.shutdown()
            signal.signal(signal.SIGTERM, before)  # Ray sets a handler that ends the process


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "cache.db")


@pytest.fixture
def gate(tmp_path):
    directory = tmp_path / "gate"
    directory.mkdir()
    return directory


def searched(cluster, tasks, store, met=lambda step: None):
    """What became of each task by its text, and the names of the places that had a part in it."""
    places = set()

    def watch(step):
        places.add(step.executor)
        met(step)

    with ray_cluster.executors(cluster.address) as found:
        assert len({place.name for place in found}) == len(found)
        results = {str(result.task): result for result in jobs.run(tasks, found, store=store, progress=watch)}
    return results, places


def gated(gate):
    return Task(GATED, GatedProblem(8, str(gate)), SearchOptions(budget=4))


def test_every_host_searches_a_job_and_a_process_that_is_killed_loses_nothing(cluster, store, gate):
    killed = []

    def kill(step):
        if step.task.operation is GATED and step.search.done and not killed:
            killed.append(waiting(gate))
            os.kill(killed[0], signal.SIGKILL)
            (gate / "open").touch()

    results, places = searched(cluster, [*SMALL, SHIPPED, gated(gate)], store, kill)
    assert len(places) == 2
    assert killed
    assert {name: result.state for name, result in results.items()} == dict.fromkeys(results, "tuned")
    assert len(results) == 8
    for result in results.values():
        assert store.get(result.record.key) == result.record
        assert len(store.last_trials(result.record.key)) == result.record.tried
        assert result.stored
    assert results[str(gated(gate))].resumed == 1  # the library's trial was stored before its process was killed


def test_a_problem_that_kills_two_processes_has_failed_and_the_others_are_searched(cluster, store):
    fatal = Task(FAULTY, FaultyProblem(8, "exit"), SearchOptions(budget=2))
    results, _ = searched(cluster, [fatal, *SMALL[:3]], store)
    assert [results[str(task)].state for task in SMALL[:3]] == ["tuned"] * 3
    failed = results[str(fatal)]
    assert failed.state == "failed"
    assert failed.reason.count("was lost") == 2


def test_searches_end_with_their_command_however_it_ends_and_the_same_command_goes_on(cluster, tmp_path, gate):
    job = tmp_path / "job.toml"
    job.write_text(
        'operation = "gated:GATED"\nbudget = 4\n'
        f'[[problem]]\nn = 8\ngate = "{gate}"\n[[problem]]\noperation = "matmul"\nm=8\nn=8\nk=8\ndtype="float32"\n'
    )
    command = [sys.executable, "-m", "scheduler", "tune-job", job, "--own", "gated:GATED", "--devices"]
    command += [f"ray:{cluster.address}"]
    for signalled, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            searching = waiting(gate)
            running.send_signal(signalled)
            out, said = running.communicate()
        assert (running.returncode, "Traceback" in said) == (status, False), out + said
        assert gone(searching)
        (gate / str(searching)).unlink()
    (gate / "open").touch()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(raylet)" not in done.stdout
    assert len(list(Store(os.environ["TILE_SCHEDULER_CACHE"]).records())) == 2


def test_a_host_that_dies_loses_nothing(cluster, store, tmp_path):
    victim = cluster.add_node(**HOST)
    gates = [tmp_path / f"gate {number}" for number in range(3)]  # each host comes to stand at one
    for gate in gates:
        gate.mkdir()
    dead = []

    def kill(step):
        if step.task.operation is GATED and victim.node_id.startswith(step.executor.split()[-1]) and not dead:
            dead.append(waiting(Path(step.task.problem.gate)))
            cluster.remove_node(victim, allow_graceful=False)
            for gate in gates:
                (gate / "open").touch()

    with pytest.warns(RuntimeWarning, match=f"{victim.node_id[:6]} is no longer used: it does not restart"):
        results, places = searched(cluster, [*map(gated, gates), *SMALL[:2]], store, kill)
    assert (len(places), len(dead)) == (3, 1)
    assert [result.state for result in results.values()] == ["tuned"] * 5
    assert gone(dead[0])


# In a process of its own: a driver that aborts would end the other tests of its process.
OF_ANOTHER_DRIVER = """
import logging, sys
import ray
from scheduler.contrib.fleet import ray_cluster

class Holder:
    def gpus(self):
        return ray.get_gpu_ids()

logging.basicConfig(stream=sys.stdout, format="%(message)s")
ray.init(address=sys.argv[1], log_to_driver=False)
holder = ray.remote(num_gpus=1, num_cpus=0)(Holder).remote()
print("held", ray.get(holder.gpus.remote())[0])
with ray_cluster.executors() as found:
    print("places", [place.name.rpartition(" ")[2] for place in found])
    print("free", ray.available_resources().get("GPU", 0))
print("still connected", ray.is_initialized())
sys.stdout.flush()
"""


def test_a_place_is_a_gpu_that_no_other_work_has(cluster):
    node = cluster.add_node(**HOST | {"num_cpus": 2, "num_gpus": 2})
    try:
        command = [sys.executable, "-c", OF_ANOTHER_DRIVER, cluster.address]
        said = subprocess.run(command, capture_output=True, text=True)
    finally:
        cluster.remove_node(node)
    assert "held " in said.stdout, said.stdout + said.stderr
    other = 0 if "held 1" in said.stdout else 1
    assert f"places ['{other}']" in said.stdout
    assert "free 0" in said.stdout
    assert "1 of 2 actors of the cluster are left out: 1 x other work" in said.stdout
    assert "still connected True" in said.stdout  # it was before


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://here:1", "here"])
def test_a_cluster_that_is_not_there_is_an_error_with_what_to_do(address):
    with pytest.raises(SchedulerError, match=r"ray start|HOST:PORT"), ray_cluster.executors(address):
        pass
