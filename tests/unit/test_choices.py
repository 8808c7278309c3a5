"""Choices that are floats, tuples or None, complete choices as `configs`, and functions that could never answer."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import scheduler
from scheduler.core import codec
from scheduler.core.hardware import CPU
from scheduler.core.records import Measurement, Trial, schedule_text, schedule_to_text
from scheduler.inspect.explain import explain
from scheduler.store.store import Store
from search_spaces import DeclarationError, Footprint, Operand, Phase, Space

X = jnp.arange(16.0)
# The values of one choice, in ways that differ.
VALUES = [
    (0.5, 1.0, 2.25),
    (0.1, 1e-300, 1.7976931348623157e308, 5e-324, 0.0, -1.5),
    ((1, 2), (3, 4)),
    ((1,), (1, 2), ()),
    (None, 64, 128),
    (None, "row", "column"),
    (None,),
    ((1.5, "a b", None, True), (0.1, '\u00e9"', None, False)),
    (((1, (2, 3)),), ((1, (2, 4)),)),
    (None, (4, 8)),
    (None, 0.5),
    (1, 2),
    (True, False),
    (None, True),
]


def schedules(values):
    kind = dataclasses.make_dataclass("kind", ["size", "way"], frozen=True)
    return Space(kind, {"size": (4, 8), "way": values}, {"any": lambda s: s.size > 0})


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


@pytest.mark.parametrize("values", VALUES, ids=repr)
def test_a_choice_is_stored_and_read_again_as_it_is(values):
    space = schedules(values)
    legal, dropped = space.legal()
    assert (len(legal), dropped) == (2 * len(values), {})
    rows = [legal.row(index) for index in range(len(legal))]
    assert [repr(row["way"]) for row in rows] == [repr(value) for value in values] * 2
    for row in rows:
        trial = Trial(0, "pallas", 0, row, Measurement(1e-6, (1e-6,), "wall", "cold"), 1e-6)
        again = codec.trial_from_text(codec.trial_to_text(trial)).schedule
        assert repr(dict(sorted(again.items()))) == repr(row)
        assert repr(space.decode(json.loads(schedule_to_text(row)))) == repr(space.decode(row))
        assert space.broken(space.decode(row)) is None
        assert len(schedule_text(row).split(" way=")[0].split()) == 1
    assert schedule_text({"way": values[0]}).startswith("way=")


@pytest.mark.parametrize(
    ("values", "given", "words"),
    [
        ((1, 2), 1.0, "way=1.0 is not a int"),
        ((1.0, 2.0), 1, "way=1 is not a float"),
        ((1.0, 2.0), 1.5, "way=1.5 is not among 1.0, 2.0"),
        ((1, 2), None, "way=None is not a int"),
        ((None, 2), "2", "way='2' is not None or a int"),
        (((1, 2),), (1, True), r"way=\(1,True\) is not among \(1,2\)"),
        (((1,),), (True,), r"way=\(True,\) is not among \(1,\)"),
        (((1, 2),), (1.0, 2), r"way=\(1.0,2\) is not among"),
        (((1, 2),), 1, "way=1 is not a tuple"),
        ((True,), 1, "way=1 is not a bool"),
    ],
)
def test_another_value_is_refused(values, given, words):
    space = schedules(values)
    with pytest.raises(ValueError, match=words):
        raise ValueError(space.broken(space.decode({"size": 4, "way": given})))


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -0.0, (1, float("nan")), ("\ud800",), (1, [2]), ((2**70,),), np.float64(1)]
)
def test_what_is_not_stored_as_it_is_is_refused(value):
    with pytest.raises(DeclarationError, match="way="):
        schedules((value,))


def scaled(**told):
    """``3 * x`` with a block, a factor and a way to write it."""

    def function(x, *, block, factor, way, target):
        rows, _ = block

        def body(x_ref, out_ref):
            out_ref[...] = x_ref[...] * factor * (3.0 / factor) if way is None else x_ref[...] * 3.0 / factor * factor

        spec = pl.BlockSpec((rows,), lambda i: (i,))
        return pl.pallas_call(
            body, grid=(x.size // rows,), in_specs=[spec], out_specs=spec, out_shape=x, interpret=True
        )(x)

    told = {
        "block": ((4, 1), (8, 2), (32, 1)),
        "factor": (0.5, 1.5),
        "way": (None, "plain"),
        "rules": {"a block divides the rows": lambda x, block: x.size % block[0] == 0 and block[0] <= x.size},
        "reference": lambda x: 3 * x,
        "tolerance": 1e-5,
        "name": "scaled_by_three",
    } | told
    return scheduler.autotune(**told)(function)


def a_footprint(x, block):
    return Footprint(
        arithmetic="float32",
        grid=(x.size / block[0],),
        step=Phase(loads=(Operand(bytes=4.0 * block[0], axes=(0,)),), flops=1.0 * block[0]),
        tile=Phase(bytes_written=4.0 * block[0]),
        onchip_bytes=8 * block[0],
    )


@pytest.mark.parametrize("told", [{}, {"footprint": a_footprint}], ids=["no footprint", "footprint"])
def test_it_is_searched_stored_called_and_given(told):
    function = scaled(**told)
    record = function.tune(X, budget=9)
    trials = Store(os.environ["TILE_SCHEDULER_CACHE"]).last_trials(record.key)
    tried = [trial for trial in trials if trial.backend == "pallas"]
    assert len(tried) == 8
    assert all(isinstance(trial.outcome, Measurement) for trial in tried)
    assert {trial.schedule["way"] for trial in tried} == {None, "plain"}
    for backends in (None, "pallas"):
        np.testing.assert_allclose(function(X, backends=backends, on_miss="error"), 3 * X, rtol=1e-5)
    for block in ((8, 2), [8, 2]):
        given = {"block": block, "factor": 1.5, "way": None}
        np.testing.assert_allclose(function(X, schedule=given), 3 * X, rtol=1e-5)
        np.testing.assert_allclose(jax.jit(lambda x, s=given: function(x, schedule=s))(X), 3 * X, rtol=1e-5)
    with pytest.raises(scheduler.IllegalSchedule, match="breaks the rule 'a block divides the rows'"):
        function(X, schedule={"block": (32, 1), "factor": 1.5, "way": None})
    accounts = {account.backend: account for account in explain(function.operation, function.problem(X), CPU, [])}
    assert accounts["pallas"].footprint == bool(told)
    assert function(jnp.arange(32.0), backends="pallas").shape == (32,)


CONFIGS = [
    {"block": (4, 1), "factor": 0.5, "way": None},
    {"block": (8, 2), "factor": 0.5, "way": "plain"},
    {"block": (8, 2), "factor": 1.5, "way": None},
    {"block": (8, 2), "factor": 1.5, "way": None},
]


def of_configs(configs=None, **told):
    def function(x, *, block, factor, way):
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] * factor * (3 / factor) if way is None else x_ref[...] * (3 / factor) * factor

        return pl.pallas_call(body, out_shape=x, interpret=True)(x)

    told = {
        "configs": CONFIGS if configs is None else configs,
        "reference": lambda x: 3 * x,
        "name": "of_configs",
    } | told
    return scheduler.autotune(**told)(function)


def test_complete_choices_are_the_only_ones():
    function = of_configs()
    problem = function.problem(X)
    space = function.operation.kernels[0].space(problem, CPU.target)
    legal, dropped = space.legal()
    assert [legal.row(index) for index in range(len(legal))] == CONFIGS[:3]
    assert space.size == len(legal) + sum(dropped.values())
    record = function.tune(X, budget=9)
    trials = Store(os.environ["TILE_SCHEDULER_CACHE"]).last_trials(record.key)
    assert sorted(str(t.schedule) for t in trials if t.backend == "pallas") == sorted(map(str, CONFIGS[:3]))
    with pytest.raises(
        scheduler.IllegalSchedule, match="breaks the rule 'way is one of the configs, with block, factor'"
    ):
        function(X, schedule={"block": (8, 2), "factor": 1.5, "way": "plain"})
    few = of_configs(rules={"narrow": lambda block: block[1] == 1}, name="few_configs")
    assert len(few.operation.kernels[0].space(few.problem(X), CPU.target).legal()[0]) == 1


def test_many_complete_choices_are_looked_at_quickly():
    configs = [{f"c{place}": (7 * number + place) % 97 for place in range(12)} for number in range(97)]
    told = scheduler.autotune(configs=configs, reference=lambda x: x, name="many_configs")(lambda x, **choices: x)
    legal, _ = told.operation.kernels[0].space(told.problem(X), CPU.target).legal()
    assert len(legal) == 97


@pytest.mark.parametrize(
    ("configs", "words"),
    [
        ([], r"configs=\[\]: write a list of complete choices"),
        ({}, r"configs=\{\}: write a list of complete choices"),
        ({"block": 4}, "write a list of complete choices"),
        (4, "configs=4: write a list"),
        ([4], "4 among the configs is no dict"),
        ([{}], r"\{\} among the configs is no dict"),
        ([{1: 2}], "is no dict of choices"),
        ([CONFIGS[0], {"block": (4, 1)}], r"\{'block': \(4, 1\)\} among the configs has other names than"),
        ([CONFIGS[0] | {"block": 4}, CONFIGS[1]], "give values of one type"),
        ([CONFIGS[0] | {"tile": 4}], "tile is no parameter of function"),
        ([CONFIGS[0] | {"block": [4, 1]}], "is a list: choices are"),
    ],
)
def test_configs_that_are_none_are_named(configs, words):
    with pytest.raises(DeclarationError, match=words):
        of_configs(configs)


# Functions that could never answer.


def returning(result, *, reference, tile=(1, 2), name="returning"):
    def function(x, *, tile):
        return result(x, tile)

    return scheduler.autotune(tile=tile, reference=reference, name=name)(function)


@pytest.mark.parametrize(
    ("result", "reference", "words"),
    [
        (lambda x, tile: x[None], lambda x: x, r"returns float32\[1,16\] for x=float32\[16\], .* float32\[16\]:"),
        (lambda x, tile: x[:-1], lambda x: x, r"returns float32\[15\]"),
        (lambda x, tile: x.astype(jnp.bfloat16), lambda x: x, r"returns bfloat16\[16\]"),
        (lambda x, tile: (x, x), lambda x: x, r"returns \(float32\[16\], float32\[16\]\)"),
        (lambda x, tile: x, lambda x: (x, x), r"reference \(float32\[16\], float32\[16\]\)"),
        (lambda x, tile: (x,), lambda x: x, r"returns \(float32\[16\],\)"),
        (lambda x, tile: {"y": x}, lambda x: x, "returns a dict"),
        (lambda x, tile: None, lambda x: x, "returns a NoneType"),
        (lambda x, tile: (x, x.sum()), lambda x: (x.sum(), x), r"returns \(float32\[16\], float32\[\]\)"),
        (lambda x, tile: x[tile:], lambda x: x, r"returns float32\[14\]"),
    ],
)
@pytest.mark.parametrize("use", ["call", "jit", "vmap"])
def test_what_could_never_answer_is_told_at_the_first_use(result, reference, words, use):
    function = returning(result, reference=reference)
    called = {
        "call": lambda: function(X),
        "jit": lambda: jax.jit(function)(X),
        "vmap": lambda: jax.vmap(function)(X[None]),
    }
    with pytest.raises(DeclarationError, match=words):
        called[use]()


def test_one_right_schedule_is_enough_and_one_that_does_not_build_is_for_the_search():
    right = returning(lambda x, tile: x if tile == 2 else x[None], reference=lambda x: x, name="one_right")
    assert (right(X) == X).all()

    def broken(x, tile):
        raise ValueError("no such tile")

    never = returning(broken, reference=lambda x: x, name="never_builds")
    assert (never(X) == X).all()


def test_what_is_traced_once_is_not_traced_in_every_call():
    traces = []
    function = returning(lambda x, tile: traces.append(tile) or x, reference=lambda x: x, name="counted")
    for _ in range(5):
        function(X)
    known = len(traces)
    assert known <= 2
    for _ in range(5):
        function(X)
        jax.jit(lambda x: function(x))(X)
    assert len(traces) == known
