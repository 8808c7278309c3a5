"""Numbers, flags and words that mean nothing are refused by every public call, by commands and by the environment."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import typer.testing

import scheduler
from scheduler import Replay
from scheduler.cli.app import app
from scheduler.core import arguments
from scheduler.dispatch import stored
from scheduler.inspect import doctor
from scheduler.measure.runner import RunnerOptions
from scheduler.search import jobs
from scheduler.search.reverify import reverify
from scheduler.search.sweep import sweep
from scheduler.search.task import SearchOptions, Task
from search_spaces.rows.formulas import SOFTMAX, SoftmaxProblem

PROBLEM = SoftmaxProblem(8, 128)
WRONG = (TypeError, ValueError)
NO_NUMBERS = [math.nan, math.inf, -math.inf, -1, True, "1", 10**400, 1j, [1], np.ones(2)]
NO_COUNTS = [*NO_NUMBERS, 0, 1.5, 2**31]


def tune(**search):
    return scheduler.tune(SOFTMAX, PROBLEM, store=scheduler.Store(":memory:"), **search)


COUNTS = {
    "tune": lambda n: tune(budget=n, force=True),
    "Task": lambda n: Task(SOFTMAX, PROBLEM, SearchOptions(budget=n)),
    "Task of a count": lambda n: Task(SOFTMAX, PROBLEM, count=n),
    "workers": lambda n: RunnerOptions(workers=n),
    "searches": lambda n: RunnerOptions(searches=n),
    "slots": lambda n: Replay("none", slots=n),
    "sample": lambda n: sweep(SOFTMAX, PROBLEM, None, None, sample=n),
    "repetitions": lambda n: sweep(SOFTMAX, PROBLEM, None, None, repetitions=n),
}
NUMBERS = {
    "tune": lambda s: tune(seconds=s, force=True),
    "optimize": lambda s: scheduler.optimize(lambda x: x, seconds=s),
    "Task": lambda s: Task(SOFTMAX, PROBLEM, SearchOptions(seconds=s)),
    "compile timeout": lambda s: RunnerOptions(compile_timeout_s=s),
    "run timeout": lambda s: RunnerOptions(run_timeout_s=s),
    "within": lambda s: list(reverify([], within=s)),
}
SEEDS = {
    "tune": lambda n: tune(seed=n),
    "How": lambda n: SearchOptions(seed=n),
    "Replay": lambda n: Replay("none", seed=n),
    "sweep": lambda n: sweep(SOFTMAX, PROBLEM, None, None, seed=n),
    "reverify": lambda n: list(reverify([], seed=n)),
}


@pytest.mark.parametrize("call", COUNTS.values(), ids=COUNTS)
def test_what_is_no_count_is_refused(call):
    for wrong in NO_COUNTS:
        with pytest.raises(WRONG, match="give an integer from"):
            call(wrong)


@pytest.mark.parametrize("call", NUMBERS.values(), ids=NUMBERS)
def test_what_is_no_number_of_seconds_is_refused(call):
    for wrong in NO_NUMBERS:
        with pytest.raises(WRONG, match="give a finite number"):
            call(wrong)


@pytest.mark.parametrize("call", SEEDS.values(), ids=SEEDS)
def test_what_is_no_seed_is_refused(call):
    for wrong in (*NO_NUMBERS, 1.5, 2**32):
        with pytest.raises(WRONG, match=r"seed=.*give an integer from 0 to 4294967295"):
            call(wrong)


def test_flags_and_words_are_refused_that_are_others():
    for flag in ("force", "first_error"):
        for wrong in ("no", 0, 1, None):
            with pytest.raises(TypeError, match=f"{flag}=.* give True or False"):
                tune(**{flag: wrong})
    for wrong in ("hot", None, True, 1, math.nan, ["cold"]):
        with pytest.raises(ValueError, match=r"l2=.* is not one of cold, warm"):
            tune(l2=wrong)
        with pytest.raises(ValueError, match=r"keep=.* is not one of faster, tuned"):
            scheduler.optimize(lambda x: x, keep=wrong)
        with pytest.raises(ValueError, match=r"missing=.* is not one of"), scheduler.plan("p", missing=wrong):
            pass
    for call in (tune, lambda hardware: RunnerOptions(hardware=hardware)):
        with pytest.raises(TypeError, match="hardware=5 is a int; give a text"):
            call(hardware=5)
    with pytest.raises(TypeError, match="kind=5"), scheduler.target(5):
        pass


def test_numbers_of_numpy_are_numbers():
    assert arguments.checked_integer("n", np.int64(3)) == 3
    assert arguments.checked_number("s", np.float32(0.5)) == 0.5
    with pytest.raises(TypeError):
        arguments.checked_integer("n", np.bool_(True))


@pytest.mark.parametrize("wrong", ["nan", "inf", "-1", "true", '"4"', "0", "[1]", "99999999999999999999", "1979-05-27"])
def test_a_job_refuses_the_same(wrong):
    for name in ("budget", "seconds", "count"):
        (task,) = jobs.parse(f'operation = "softmax"\n[[problem]]\nrows = 8\ncolumns = 128\n{name} = {wrong}\n')
        if (name, wrong) != ("seconds", "99999999999999999999"):
            assert f"{name}=" in task.reason


OPTIONS = [
    ("tune softmax rows=8 columns=128", "seconds"),
    ("tune softmax rows=8 columns=128", "compile-timeout"),
    ("tune softmax rows=8 columns=128", "run-timeout"),
    ("tune softmax rows=8 columns=128", "budget"),
    ("tune softmax rows=8 columns=128", "workers"),
    ("tune softmax rows=8 columns=128", "seed"),
    ("tune softmax rows=8 columns=128", "device"),
    ("tune-missed", "minutes"),
    ("verify", "within"),
    ("verify", "seed"),
    ("sweep softmax rows=8 columns=128 --out x", "sample"),
    ("sweep softmax rows=8 columns=128 --out x", "repetitions"),
    ("sweep softmax rows=8 columns=128 --out x", "again"),
    ("sweep softmax rows=8 columns=128 --out x", "seed"),
]


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_a_command_refuses_the_same(command, option):
    floats = option in ("seconds", "compile-timeout", "run-timeout", "minutes", "within")
    for wrong in ("nan", "inf", "-1", "-inf", "x", *(() if floats else ("1.5", "99999999999999999999"))):
        ended = typer.testing.CliRunner().invoke(app, [*command.split(), f"--{option}={wrong}"])
        assert ended.exit_code == 2, ended.output
        assert f"--{option}" in ended.stderr


@pytest.mark.parametrize("wrong", ["maybe", "2", "onn", "yes please"])
def test_the_environment_is_refused_that_says_neither_on_nor_off(wrong, monkeypatch):
    monkeypatch.setenv(stored.MISSES_ENVIRONMENT, wrong)
    with pytest.raises(ValueError, match=r"TILE_SCHEDULER_MISSES=.* is not one of on, 1"):
        stored.logs_misses()
    scheduler.reload()
    with pytest.raises(ValueError, match="TILE_SCHEDULER_MISSES"):
        scheduler.tuned_softmax(jnp.ones((3, 77)))
    assert [found.state for found in doctor._misses()] == ["broken"]


@pytest.mark.parametrize(("said", "noted"), [("", True), ("ON", True), (" off ", False), ("0", False), ("true", True)])
def test_the_environment_turns_misses_on_and_off(said, noted, monkeypatch):
    monkeypatch.setenv(stored.MISSES_ENVIRONMENT, said)
    assert stored.logs_misses() == noted
