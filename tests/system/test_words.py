"""What is asked or declared wrongly is answered in a sentence, not by whatever breaks first."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from operations import Double, DoubleProblem, DoubleSchedule
from typer.testing import CliRunner

import scheduler
from scheduler import tuned, tuned_matmul
from scheduler.cli.app import app
from scheduler.core.hardware import CPU
from scheduler.search.task import problems_of
from search_spaces import DeclarationError, Footprint, Operand, Phase, Space
from search_spaces.matmul import MATMUL, MatmulProblem
from search_spaces.rows.formulas import SOFTMAX

SMALL = {"m": 16, "n": 16, "k": 16, "dtype": "float32"}


# What a caller asks


@pytest.mark.parametrize("operation", [MATMUL, "matmul", tuned_matmul, tuned(MATMUL), tuned("matmul")])
def test_an_operation_is_named_by_itself_its_name_or_a_function_that_runs_it(operation):
    assert scheduler.predict(operation, SMALL).backend == "xla"
    assert scheduler.tune(operation, SMALL, budget=1).key.operation == "matmul"
    a = jnp.ones((4, 4))
    assert (tuned(operation)(a, a) == 4).all()


def test_what_is_no_operation_or_no_problem_of_it_is_named():
    for given in (len, None, jnp.matmul, MatmulProblem):
        with pytest.raises(TypeError, match="expected an Operation, a tuned function or one of 'matmul', 'softmax'"):
            scheduler.tune(given, SMALL, budget=1)
    with pytest.raises(ValueError, match="no operation 'matmull'"):
        tuned("matmull")
    for given in ([16, 16, 16], "m=16", SOFTMAX.problem(4, 4)):
        with pytest.raises(
            TypeError, match=r"expected arrays as in a call of matmul, a problem, or a dict of its fields \(m, n"
        ):
            scheduler.tune("matmul", given, budget=1)


@pytest.mark.parametrize("backends", ["pallas", ["pallas"], ["pallas", "xla"], ("xla", "pallas"), {"pallas", "xla"}])
def test_pallas_is_all_but_the_library_among_other_names_too(backends):
    a = jnp.ones((4, 4))
    assert (tuned_matmul(a, a, backends=backends) == 4).all()
    record = scheduler.tune("matmul", SMALL, budget=2, backends=backends)
    assert {entry.backend for entry in record.entries} == {"xla", "interpret"}, record


def test_wrong_arguments_are_answered_with_what_is_wanted():
    a = jnp.ones((4, 4))
    with pytest.raises(
        TypeError, match=r"backends must be a name or several, found 3 \(there are: mosaic_gpu, .*interpret, xla;"
    ):
        tuned_matmul(a, a, backends=3)
    for budget in ("8", 8.0, True):
        with pytest.raises(TypeError, match=r"budget=.* is a \w+; give an integer"):
            scheduler.tune("matmul", SMALL, budget=budget)
    with pytest.raises(TypeError, match="seconds='10' is a str; give a finite number above 0, or None"):
        scheduler.tune("matmul", SMALL, seconds="10")


# Problems that no memory holds


@pytest.mark.parametrize(
    ("operation", "fields", "words"),
    [
        (
            "matmul",
            {"m": 99999999999999999999, "n": 16, "k": 16},
            r"bfloat16\[99999999999999999999, 16\] would be 2.98e\+12 GiB",
        ),
        (
            "matmul",
            {"m": 2**40, "n": 2**40, "k": 1},
            r"bfloat16\[1099511627776, 1099511627776\] would be 2.25e\+15 GiB",
        ),
        ("softmax", {"rows": 2**62, "columns": 8}, "which no memory holds"),
        ("silu_and_mul", {"rows": 2**59, "columns": 2**3}, r"bfloat16\[576460752303423488, 16\]"),
    ],
)
def test_a_problem_that_no_memory_holds_is_refused_with_its_size(operation, fields, words):
    with pytest.raises(ValueError, match=words):
        scheduler.predict(operation, fields)
    with pytest.raises(ValueError, match=words):
        tuned(operation).operation.problem(**fields)
    ran = CliRunner().invoke(app, ["explain", operation, *(f"{k}={v}" for k, v in fields.items())])
    assert (ran.exit_code, "which no memory holds" in " ".join(ran.output.replace("│", " ").split())) == (2, True)


def test_the_size_of_a_problem_is_right_however_large_it_is():
    problem = MatmulProblem(2**30, 2**30, 2**30, "float32")
    assert problem.bytes_moved == 3 * 4.0 * 2**60
    assert problem.flops == 2.0 * 2**90
    assert np.isfinite(scheduler.predict("matmul", problem, hardware="NVIDIA H200").predicted_s)


def test_a_problem_of_ones_own_is_asked_for_its_size_too():
    with pytest.raises(ValueError, match=r"float32\[9223372036854775808\] would be 3.44e\+10 GiB"):
        DoubleProblem(2**63)


# What a kernel declares


def wrong(**methods):
    """`Double` with other methods."""
    return type("Wrong", (Double,), methods)()


@pytest.mark.parametrize("answer", [False, True, "", 0])
def test_a_kernel_that_answers_no_words_is_named(answer):
    with pytest.raises(DeclarationError, match=rf"Wrong.supports returned {answer!r}: it returns None where"):
        wrong(supports=lambda self, problem, target: answer).supports(DoubleProblem(8), CPU.target)


@pytest.mark.parametrize(
    "rule",
    [
        lambda s: s.tile > 1 and s.tile < 8,
        lambda s: 1 < s.tile < 8,
        lambda s: not s.tile == 1,  # noqa: SIM201
        lambda s: True if s.tile == 1 else False,  # noqa: SIM210
    ],
)
def test_a_rule_that_wants_one_truth_value_is_named_with_what_to_write(rule):
    space = Space(DoubleSchedule, {"tile": (1, 2, 4), "behave": ("ok",)}, {"tile is in between": rule})
    with pytest.raises(DeclarationError, match=r"the rule 'tile is in between' wants one truth value .*\(a\) & \(b\)"):
        space.legal()


def test_a_footprint_that_wants_one_truth_value_is_named():
    def footprint(self, problem, schedules, target):
        return 1 if schedules.tile > 2 else 0

    def verified(self, problem, schedules, target):
        return schedules.tile > 2 and schedules.tile < 8

    kernel = wrong(footprint=footprint, verified=verified)
    points = kernel.space(DoubleProblem(8), CPU.target).points()
    for method in (kernel.footprint, kernel.verified):
        with pytest.raises(DeclarationError, match=rf"Wrong.{method.__name__} wants one truth value"):
            method(DoubleProblem(8), points, CPU.target)


@pytest.mark.parametrize("choices", [{1, 2}, (x for x in (1, 2)), 4, "ok", None, {1: 2}, np.arange(3)])
def test_choices_that_are_no_tuple_are_named(choices):
    with pytest.raises(DeclarationError, match=r"the choices of tile are .*: write them as a tuple"):
        Space(DoubleSchedule, {"tile": choices, "behave": ("ok",)})


def test_choices_of_other_types_are_named_and_a_list_will_do():
    for value in (np.float32(1), np.float64(1), [1, 2], {1}, object, 1j, b"1"):
        with pytest.raises(
            DeclarationError, match=r"tile=.* is a \w+: choices are int, bool, float, str, None, or tup"
        ):
            Space(DoubleSchedule, {"tile": (1, value), "behave": ("ok",)})
    for value in (1.5, (1, 2), True, "1"):
        with pytest.raises(DeclarationError, match="to choose: give values of one type"):
            Space(DoubleSchedule, {"tile": (1, value), "behave": ("ok",)})
    assert Space(DoubleSchedule, {"tile": [1, 2], "behave": ["ok"]}).size == 2


@pytest.mark.parametrize("axis", [1, -1])
def test_an_operand_that_an_axis_outside_the_grid_selects_is_named(axis):
    operands = (Operand(bytes=4.0, axes=(0,)), Operand(bytes=4.0, axes=(0, axis)))
    with pytest.raises(
        DeclarationError, match=rf"operand 1 of the footprint is selected by axis {axis}: its grid has axes 0"
    ):
        Footprint("float32", (np.ones(2),), Phase(operands), onchip_bytes=np.ones(2))


OWN = """
import sys
sys.path[:0] = [{tests!r}]
import dataclasses
from operations import DOUBLE, Double, DoubleLibrary
from search_spaces import Operation


class Wrong(Double):
    def supports(self, problem, target):
        return False


OWN = dataclasses.replace(DOUBLE, name="own", kernels=(Wrong(), DoubleLibrary()))
"""


@pytest.mark.parametrize("command", ["tune", "explain"])
def test_the_command_line_says_it_in_a_sentence(command, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN.format(tests=str(Path(__file__).parents[1])))
    ran = CliRunner().invoke(app, [command, f"{file}:OWN", "n=8"])
    assert ran.exit_code == 1
    assert "Wrong.supports returned False" in ran.output


def test_a_search_without_time_and_a_path_for_a_store_are_answered_with_what_is_wanted(tmp_path):
    for seconds in (0, -1, -0.5):
        with pytest.raises(ValueError, match="is out of range; give a finite number above 0, or None"):
            scheduler.tune("matmul", SMALL, seconds=seconds)
    for path in (str(tmp_path / "cache.db"), tmp_path / "cache.db"):
        with pytest.raises(TypeError, match=r"must be a scheduler.Store, found .*'/"):
            scheduler.tune("matmul", SMALL, budget=1, store=path)


def test_a_prediction_is_for_the_chip_of_the_target_unless_another_is_named():
    large = {"m": 4096, "n": 4096, "k": 4096}
    with scheduler.target("NVIDIA H200"):
        assert scheduler.predict("matmul", large) == scheduler.predict("matmul", large, hardware="NVIDIA H200")
        assert scheduler.predict("matmul", large, hardware="TPU v5 lite").backend != "mosaic_gpu"
    assert scheduler.predict("matmul", large) != scheduler.predict("matmul", large, hardware="NVIDIA H200")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--seed", "-1", "an integer from 0 to 4294967295, found '-1'"),
        ("--workers", "1.5", "an integer from 1 to 2147483647, found '1.5'"),
        ("--seconds", "0", "a number, 0.001 or more, found '0'"),
        ("--seconds", "ten", "a number, 0.001 or more, found 'ten'"),
    ],
)
def test_a_number_out_of_range_is_named_with_the_range(option, value, expected):
    ran = CliRunner().invoke(app, ["tune", "matmul", "m=8", "n=8", "k=8", option, value])
    assert ran.exit_code == 2
    assert f"Invalid value for '{option}': expected {expected}" in " ".join(ran.output.split())


def test_blocks_of_rows_that_are_quantized_are_named_as_in_a_call():
    called = scheduler.tuned_quantize_rows.operation
    fields = {"rows": "8", "columns": "64", "dtype": "float32"}
    assert called.problem.parse(fields | {"block": "16"}) == called.problem(32, 16, "float32")
    ran = CliRunner().invoke(app, ["explain", "quantize_rows", *(f"{x}={y}" for x, y in fields.items()), "block=16"])
    assert "rows=32 columns=16" in ran.output
    for block in ("0", "24", "-1", "x"):
        with pytest.raises(ValueError, match=f"block={block} does not divide columns=64"):
            called.problem.parse(fields | {"block": block})
    with pytest.raises(ValueError, match="only an extent may be a range"):
        problems_of(called, {"rows": "8", "columns": "64..128", "block": "16"})


def test_a_prediction_expects_no_gain_of_nothing():
    unsure = scheduler.predict("matmul", {"m": 6144, "n": 1280, "k": 2304}, hardware="h200")
    assert unsure.backend == "xla"
    expected = f"the model expects a gain over the library with probability {unsure.faster:.0%}, and a loss of "
    assert unsure.reason.startswith(expected)
    assert "of the gain, above 0.35" in unsure.reason


@pytest.mark.parametrize(
    ("budget", "complaint"),
    [
        ("0", "budget=0 is out of range; give an integer from 1 to 2147483647, or quick, default, full"),
        ("much", "budget='much' is a str; give an integer from 1 to 2147483647, or quick, default, full"),
    ],
)
def test_a_budget_is_a_number_or_one_of_three_words(budget, complaint):
    ran = CliRunner().invoke(app, ["tune", "matmul", "m=8", "n=8", "k=8", "--budget", budget])
    assert ran.exit_code == 2
    assert f"Invalid value for '--budget': {complaint}" in " ".join(ran.output.split())
