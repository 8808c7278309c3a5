"""Searches by an agent, without what carries its messages: what it is told, what it tells, and what is kept of that."""

import dataclasses
import pickle
import sys

import pytest
from operations import FAULTY, FaultyProblem
from typer.testing import CliRunner

from scheduler.cli.app import app
from scheduler.contrib.fleet.agent import Agent
from scheduler.contrib.fleet.driver import order, received
from scheduler.contrib.fleet.messages import SearchEnded, SearchFailed, TrialEnded, differences, versions
from scheduler.contrib.fleet.ray_cluster import RayExecutor, executors, of_one_kind
from scheduler.core import codec
from scheduler.core.errors import ExecutorLost, MissingPackage, SchedulerError
from scheduler.core.records import Environment, key_of
from scheduler.measure.runner import InProcess, RunnerOptions
from scheduler.search.task import SearchOptions, Task
from scheduler.search.tuner import tune
from scheduler.store.store import Store
from search_spaces import Operation, Target

pytestmark = pytest.mark.slow

TASK = Task(FAULTY, FaultyProblem(8, "ok ok wrong slow"), SearchOptions(budget=6))


@pytest.fixture
def agent():
    return Agent(RunnerOptions())


@pytest.fixture
def here():
    """The chip and the environment that an agent in this process has."""
    runner = InProcess()
    yield runner.hardware, runner.environment
    runner.close()


@pytest.fixture
def store():
    return Store(":memory:")


def sent(message):
    """A message as another process receives it."""
    return pickle.loads(pickle.dumps(message))


def search(agent, task, here, store, progress=lambda step: None):
    hardware, environment = here
    key = key_of(task.operation, task.problem, hardware)
    messages = map(sent, agent.search(sent(order(task, hardware, environment, store))))
    return received(messages, key, environment, store, progress)


@pytest.mark.always
def test_a_search_by_an_agent_is_kept_as_one_of_this_process_is(agent, here, store):
    steps = []
    record = search(agent, TASK, here, store, steps.append)
    assert store.get(record.key) == record
    trials = store.last_trials(record.key)
    assert [(step.done, step.best) for step in steps[:1]] == [(0, None)]
    assert [step.last for step in steps[1:]] == trials
    mine = Store(":memory:")
    own = tune(FAULTY, TASK.problem, budget=6, store=mine, runner=(runner := InProcess()))
    runner.close()
    assert own.key == record.key
    assert (own.tried, own.versions, own.space) == (record.tried, record.versions, record.space)
    assert sorted((t.backend, str(t.schedule)) for t in mine.last_trials(own.key)) == sorted(
        (t.backend, str(t.schedule)) for t in trials
    )


def test_trials_of_a_search_that_was_cut_short_are_not_made_again(agent, here, store):
    hardware, environment = here
    ordered = order(TASK, hardware, environment, store)
    told = []
    for message in agent.search(ordered):  # the driver hears of three trials, and no more
        told.append(message)
        if sum(isinstance(message, TrialEnded) for message in told) == 3:
            break
    with pytest.raises(ExecutorLost):
        received(told, key_of(FAULTY, TASK.problem, hardware), environment, store, lambda step: None)
    steps = []
    record = search(Agent(RunnerOptions()), TASK, here, store, steps.append)
    measured = [m for m in told if isinstance(m, TrialEnded) and '"measurement"' in m.trial]
    assert steps[0].resumed == len(measured) > 0
    assert store.get(record.key) == record


def test_similar_problems_go_along(agent, here, store):
    near = search(agent, TASK, here, store)
    hardware, environment = here
    ordered = order(
        dataclasses.replace(TASK, problem=FaultyProblem(16, TASK.problem.script)),
        hardware,
        environment,
        store,
    )
    assert [codec.record_from_text(text) for text in ordered.near] == [near]


def test_an_operation_that_is_not_there_or_is_another_version_is_refused_with_what_to_do(agent, here, store):
    hardware, environment = here
    ordered = order(TASK, hardware, environment, store)
    *_, last = agent.search(dataclasses.replace(ordered, operation="nowhere.at_all:OPERATION"))
    assert isinstance(last, SearchFailed)
    for part in ("cannot load operation 'nowhere.at_all:OPERATION'", "--working-dir", "install it"):
        assert part in last.reason
    *_, last = agent.search(dataclasses.replace(ordered, versions={**ordered.versions, "scripted": 7}))
    assert isinstance(last, SearchFailed)
    assert "other kernels of faulty: version of scripted 1 (here: 7)" in last.reason


def test_an_operation_that_no_other_process_can_load_is_refused(here, store):
    local = dataclasses.replace(TASK, operation=Operation("local", FaultyProblem, FAULTY.kernels))
    with pytest.raises(SchedulerError, match="top level"):
        order(local, *here, store)


def test_a_lost_device_is_a_lost_place_and_a_lack_of_an_answer_is_not(here, store):
    hardware, environment = here
    key = key_of(FAULTY, TASK.problem, hardware)
    for message, raised in (
        (SearchFailed("gone", device=True), ExecutorLost),
        (SearchFailed("none ran", finished=True), SchedulerError),
    ):
        with pytest.raises(raised) as error:
            received([message], key, environment, store, lambda step: None)
        assert type(error.value) is raised


def test_a_record_that_is_none_is_not_stored(here, store):
    hardware, environment = here
    key = key_of(FAULTY, TASK.problem, hardware)
    with pytest.raises(ValueError, match="invalid JSON"):
        received([SearchEnded("garbage")], key, environment, store, lambda step: None)
    assert store.get(key) is None


def test_what_differs_between_two_hosts_is_named():
    mine = versions()
    assert differences(mine, dict(mine)) == ""
    assert differences(mine, {**mine, "jax": "0.1"}) == f"jax 0.1 (here: {mine['jax']})"
    assert "kernels missing" in differences(mine, {k: v for k, v in mine.items() if k != "kernels"})


def test_what_an_agent_says_of_itself_is_plain(agent, here):
    said = agent.describe()
    assert said["versions"] == versions()
    assert said["target"] == vars(here[0].target)
    assert Environment(**said["environment"]).jax == here[1].jax


def test_a_job_is_of_one_kind_of_chip():
    def place(kind, gpu):
        target = Target("cuda", kind, "sm_90", 132)
        environment = Environment("1", "1", "1", "now")
        return RayExecutor(
            None, {"host": "h", "node": "", "visible": gpu, "target": vars(target), "environment": vars(environment)}
        )

    found = [place("NVIDIA H200", "0"), place("NVIDIA H100 80GB HBM3", "1"), place("NVIDIA H200", "2")]
    assert [place.name for place in of_one_kind(found, "h200")] == ["h GPU 0", "h GPU 2"]
    assert of_one_kind(found[:1], "") == found[:1]
    two = "2 x NVIDIA H200 (132 cores, 140 GiB), 1 x NVIDIA H100 80GB HBM3 (132 cores, 80 GiB)"
    for wanted, complaint in (
        ("", "the cluster matches several"),
        ("b200", "has no b200"),
        ("nvidia", "nvidia matches several"),
    ):
        with pytest.raises(SchedulerError, match=complaint) as error:
            of_one_kind(found, wanted)
        assert two in str(error.value)
        assert "--hardware h200" in str(error.value)


def test_without_ray_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackage, match=r"pip install 'tile-scheduler\[ray\]'"), executors():
        pass


@pytest.mark.parametrize("devices", ["ray", "ray:local", "ray:here:6379"])
def test_a_job_on_a_cluster_needs_ray(devices, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "job.toml").write_text('operation = "matmul"\n[[problem]]\nm=8\nn=8\nk=8\n')
    ended = CliRunner().invoke(app, ["tune-job", str(tmp_path / "job.toml"), "--devices", devices])
    assert (ended.exit_code, "a fleet needs Ray" in ended.stderr) == (1, True)
