"""`scheduler.autotune`: what a decorated function becomes, how it is called, searched, stored and told of."""

import ast
import dataclasses
import functools
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import own_kernels
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from own_kernels import doubled, faulty, linear, linear_reference, sum_and_max
from typer.testing import CliRunner

import scheduler
from scheduler.cli.app import app
from scheduler.core import hardware
from scheduler.core.hardware import CPU
from scheduler.core.records import Failure, Measurement
from scheduler.inspect.explain import explain
from scheduler.measure.build import lower_candidate, requested_onchip_bytes
from scheduler.measure.pool import start_runner
from scheduler.measure.replay import Replay
from scheduler.measure.runner import InProcess, RunnerOptions
from scheduler.model.calibration import observed
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from scheduler.prediction.predict import predict
from scheduler.prediction.transfer import distance
from scheduler.search.candidates import collect
from scheduler.search.sweep import sweep
from scheduler.search.task import SearchOptions, Task
from scheduler.store.store import Store
from search_spaces import DeclarationError, Footprint, Operand, Phase, load, locate
from search_spaces.jax_compat import HAS_GPU_INTERPRETER

pytestmark = pytest.mark.slow_but_first

ROOT = Path(__file__).parents[2]
OWN = (ROOT / "examples" / "autotuned_kernel.py").read_text()
H200 = hardware.find("NVIDIA H200")
needs_gpu_interpreter = pytest.mark.skipif(not HAS_GPU_INTERPRETER, reason="Mosaic GPU's interpreter needs JAX 0.11")

ODD = [
    jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))
    for seed, shape, dtype in ((0, (33, 47), jnp.bfloat16), (1, (47, 29), jnp.bfloat16), (2, (29,), jnp.float32))
]


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


def added(**told):
    """``x + 1`` as a tuned function of tiles 4 and 8; `told` says more, or something else."""

    def one_more(x, *, tile, target):
        return pl.pallas_call(
            lambda x_ref, out_ref: out_ref.__setitem__(..., x_ref[...] + 1),
            grid=(x.size // tile,),
            in_specs=[pl.BlockSpec((tile,), lambda i: (i,))],
            out_specs=pl.BlockSpec((tile,), lambda i: (i,)),
            out_shape=x,
            interpret=target.platform == "cpu",
        )(x)

    function = told.pop("function", one_more)
    return scheduler.autotune(**{"tile": (4, 8), "reference": lambda x: x + 1, "name": "one_more"} | told)(function)


def close(actual, expected, tolerance=2e-2):
    def alike(a, b):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), tolerance, tolerance)

    jax.tree.map(alike, actual, expected)


# A product with its epilogue, of shapes that no tile divides.


@pytest.mark.parametrize(("bias", "activation"), [(ODD[2], "silu"), (None, "none")])
def test_every_schedule_of_an_odd_product_is_right_and_the_call_answers_with_what_was_measured(bias, activation):
    problem = linear.problem(*ODD[:2], bias, activation=activation)
    record = scheduler.tune(linear, problem, budget=20)
    trials = Store(os.environ["TILE_SCHEDULER_CACHE"]).last_trials(record.key)
    tried = [trial for trial in trials if trial.backend == "pallas"]
    assert len(tried) == 5  # of 12: the rules leave tile_k = 16, and result tiles of at most 512
    assert all(isinstance(trial.outcome, Measurement) for trial in tried)
    expected = linear_reference(*ODD[:2], bias, activation=activation)
    for answered in (
        linear(*ODD[:2], bias, activation=activation, on_miss="error"),
        jax.jit(functools.partial(linear, activation=activation, backends="pallas", on_miss="error"))(*ODD[:2], bias),
    ):
        close(answered, expected)


def test_a_static_parameter_and_an_array_left_out_are_other_problems_and_a_default_is_none_of_them():
    problem = linear.problem(*ODD)
    assert str(problem) == "x=bfloat16[33,47] w=bfloat16[47,29] bias=float32[29]"
    assert str(linear.problem(*ODD, activation="none")) == str(problem)
    assert str(linear.problem(*ODD[:2], activation="silu")) == "x=bfloat16[33,47] w=bfloat16[47,29] activation=silu"
    kind = linear.operation.problem
    for each in (problem, linear.problem(*ODD[:2], activation="silu")):
        assert kind.from_canonical(each.canonical()) == each
        assert kind.parse(dict(field.split("=") for field in str(each).split())) == each
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ODD]
    assert linear.problem(*structs) == problem


def test_arrays_may_be_named_and_what_does_not_fit_is_told_in_a_sentence():
    whole = linear(*ODD, backends="pallas")
    close(linear(ODD[0], bias=ODD[2], w=ODD[1], backends="pallas"), whole)
    for wrong, sentence in (
        (lambda: linear(ODD[0]), "linear takes the arrays x, w, bias; 1 were given, without w"),
        (lambda: linear(*ODD, ODD[0]), "4 were given"),
        (lambda: linear(*ODD, x=ODD[0]), "got several values of x"),
        (lambda: linear(*ODD, tile_m=8), r"tile_m of linear is tuned: to set it, pass schedule="),
        (lambda: linear(*ODD, activation=["silu"]), r"activation=\['silu'\] is a list: give a tuple; a static param"),
        (lambda: linear(*ODD, activation={}), "is a dict; a static parameter is part of the key"),
        (lambda: linear(*ODD, activation=ODD[0]), "a static parameter is part of the key"),
        (lambda: linear(*ODD, speed=3), "has no parameter 'speed'"),
        (lambda: jax.jit(linear)(ODD[0], bias=ODD[2]), "without w"),
    ):
        with pytest.raises(TypeError, match=sentence):
            wrong()


def test_a_schedule_can_be_given_and_must_be_legal():
    given = {"tile_m": 16, "tile_n": 32, "tile_k": 16}
    close(linear(*ODD, schedule=given), linear_reference(*ODD, activation="none"))
    with pytest.raises(scheduler.IllegalSchedule, match="breaks the rule 'a tile is no longer than k'"):
        linear(*ODD, schedule=given | {"tile_k": 64})


def test_a_jitted_function_can_be_decorated_too():
    @functools.partial(jax.jit, static_argnames=("tile", "target"))
    def thrice(x, *, tile, target):
        assert isinstance(tile, int)
        return 3 * x

    function = added(function=thrice, reference=lambda x: 3 * x, name="jitted")
    assert function(jnp.ones(8), schedule={"tile": 4}).tolist() == [3] * 8


# Transformations.


def test_derivatives_of_both_modes_are_those_of_the_reference():
    x, w, bias = (x.astype(jnp.float32) for x in ODD)

    def loss(call):
        return lambda *xs: jnp.sin(call(*xs, activation="silu")).sum()

    ours, theirs = loss(functools.partial(linear, backends="pallas")), loss(linear_reference)
    close(jax.grad(ours, (0, 1, 2))(x, w, bias), jax.grad(theirs, (0, 1, 2))(x, w, bias), 1e-4)
    close(jax.jvp(ours, (x, w, bias), (x, w, bias)), jax.jvp(theirs, (x, w, bias), (x, w, bias)), 1e-4)
    hessians = [jax.jacfwd(jax.grad(lambda bias, f=f: f(x, w, bias)))(bias) for f in (ours, theirs)]
    close(*hessians, 1e-3)


def test_a_derivative_of_ones_own_is_a_custom_vjp_around_the_function():
    @jax.custom_vjp
    def own(x, w):
        return linear(x, w, backends="pallas")

    own.defvjp(
        lambda x, w: (own(x, w), (x, w)),
        lambda kept, ct: (linear(ct, kept[1].T, backends="pallas"), linear(kept[0].T, ct, backends="pallas")),
    )
    x, w = (x.astype(jnp.float32) for x in ODD[:2])
    gradients = jax.grad(lambda x, w: jnp.sum(own(x, w) ** 2), (0, 1))(x, w)
    close(gradients, jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), (0, 1))(x, w), 1e-3)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda x: own(x, w).sum()))(x))
    assert "problem=x=float32[47,33] w=float32[33,29]" in jaxpr  # of the backward pass


def test_a_vmapped_call_is_one_call_after_another():
    x, w = jnp.stack([ODD[0]] * 3), ODD[1]
    batched = jax.jit(jax.vmap(lambda x: linear(x, w, backends="pallas")))(x)
    close(batched, jnp.stack([linear_reference(ODD[0], w, activation="none")] * 3))


def test_two_results_are_a_tuple():
    x = jax.random.normal(jax.random.key(0), (16, 5))
    record = scheduler.tune(sum_and_max, {"x": "float32[16,5]"}, budget=4)
    assert sorted({entry.backend for entry in record.entries}) == ["pallas", "xla"]
    ours = functools.partial(sum_and_max, backends="pallas", on_miss="error")
    for call in (ours, jax.jit(ours)):
        close(call(x), (x.sum(axis=1), x.max(axis=1)), 1e-5)


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_inside_shard_map_the_kernel_is_asked_and_on_the_mesh_the_reference(axes):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(axes,))
    x = jax.device_put(jnp.arange(160.0).reshape(32, 5), NamedSharding(mesh, PartitionSpec("i")))
    ours = functools.partial(sum_and_max, backends="pallas")
    mapped = jax.shard_map(ours, mesh=mesh, in_specs=(PartitionSpec("i"),), out_specs=PartitionSpec("i"))
    for call in (mapped, sum_and_max):
        close(jax.jit(call)(x), (x.sum(axis=1), x.max(axis=1)), 1e-5)
    with pytest.raises(scheduler.NoCandidate, match=r"no kernel of sum_and_max can be selected: .*mesh"):
        jax.jit(ours)(x)


# What no kernel is asked about.


def test_what_poses_no_problem_is_answered_by_the_reference_and_says_why(caplog):
    function = added()
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Explicit,))
    explicit = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, PartitionSpec("i")))
    for x, reason in ((jnp.zeros(0), "x is empty"), (2.0, "weakly typed"), (explicit, "explicit axes")):
        with caplog.at_level(logging.DEBUG, "scheduler"):
            np.testing.assert_array_equal(function(x), np.asarray(x) + 1)
        assert reason in caplog.messages[-1]
        with pytest.raises(scheduler.NoCandidate, match=reason):
            function(x, backends="pallas")
        with pytest.raises(ValueError, match=f"no kernel can be selected for this call of one_more: .*{reason}"):
            function.problem(x)


def test_keys_of_random_numbers_are_left_to_the_reference():
    function = added(reference=lambda x: x, name="keys")
    key = jax.random.key(0)
    assert (function(key) == key).all()
    with pytest.raises(ValueError, match=r"x is of the dtype key<fry>, which no key of a schedule spells"):
        function.problem(key)


# Search.


def test_candidates_that_are_wrong_or_do_not_build_are_reported_and_the_right_one_is_found():
    with pytest.warns(RuntimeWarning, match="faulty_addition, pallas: 2 of 4 schedules gave wrong results") as told:
        record = scheduler.tune(faulty, {"x": "float32[40]"}, budget=9)
    (note,) = record.notes
    assert re.search(r"gave wrong results \((how=wrong; how=misshapen|how=misshapen; how=wrong)\): ", note)
    assert [str(each.message) for each in told] == [f"faulty_addition, {note}"]
    assert "note: pallas: 2 of 4 schedules gave wrong results" in str(record)
    shown = CliRunner().invoke(app, ["show", "own_kernels:faulty", "x=float32[40]"]).output
    assert "pallas: 2 of 4 schedules gave wrong results (how=" in shown
    told = json.loads(CliRunner().invoke(app, ["tune", "own_kernels:faulty", "x=float32[40]", "--json"]).stdout)
    assert told["record"]["notes"] == [note]
    trials = Store(os.environ["TILE_SCHEDULER_CACHE"]).last_trials(record.key)
    outcomes = {trial.schedule["how"]: trial.outcome for trial in trials if trial.backend == "pallas"}
    assert isinstance(outcomes.pop("right"), Measurement)
    assert {how: outcome.stage for how, outcome in outcomes.items() if isinstance(outcome, Failure)} == {
        "wrong": "verify",
        "raises": "lower",
        "misshapen": "verify",
    }
    line = next(n for n, text in enumerate(Path(own_kernels.__file__).read_text().splitlines(), 1) if "no such" in text)
    assert outcomes["raises"].detail.endswith(f"ValueError: no such way (tests/own_kernels.py:{line})")
    assert outcomes["misshapen"].detail == "the result is float32[39] instead of float32[40]"
    assert "pallas" in {entry.backend for entry in record.entries}


def test_rules_without_a_legal_schedule_are_a_warning_that_names_them_and_their_repair_is_searched():
    x = jnp.zeros(8)
    illegal = r"no schedule is legal: every one of 2 breaks the rule 'too large'"
    with pytest.warns(RuntimeWarning, match=illegal):
        record = added(rules={"too large": lambda tile: tile > 100}).tune(x, budget=3)
    assert [entry.backend for entry in record.entries] == ["xla"]
    assert re.fullmatch(illegal, record.notes[0])
    several = {"too small": lambda tile: tile > 4, "too large": lambda tile: tile < 8}
    with pytest.warns(RuntimeWarning, match="1 of 2 break the rule 'too small', 1 of 2 break the rule 'too large'"):
        added(rules=several, name="two_rules").tune(x, budget=3)
    with pytest.warns(RuntimeWarning, match="a choice has no values"):
        added(tile=lambda x: (), name="no_values").tune(x, budget=3)

    repaired = added(rules={"too large": lambda tile: tile < 100})
    with pytest.warns(RuntimeWarning, match="the choices or rules have changed since it was measured"):
        assert repaired(x).tolist() == [1.0] * 8
    record = repaired.tune(x, budget=3)
    assert {entry.backend for entry in record.entries} == {"xla", "pallas"}
    assert record.notes == ()
    same_schedules = added(rules={"too large": lambda tile: tile <= 8, "any": lambda x: True})
    assert same_schedules.tune(x, budget=3) == record, "found in the store"


def test_a_reference_of_another_shape_is_told_by_a_search():
    function = added(reference=lambda x: x.sum(), name="other_shape")
    with pytest.warns(RuntimeWarning, match=r"2 of 2 .* failed: verify: the result is float32\[8\] instead of float32"):
        scheduler.tune(function, {"x": "float32[8]"}, budget=3)


@pytest.mark.parametrize("result", [{"y": 1}, (), None, "text"])
def test_a_reference_that_returns_no_arrays_is_named(result):
    function = added(reference=lambda x: result, name="no_arrays")
    with pytest.raises((DeclarationError, TypeError), match=r"reference of one_more returns|not a valid JAX type"):
        scheduler.tune(function, {"x": "float32[8]"}, budget=3)


def test_without_a_footprint_nothing_is_pruned_predicted_or_left_out():
    function = added(tile=tuple(range(1, 2001)), name="many_tiles")
    problem = function.problem(jax.ShapeDtypeStruct((8,), "float32"))
    kernel, _ = function.operation.kernels
    pruned = prune(kernel, problem, H200, CostModel(H200))
    assert (len(pruned.points), pruned.dropped, pruned.ranked) == (2000, {}, False)
    assert set(pruned.predicted_s) == {CostModel(H200).library_seconds(problem)}
    assert pruned.points.tile.tolist() == list(range(1, 2001))
    here = collect(Task(function.operation, problem, SearchOptions(3, backends=frozenset({"pallas"}))), InProcess())
    assert len(here.of) == 2001  # and of those that a model ranks, a quarter is kept
    answer = predict(function.operation, problem, H200, backends=frozenset({"pallas"}))
    assert answer.schedule == {"tile": 1}
    assert "the first of its schedules, because it declares no footprint" in answer.reason
    accounts = {account.backend: account for account in explain(function.operation, problem, H200, [])}
    assert not accounts["pallas"].footprint
    assert accounts["xla"].footprint


def test_what_was_measured_of_it_is_no_evidence_about_the_model():
    function = added(name="no_model")
    problem, (kernel, library) = function.problem(jnp.zeros(8)), function.operation.kernels
    trials = [
        dataclasses.replace(trial, version=version, outcome=dataclasses.replace(trial.outcome, clock="cupti"))
        for trial, version in ((t, function.operation.kernel(t.backend).version) for t in searched(function, problem))
    ]
    assert observed(kernel, problem, CPU, trials) is None
    assert observed(library, problem, CPU, trials) is not None


def searched(function, problem, budget=3):
    record = scheduler.tune(function, problem, budget=budget)
    return Store(os.environ["TILE_SCHEDULER_CACHE"]).last_trials(record.key)


def footprint_of_ones(x, tile, target):
    return Footprint(
        arithmetic="float32",
        grid=(x.size / tile,),
        step=Phase(loads=(Operand(bytes=4 * tile, axes=(0,)),), flops=tile),
        onchip_bytes=8 * tile,
    )


def test_with_a_footprint_what_does_not_fit_is_dropped_and_the_rest_is_ranked():
    tiles = (4, 8, H200.onchip_bytes // 8, H200.onchip_bytes // 8 + 1)
    function = added(tile=tiles, footprint=footprint_of_ones, name="with_footprint")
    problem = function.problem(jax.ShapeDtypeStruct((2**20,), "float32"))
    pruned = prune(function.operation.kernels[0], problem, H200, CostModel(H200))
    assert pruned.ranked
    assert list(pruned.dropped.values()) == [1]
    assert pruned.points.tile[0] == tiles[2]


def test_a_constant_footprint_serves_every_schedule():
    constant = Footprint("float32", (1.0,), Phase(), onchip_bytes=np.asarray(8))
    function = added(footprint=lambda: constant, name="constant_footprint")
    problem = function.problem(jnp.zeros(8))
    assert len(prune(function.operation.kernels[0], problem, CPU, CostModel(CPU)).points) == 2
    assert function(jnp.zeros(8), schedule={"tile": 4}).tolist() == [1] * 8


def test_the_winner_of_a_similar_call_is_tried_first():
    one, two, other = (
        linear.problem(*(jnp.zeros((m, 32)), jnp.zeros((32, n)))) for m, n in ((8, 16), (16, 32), (8, 16))
    )
    assert distance(one, two) == 2
    assert distance(one, other) == 0
    assert distance(one, linear.problem(jnp.zeros((8, 32)), jnp.zeros((32, 16)), activation="silu")) == np.inf
    assert distance(one, linear.problem(jnp.zeros((8, 32)), jnp.zeros((32, 16)), jnp.zeros(16))) == np.inf


def test_flops_that_are_declared_bound_times_and_none_are_none():
    assert linear.problem(*ODD).flops == 2 * 33 * 47 * 29
    plain = added(name="no_flops").problem(jnp.zeros(8))
    assert (plain.flops, plain.bytes_moved, plain.arithmetic) == (0, 64, "tf32")
    assert added(bytes_moved=lambda x: 4, name="gathered").problem(jnp.zeros(8)).bytes_moved == 4


def test_operands_to_measure_with_can_be_told():
    told = added(inputs=lambda rng, x: jax.random.uniform(rng, x.shape), name="told_inputs").problem(jnp.zeros(8))
    assert 0 <= told.inputs(0)[0].min() <= told.inputs(0)[0].max() <= 1
    wrong = added(inputs=lambda rng, x: jnp.zeros(3), name="wrong_inputs").problem(jnp.zeros(8))
    with pytest.raises(DeclarationError, match=r"inputs of one_more are float32\[3\] instead of float32\[8\]"):
        wrong.inputs(0)
    truths = added(name="truths").problem(jnp.zeros(1000, bool)).inputs(0)[0]
    assert 400 < truths.sum() < 600


def test_it_is_swept_and_the_recording_searched_anywhere(tmp_path):
    function = added(name="swept")
    problem = function.problem(jnp.zeros(8))
    path = tmp_path / "one.jsonl.gz"
    sweep(function.operation, problem, path, InProcess())
    record = scheduler.tune(function, problem, runner=Replay(path), budget=3)
    assert record.tried == 3


def test_the_kernels_of_the_example_fit_on_a_screen():
    definitions = {
        node.name: node.end_lineno - min([node.lineno, *(line.lineno for line in node.decorator_list)]) + 1
        for node in ast.walk(ast.parse(OWN))
        if isinstance(node, ast.FunctionDef)
    }
    assert definitions["bias_gelu"] <= 20
    assert definitions["product"] + definitions["demand"] < 40


# Lowered for a chip that is not here.


@pytest.mark.parametrize(("tile", "columns"), [(32, 256), (64, 256), (128, 128)])
def test_the_shared_memory_of_a_lowered_kernel_is_read_to_the_byte(tile, columns):
    problem = doubled.problem(jax.ShapeDtypeStruct((512, columns), "float32"))
    kernel, _ = doubled.operation.kernels
    schedule = kernel.space(problem, H200.target).decode({"tile": tile})
    lowered = lower_candidate(kernel, problem, schedule, H200.target)
    assert requested_onchip_bytes(lowered) == 4 * tile * columns + 8  # and a barrier


def test_a_program_without_such_a_kernel_asks_for_nothing_that_is_told():
    assert requested_onchip_bytes(jax.jit(lambda x: x + 1).lower(1.0)) is None
    problem, (kernel, _) = sum_and_max.problem(jnp.zeros((16, 5))), sum_and_max.operation.kernels
    schedule = kernel.space(problem, CPU.target).decode({"tile": 4})
    assert requested_onchip_bytes(lower_candidate(kernel, problem, schedule, CPU.target)) is None


def test_explain_tells_what_each_schedule_asks_for_and_which_does_not_fit(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    name = f"{ROOT / 'tests' / 'own_kernels.py'}:doubled"
    asked = ["explain", name, "x=float32[512,256]", "--hardware", "h200"]
    ran = CliRunner().invoke(app, asked)
    assert ran.exit_code == 0, ran.output
    assert "The kernel declares no footprint: nothing is pruned or predicted" in ran.output
    rows = dict(line.split("  ", 1) for line in ran.output.splitlines() if line.startswith("tile="))
    assert {tile: said.strip() for tile, said in rows.items() if tile != "tile=512"} == {
        "tile=32": "32.0 KiB on chip",
        "tile=64": "64.0 KiB on chip",
        "tile=128": "128.0 KiB on chip",
    }
    assert "smem_bytes=524296 > max_smem_bytes=232448" in rows["tile=512"]
    (ours, _) = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)["kernels"]
    assert (ours["footprint"], ours["first"][0]["onchip_bytes"]) == (False, 32 * 1024 + 8)


def test_a_call_is_lowered_for_another_chip_by_what_it_is_told_of_it():
    x = jax.ShapeDtypeStruct((512, 256), "float32")
    with scheduler.target("NVIDIA H200"):
        traced = jax.jit(lambda x: doubled(x, schedule={"tile": 64})).trace(x)
        lowered = traced.lower(lowering_platforms=("cuda",))
    assert requested_onchip_bytes(lowered) == 64 * 1024 + 8


@pytest.mark.slow
@needs_gpu_interpreter
def test_a_mosaic_gpu_kernel_is_rehearsed_on_a_cpu():
    record = scheduler.tune(doubled, {"x": "float32[128,32]"}, budget=4)
    assert "pallas" in {entry.backend for entry in record.entries}


# Names, processes, and sources that change.


def test_workers_find_it_by_its_file_and_what_it_prints_is_not_in_the_json(tmp_path):
    path = tmp_path / "own.py"
    loud = OWN.replace("def body(x_ref", "print('traced')\n    def body(x_ref")
    path.write_text(loud + "\nimport os\nprint('imported')\nos.system('echo a child process')\n")
    tune_it = ["tune", f"{path}:bias_gelu", "x=float32[8,64]", "bias=float32[64]", "--workers", "1", "--json"]
    ended = subprocess.run(
        [sys.executable, "-m", "scheduler", *tune_it],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    record = json.loads(ended.stdout)["record"]
    assert (record["operation"], record["tried"]) == ("own.bias_gelu", 2)
    assert {entry["backend"] for entry in record["entries"]} == {"pallas", "xla"}


def test_a_changed_source_is_another_kernel_whose_records_answer_no_longer(tmp_path, monkeypatch):
    path = tmp_path / "changing.py"

    def loaded(old="", new=""):
        assert old in OWN
        path.write_text(OWN.replace(old, new, 1))
        for name in [name for name in sys.modules if name.endswith("changing_py")]:
            monkeypatch.delitem(sys.modules, name)
        return load(f"{path}:bias_gelu")

    asked = {"x": "float32[8,64]", "bias": "float32[64]"}
    x, bias = jnp.ones((8, 64)), jnp.ones(64)
    first, seen = scheduler.tune(loaded(), asked, budget=3), []
    commented = loaded("def body(x_ref", "# a comment\n\n    def body(x_ref")
    assert scheduler.tune(commented, asked, budget=3, progress=seen.append) == first
    assert seen == []
    other = scheduler.tuned(
        loaded("reference=lambda x, bias: jax.nn.gelu(x + bias)", "reference=lambda x, bias: x + bias")
    )
    with pytest.raises(scheduler.CacheMiss, match="the reference has changed since it was measured"):
        other(x, bias, on_miss="error")
    changed = scheduler.tuned(loaded("+ bias_ref[...])", "+ bias_ref[...] * 1)"))
    with pytest.raises(scheduler.CacheMiss, match=r"the pallas kernel \(.*\) has changed since it was"):
        changed(x, bias, on_miss="error")
    again = scheduler.tune(changed, asked, budget=3, progress=seen.append)
    assert {e.fingerprint for e in again.entries} != {e.fingerprint for e in first.entries}
    assert seen


def test_it_is_located_by_the_function_and_loaded_by_its_name():
    assert locate(linear.operation) == "own_kernels:linear"
    assert load("own_kernels:linear") is linear.operation
    assert load(f"{ROOT / 'examples' / 'autotuned_kernel.py'}:product").name == "autotuned_kernel.product"
    with pytest.raises(ValueError, match="is a function, not an Operation, nor a function that runs one"):
        load("own_kernels:linear_reference")


def test_an_operation_is_a_global_of_the_module_that_creates_it(tmp_path, monkeypatch):
    (tmp_path / "creates_it.py").write_text("import own_kernels\nmade = own_kernels.again()\n")
    (tmp_path / "imports_it.py").write_text("from creates_it import made as renamed\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_kernels, "again", lambda: added(name="moving"), raising=False)
    assert locate(load("imports_it:renamed")) == "creates_it:made"
    assert locate(added(name="nowhere").operation) is None


def test_a_function_of_a_function_works_in_this_process_and_no_worker_can_load_it():
    function = added(name="within")
    assert locate(function.operation) is None
    assert {t.backend for t in searched(function, function.problem(jnp.zeros(8)))} == {"pallas", "xla"}
    with pytest.raises(scheduler.WorkerError, match="no worker process can load within, which is no global"):
        start_runner(function.operation, RunnerOptions(workers=1))


def test_what_is_typed_into_a_console_is_searched_in_its_process():
    text = OWN.partition("def demand")[0] + (
        "x, bias = jnp.ones((8, 64)), jnp.ones(64)\n"
        "record = scheduler.tune(bias_gelu, bias_gelu.problem(x, bias), budget=3)\n"
        "print(record.key.operation, *sorted({entry.backend for entry in record.entries}))\n"
        "print(bias_gelu(x, bias, backends='pallas', on_miss='error').shape)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-"], input=text, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "__main__.bias_gelu pallas xla\n(8, 64)\n"


def test_two_functions_of_one_name_are_told_apart_when_they_are_declared(tmp_path):
    added(name="taken")
    added(name="taken")  # again, as by a cell of a notebook
    for stem in ("first", "second"):
        (tmp_path / stem).mkdir()
        (tmp_path / stem / "clash.py").write_text(OWN)
    load(f"{tmp_path / 'first' / 'clash.py'}:bias_gelu")
    with pytest.raises(
        ValueError, match=r"'clash.bias_gelu' already names bias_gelu of .*first/clash.py:\d+, .* name="
    ):
        load(f"{tmp_path / 'second' / 'clash.py'}:bias_gelu")
    with pytest.raises(DeclarationError, match="'matmul' is an operation of this package: give one_more another name="):
        added(name="matmul")


def test_a_file_of_a_package_is_named_as_the_package_has_it(tmp_path):
    folder = tmp_path / "mine" / "kernels"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent):
        (place / "__init__.py").touch()
    (folder / "fused.py").write_text(OWN)
    assert load(f"{folder / 'fused.py'}:bias_gelu").name == "mine.kernels.fused.bias_gelu"


# What cannot be meant.


def a_function(x, *, tile):
    return x


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"tile": 4}, r"the choices of tile are 4: write them as a tuple, as in \(64, 128\)"),
        ({"tile": ()}, "tile has no value to choose"),
        ({"tile": (1j,)}, "choices are int, bool, float, str, None, or tuples of these"),
        ({"configs": [{"tile": 4}]}, r"configs and choices \(tile\) exclude each other"),
        ({"tile_q": (1,)}, "tile_q is no parameter of one_more, which has x, tile, target"),
        ({"rules": {"fits": lambda x, tiles: True}}, "the rule 'fits' asks for 'tiles'; there are x, tile, target"),
        ({"rules": {"fits": True}}, "the rule 'fits' is True: write a function of x, tile, target"),
        ({"rules": [lambda x: True]}, "write a dict, the reason in words"),
        ({"rules": {"fits": lambda *xs: True}}, r"the rule 'fits' takes \*xs: it gets by name what it names"),
        ({"footprint": lambda y: None}, "the footprint of one_more asks for 'y'"),
        (
            {"tolerance": "1e-3"},
            "tolerance='1e-3': write a number, 0 or more, a Tolerance, or one of these for each result",
        ),
        ({"tolerance": float("nan")}, "tolerance=nan: write a number, 0 or more"),
        ({"tolerance": -1}, "tolerance=-1: write a number, 0 or more"),
        ({"tile": (2**70, 1)}, "does not fit into 64 bits"),
        ({"tile": (True, 1)}, "tile has True and 1 to choose: give values of one type"),
        ({"reference": None}, "the reference of one_more is None: write a function of its arrays"),
        ({"function": 3}, "autotune decorates a function, not 3"),
        ({"function": lambda *xs, tile: xs}, r"<lambda> takes \*xs: give each array a parameter of its own"),
        ({"function": lambda *, tile: tile}, "<lambda> has no array that every call gives"),
        (
            {"function": lambda x, y=1, *, tile: x},
            "y=1 is among the arrays of <lambda>: what is no array is keyword-only",
        ),
        ({"function": lambda inputs, *, tile: inputs}, "a parameter inputs, which is what every problem has"),
        ({"function": lambda x, *, backends, tile: x}, "a parameter backends, which says how a call is answered"),
        ({"function": lambda x, target, *, tile: x}, "target is among the arrays of <lambda>"),
        ({"function": lambda x, tile, /: x}, "takes the choice tile by place alone"),
    ],
)
def test_what_cannot_be_meant_is_said_where_it_is_declared(told, sentence):
    with pytest.raises(DeclarationError, match=sentence):
        added(**told)


def test_a_decorator_without_choices_says_how_it_is_written():
    with pytest.raises(DeclarationError, match=r"write @scheduler.autotune\(tile_m=\(64, 128\), reference=...\)"):
        scheduler.autotune(a_function, reference=a_function)


def test_what_is_said_of_a_problem_is_checked_when_it_is_asked():
    function = added(rules={"long": lambda tile: None}, name="silent_rule")
    with pytest.raises(DeclarationError, match="the rule 'long' returns None: it says whether it holds"):
        function(jnp.zeros(8), backends="pallas")
    for what in ("flops", "bytes_moved"):
        function = added(**{what: lambda x: float("nan")}, name=f"no_{what}")
        with pytest.raises(DeclarationError, match=f"the {what} of one_more are nan: a finite number"):
            scheduler.tune(function, function.problem(jnp.zeros(8)), budget=1)


def test_too_many_choices_are_refused_and_not_searched_for_hours():
    function = added(tile=range(1, 200_000), name="many")
    with pytest.raises(DeclarationError, match="199,999 legal schedules and no footprint to rank them by"):
        scheduler.tune(function, function.problem(jnp.zeros(8)), budget=1)
    function = added(tile=range(1, 30_000_000), name="countless")
    with pytest.raises(DeclarationError, match="29,999,999 combinations of choices up to tile are more than"):
        scheduler.tune(function, function.problem(jnp.zeros(8)), budget=1)


def test_a_function_takes_arrays_and_no_lists_and_is_decorated_once():
    function = added(name="of_arrays")
    with pytest.raises(TypeError, match=r"x must be an array, not list: give it as jnp.asarray\(x\)"):
        function([1.0, 2.0])
    with pytest.raises(DeclarationError, match="is decorated already: give all of its choices to one autotune"):
        scheduler.autotune(tile=(1, 2), reference=lambda x: x)(function)


def test_a_rule_and_a_footprint_that_want_one_truth_value_are_named():
    function = added(rules={"short": lambda x, tile: tile > 1 and tile < x.size}, name="short_rule")
    with pytest.raises(DeclarationError, match="the rule 'short' wants one truth value and gets those of many"):
        function(jnp.zeros(8), backends="pallas")
    function = added(footprint=lambda tile: 1 if tile > 4 else 2, name="short_footprint")
    with pytest.raises(DeclarationError, match="the footprint of one_more wants one truth value"):
        function(jnp.zeros(8), backends="pallas")
    function = added(footprint=lambda tile: tile, name="no_footprint")
    with pytest.raises(DeclarationError, match="the footprint of one_more is a ndarray: return a Footprint"):
        function(jnp.zeros(8), backends="pallas")


def test_where_there_is_no_kernel_is_said_by_supports():
    function = added(supports=lambda target: f"needs a GPU, not {target.kind}", name="elsewhere")
    with pytest.raises(scheduler.NoCandidate, match="pallas: needs a GPU, not cpu"):
        function(jnp.zeros(8), backends="pallas")
    assert function(jnp.zeros(8)).tolist() == [1] * 8


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("200,256", r"x=200,256 is no type of an array: write it as float32\[200,256\]"),
        ("float3[8]", "there is no dtype 'float3'"),
        ("None", "x is left out, and has no default"),
        ("float32[9223372036854775807,9]", "which no memory holds"),
    ],
)
def test_the_type_of_an_array_that_cannot_be_read_is_named(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        linear.operation.problem.parse({"x": text, "w": "float32[8,8]"})


def test_a_choice_that_changes_no_program_is_one_candidate_and_a_warning():
    @scheduler.autotune(tile=(8, 16), scale=(2, 3), reference=lambda x: x * 2)
    def kernel(x, *, tile, scale, target):
        return x * scale

    with pytest.warns(
        RuntimeWarning, match=r"same program for all values of tile \(16, 8\): use tile in the kernel"
    ) as told:
        record = scheduler.tune(kernel, kernel.problem(jnp.ones((16, 32))), budget=8)
    assert len([one for one in told if "same program" in str(one.message)]) == 1  # scale is used
    assert [dict(entry.schedule)["scale"] for entry in record.entries if entry.backend == "pallas"] == [2]
