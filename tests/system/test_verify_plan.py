"""`tile-scheduler verify --plan`: a plan's kernels, or its whole function, timed again."""

import dataclasses
import json
import time
from pathlib import Path

import operations
import pytest
from test_tune_function import SOCIABLE, Company, X, shy, sociable, store  # noqa: F401
from typer.testing import CliRunner

import scheduler
from scheduler import Plan, tune_function
from scheduler.cli.app import app
from scheduler.functions import ablation

pytestmark = pytest.mark.slow

OWN = Path(__file__).with_name("test_tune_function.py")
STEPS = f"""
import sys
sys.path.insert(0, {str(OWN.parent)!r})
import jax.numpy as jnp
from scheduler import tuned
from search_spaces import load
from test_tune_function import X, shy, sociable

def step():
    return (lambda x: sociable(x) + 1), (X,)

def of_shapes(x):
    return sociable(x)

def of_shyness(x):
    return shy(x)

def lone():
    return sociable(X)
"""


@pytest.fixture(autouse=True)
def _no_answers(_own_cache, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", operations.own_time)
    monkeypatch.setattr(ablation, "SECONDS_OF_VARIANT", 0.4)
    scheduler.reload()


@pytest.fixture
def plan(tmp_path, store):  # noqa: F811
    """Of one kernel that is faster than XLA, in a file."""
    made = tune_function(sociable, X, minutes=0, store=store)
    assert [answer.backend for answer in made.answers] == ["quick"]
    made.save(tmp_path / "step.plan.json")
    (tmp_path / "steps.py").write_text(STEPS)
    return tmp_path / "step.plan.json"


def ran(*arguments):
    done = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    return done.exit_code, done.output


def changed(file, **fields):
    """The plan with other fields of its one answer."""
    made = Plan.load(file)
    made = dataclasses.replace(made, answers=(dataclasses.replace(made.answers[0], **fields),))
    made.save(file)


def test_kernels_of_a_plan_are_verified_beside_xla(plan):
    status, said = ran("--plan", plan, "--operation", f"{OWN}:SOCIABLE", "--json")
    assert status == 0, said
    (verdict,) = json.loads(said[said.index("[\n") :])
    assert verdict["state"] == "holds"
    assert {rival["backend"]: rival["now_s"] > 0 for rival in verdict["rivals"]} == {"quick": True, "xla": True}


def test_a_plan_of_a_kernel_that_nobody_loaded_says_what_to_name(plan, monkeypatch):
    monkeypatch.setattr("search_spaces._loaded", {})
    status, said = ran("--plan", plan)
    assert (status, "give --operation file.py:NAME" in said) == (1, True), said


def test_a_kernel_of_another_version_or_chip_does_not_hold(plan):
    changed(plan, version=5)
    status, said = ran("--plan", plan, "--operation", f"{OWN}:SOCIABLE")
    assert (status, "1 of 1 kernels of the plan are invalid" in said) == (1, True), said
    status, said = ran("--plan", plan, "--function", f"{plan.parent}/steps.py:step")
    assert (status, "version 5 of the quick kernel, now version" in said) == (1, True), said
    changed(plan, version=SOCIABLE.kernel("quick").version)
    dataclasses.replace(Plan.load(plan), hardware="NVIDIA H200 (132 cores, 141 GiB)").save(plan)
    status, said = ran("--plan", plan, "--operation", f"{OWN}:SOCIABLE")
    assert (status, "it is for another chip than this one" in said) == (1, True), said


@pytest.mark.parametrize("arguments", [["step"], ["of_shapes", "f32[8]"]])
def test_a_whole_function_is_timed_again_under_its_plan(plan, arguments):
    name, *shapes = arguments
    status, said = ran("--plan", plan, "--function", f"{plan.parent}/steps.py:{name}", *shapes, "--json")
    assert status == 0, said
    found = json.loads(said[said.index("{\n") :])
    assert found["plan_s"] < found["xla_s"]
    assert (found["gain_low"] > 0, found["wrong"], found["plan"]) == (True, None, Plan.load(plan).digest)
    status, said = ran("--plan", plan, "--function", f"{plan.parent}/steps.py:{name}", *shapes)
    assert (status, "x as fast as XLA alone" in said, ", then " in said) == (0, True, True), said


@pytest.mark.parametrize(
    ("company", "words"),
    [
        ("slow", "the function is faster without the plan: make it again"),
        ("wrong", "the plan changes the results of the function: result float32[8] differs by 0.5 of its size"),
    ],
)
def test_a_plan_that_does_not_help_any_more_ends_with_an_error(company, words, tmp_path, store):  # noqa: F811
    tune_function(shy, X, minutes=0, store=store).save(tmp_path / "shy.json")
    (tmp_path / "steps.py").write_text(STEPS)
    Company.now = company
    status, said = ran("--plan", tmp_path / "shy.json", "--function", f"{tmp_path}/steps.py:of_shyness", "f32[8]")
    assert (status, words in said) == (1, True), said


def test_what_cannot_be_verified_is_said_in_a_sentence(plan, tmp_path):
    place = f"{plan.parent}/steps.py"
    for arguments, words in (
        (["--function", f"{place}:step"], "--function needs --plan"),
        (["--plan", plan, "m=16"], "--plan verifies its whole file"),
        (["--plan", plan, "--shipped"], "--plan verifies its whole file"),
        (["--plan", plan, "--function", f"{place}:none"], "cannot load"),
        (["--plan", plan, "--function", f"{place}:lone"], "must return (function, (argument, ...)) to time"),
        (["--plan", plan, "--function", f"{place}:of_shapes"], "give the shapes of its arrays"),
        (["--plan", plan, "--function", f"{place}:of_shapes", "f32[9]"], "has no problem of this function"),
        (["--plan", tmp_path / "none"], "cannot be read"),
    ):
        status, said = ran(*arguments)
        said = " ".join(said.replace("│", " ").split())
        assert (status in (1, 2), words in said) == (True, True), said
