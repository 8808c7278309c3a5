"""`scheduler.problems`: the tuned problems of a function, how often it poses them, and the job that they become."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from operations import DOUBLE

import scheduler
from scheduler import tuned_flash_attention, tuned_matmul, tuned_ragged_dot, tuned_rms_norm, tuned_softmax
from scheduler.cli.app import main
from scheduler.rewriting import named
from scheduler.search import jobs

SQUARE = jax.ShapeDtypeStruct((32, 32), jnp.float32)


def counts(fn, *args, **kwargs):
    """``{"matmul m=32 ...": count}``"""
    return {f"{row.operation.name} {row.problem}": row.count for row in scheduler.problems(fn, *args, **kwargs)}


def square(**told):
    fields = {"m": 32, "n": 32, "k": 32, "dtype": "float32"} | told
    return "matmul " + " ".join(f"{name}={value}" for name, value in fields.items())


def step(x, w):
    return jnp.tanh(tuned_matmul(x, w))


def test_the_lengths_of_nested_scans_multiply():
    def inner(x, w):
        return lax.scan(lambda x, _: (step(x, w), None), x, length=5)[0]

    def outer(x, w):
        return lax.scan(lambda x, _: (inner(x, w), None), x, length=3)[0]

    assert counts(outer, SQUARE, SQUARE) == {square(): 15}


def test_a_scan_of_no_turns_poses_nothing():
    assert counts(lambda x, w: lax.scan(lambda x, _: (step(x, w), None), x, length=0)[0], SQUARE, SQUARE) == {}


def test_the_turns_of_a_while_count_as_one_and_that_is_said():
    def turns(x, w):
        return lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: step(x, w), x)

    def fn(x, w):
        return lax.scan(lambda x, _: (turns(x, w), None), x, length=4)[0]

    found = scheduler.problems(fn, SQUARE, SQUARE)
    assert [row.count for row in found] == [4]
    assert "test_extract.py:" in repr(found)
    assert "all iterations of a while loop count as one." in repr(found)


def test_all_branches_of_a_cond_count_and_that_is_said():
    def either(x, w):
        return lax.cond(jnp.sum(x) > 0, lambda x: tuned_matmul(x, w), lambda x: tuned_softmax(x), x)

    def fn(x, w):
        return lax.scan(lambda x, _: (either(x, w), None), x, length=7)[0]

    assert counts(fn, SQUARE, SQUARE) == {square(): 7, "softmax rows=32 columns=32 dtype=float32": 7}
    assert "all branches of a cond count." in repr(scheduler.problems(fn, SQUARE, SQUARE))


@pytest.mark.parametrize(("policy", "forward"), [("dots_saveable", 1), ("nothing_saveable", 2)])
def test_what_jax_checkpoint_computes_again_counts_again(policy, forward):
    def loss(x, w):
        saved = jax.checkpoint(step, policy=getattr(jax.checkpoint_policies, policy))
        return jnp.sum(jnp.sin(saved(jnp.sin(x), w)))

    assert counts(jax.grad(loss, (0, 1)), SQUARE, SQUARE) == {
        square(): forward,
        square(transpose_a=True): 1,
        square(transpose_b=True): 1,
    }


def test_a_custom_derivative_is_what_the_function_runs():
    @jax.custom_vjp
    def product(x, w):
        return tuned_matmul(x, w)

    product.defvjp(lambda x, w: (product(x, w), w), lambda w, ct: (tuned_softmax(ct), jnp.zeros_like(w)))
    softmax = "softmax rows=32 columns=32 dtype=float32"
    assert counts(product, SQUARE, SQUARE) == {square(): 1}
    assert counts(jax.value_and_grad(lambda x, w: jnp.sum(product(x, w))), SQUARE, SQUARE) == {square(): 1, softmax: 1}


def test_a_vmapped_call_is_the_larger_product_that_it_becomes():
    batch = jax.ShapeDtypeStruct((6, 32, 32), jnp.float32)
    assert counts(jax.vmap(tuned_matmul, (0, None)), batch, SQUARE) == {square(m=192): 1}


def test_a_grouped_product_and_its_gradients_are_listed_whether_they_are_tuned_calls_or_not():
    x, w, sizes = jnp.ones((8, 4)), jnp.ones((3, 4, 5)), jnp.array([2, 0, 5], jnp.int32)

    def loss(product):
        return jax.grad(lambda x, w: (product(x, w, sizes) ** 2).sum(), (0, 1))

    expected = {
        "ragged_dot rows=8 groups=3 k=4 n=5 dtype=float32": 1,
        "ragged_dot rows=8 groups=3 k=5 n=4 dtype=float32 transpose_rhs=True": 1,
        "ragged_dot_weights rows=8 groups=3 k=4 n=5 dtype=float32": 1,
    }
    assert counts(loss(tuned_ragged_dot), x, w) == expected
    untuned = scheduler.problems(loss(lax.ragged_dot), x, w).untuned
    assert {f"{row.operation.name} {row.problem}": row.count for row in untuned} == expected


def test_second_derivatives_pose_problems_of_their_own():
    def loss(x):
        return jnp.sum(jnp.sin(tuned_matmul(x, x)))

    first = sum(counts(jax.grad(loss), SQUARE).values())
    second = sum(counts(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x))), SQUARE).values())
    assert (first, second > first) == (3, True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=True)  # and so without a hash, as modules of Equinox that hold arrays
class Model:
    weight: jax.Array
    activation: Callable
    layers: int

    def __call__(self, x):
        for _ in range(self.layers):
            x = self.activation(tuned_matmul(x, self.weight))
        return x


def test_what_is_no_array_is_constant_in_a_model_that_is_called_and_in_one_that_is_an_argument():
    model = Model(jnp.ones((32, 32)), jnp.tanh, 3)
    assert counts(model, SQUARE) == counts(lambda model, x: model(x), model, SQUARE) == {square(): 3}


def test_what_no_result_needs_is_not_counted():
    """As the value of a function whose gradient alone is asked for."""
    assert counts(jax.grad(lambda x, w: jnp.sum(tuned_matmul(x, w))), SQUARE, SQUARE) == {square(transpose_b=True): 1}


def test_a_function_that_returns_nothing_is_counted_whole():
    def fn(x, w):
        tuned_matmul(x, w)

    assert counts(fn, SQUARE, SQUARE) == {square(): 1}


def test_within_a_shard_map_shapes_are_those_of_one_device():
    rows = PartitionSpec("devices")
    mesh = AbstractMesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    fn = jax.shard_map(tuned_matmul, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows)
    assert counts(fn, SQUARE, SQUARE) == {square(m=8): 1}


def test_two_functions_that_share_a_problem_are_one_row_with_two_lines():
    def one(x, w):
        return tuned_matmul(x, w)

    def other(x, w):
        return tuned_matmul(w, x)

    (row,) = scheduler.problems(lambda x, w: one(x, w) + other(x, w), SQUARE, SQUARE)
    assert row.count == 2
    assert [line.function.rpartition(".")[2] for line in row.lines] == ["one", "other"]
    assert {line.file for line in row.lines} == {__file__}


def test_a_function_that_calls_nothing_tuned_says_so():
    found = scheduler.problems(lambda x: jnp.sin(x), SQUARE)
    assert (len(found), repr(found)) == (0, "The function makes no tuned call.")


def test_a_jitted_function_counts_each_time_that_it_is_called():
    inner = jax.jit(step)
    assert counts(lambda x, w: inner(inner(inner(x, w), w), w), SQUARE, SQUARE) == {square(): 3}


def test_donated_arguments_and_arrays_of_a_closure_stay_what_they_are():
    w, x = jnp.ones((32, 32)), jnp.ones((32, 32))
    assert counts(jax.jit(lambda x: step(x, w), donate_argnums=0), x) == {square(): 1}
    assert not x.is_deleted()


def test_static_arguments_keywords_and_trees_are_those_of_the_function():
    @functools.partial(jax.jit, static_argnames="depth")
    def fn(params, x, depth):
        for _ in range(depth):
            x = step(x, params["w"])
        return x

    assert counts(fn, {"w": SQUARE}, x=SQUARE, depth=3) == {square(): 3}


def test_a_call_with_a_schedule_of_its_own_asks_no_store():
    assert counts(lambda x: tuned_softmax(x, schedule={"program": "float32"}), SQUARE) == {}


def model(x, weight):
    q = jnp.reshape(x, (2, 16, 2, 64))
    return tuned_rms_norm(tuned_flash_attention(q, q, q, causal=True), weight)


MODEL = (
    jax.ShapeDtypeStruct((32, 128), jnp.bfloat16),
    jax.ShapeDtypeStruct((64,), jnp.float32),
)


def test_the_most_expensive_comes_first_on_the_chip_that_is_meant():
    with scheduler.target("NVIDIA H200"):
        found = scheduler.problems(model, *MODEL)
    assert found.hardware.kind == "NVIDIA H200"
    least = [row.least_s for row in found]
    assert least == sorted(least, reverse=True)
    assert [row.operation.name for row in found] == ["flash_attention", "rms_norm"]


def test_a_saved_job_is_read_as_the_same_problems_in_the_same_order(tmp_path):
    found = scheduler.problems(jax.grad(lambda x, w: jnp.sum(step(x, w) ** 2), (0, 1)), SQUARE, SQUARE)
    found.save(tmp_path / "job.toml")
    tasks = jobs.parse((tmp_path / "job.toml").read_text())
    assert [(task.operation, task.problem, task.count) for task in tasks] == [
        (row.operation, row.problem, row.count) for row in found
    ]
    assert len(tasks) == 3


def test_every_field_that_is_not_at_its_default_is_in_the_job():
    found = scheduler.problems(model, *MODEL)
    assert [task.problem for task in jobs.parse(found.job())] == [row.problem for row in found]


def test_an_operation_of_ones_own_is_named_for_the_command_to_allow():
    x = jax.ShapeDtypeStruct((64,), jnp.float32)
    found = scheduler.problems(lambda x: scheduler.tuned(DOUBLE)(x), x)
    text = found.job()
    allowed = text.partition("--own ")[2].partition("\n")[0]
    assert allowed.endswith("operations.py:DOUBLE")
    (task,) = jobs.parse(text, own=[allowed])
    assert str(task) == f"double {found.tuned[0].problem}"
    (refused,) = jobs.parse(text)
    assert "--own" in refused.reason


def test_a_count_is_positive_and_may_be_left_out():
    text = 'operation = "matmul"\n[[problem]]\nm = 8\nn = 8\nk = 8\n'
    assert jobs.parse(text)[0].count == 1
    assert jobs.parse(text + "count = 3\n")[0].count == 3
    assert "count=0 is out of range; give an integer from 1 to" in jobs.parse(text + "count = 0\n")[0].reason


def test_the_table_fits_a_hundred_columns():
    assert max(map(len, repr(scheduler.problems(model, *MODEL)).splitlines())) <= 100


STEP = """
import jax, jax.numpy as jnp
from scheduler import tuned_matmul

def loss(w, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (tuned_matmul(x, w), None), x, w)[0] ** 2)

def STEP():
    return jax.grad(loss)(jnp.zeros((6, 32, 32)), jnp.zeros((8, 32)))

def breaks():
    return jnp.zeros(3) + jnp.zeros(4)

NO_SIGNATURE = max
NUMBER = 3
"""


@pytest.fixture
def step_file(tmp_path):
    path = tmp_path / "step.py"
    path.write_text(STEP)
    return path


def extract(capfd, *words, status=0):
    with pytest.raises(SystemExit) as end:
        main(["extract", *map(str, words)])
    out, err = capfd.readouterr()
    assert end.value.code == status, err
    return out, err


def test_the_command_writes_the_job_and_tells_a_person_beside_it(step_file, capfd):
    out, err = extract(capfd, f"{step_file}:STEP", "--hardware", "h200")
    tasks = jobs.parse(out)
    assert {str(task.problem): task.count for task in tasks} == {
        "m=8 n=32 k=32 dtype=float32": 6,
        "m=8 n=32 k=32 dtype=float32 transpose_b=True": 6,
        "m=32 n=32 k=8 dtype=float32 transpose_a=True": 6,
    }
    assert "step.py:6" in err
    assert "NVIDIA H200" in err


def test_the_command_takes_the_shapes_of_a_function_with_arguments(step_file, capfd):
    out, _ = extract(capfd, f"{step_file}:loss", "bf16[2,64,64]", "bfloat16[16, 64]", "--json")
    found = json.loads(out)
    assert [(row["problem"]["m"], row["count"]) for row in found["tuned"]] == [(16, 2)]
    assert found["tuned"][0]["lines"][0]["line"] == 6


@pytest.mark.parametrize(
    ("name", "arrays", "status", "said"),
    [
        ("loss", [], 2, "missing a required argument: 'w'; give the shapes of its arrays"),
        ("loss", ["f32[2,8,8]"], 2, "missing a required argument: 'x'"),
        ("STEP", ["f32[8]"], 2, "too many positional arguments"),
        ("loss", ["8x8", "f32[8]"], 2, "expected an array such as bfloat16[4096,512], found '8x8'"),
        ("loss", ["f33[8,8]", "f32[8]"], 2, "'f33[8,8]' is not a valid array"),
        ("loss", ["f32[8@x,8@x]", "f32[8]"], 2, "'f32[8@x,8@x]' uses an axis of the mesh twice"),
        ("absent", [], 2, "has no attribute 'absent'"),
        ("NUMBER", [], 2, "must be a function, found int"),
        ("breaks", [], 1, "step.py:12, in breaks: TypeError: add got incompatible shapes"),
        ("loss", ["f32[2,9,9]", "f32[8,8]"], 1, "step.py:6, in <lambda>: TypeError: dot_general requires contracting"),
        ("NO_SIGNATURE", [], 1, "cannot be traced: max expected at least 1 argument"),
    ],
)
def test_what_cannot_be_extracted_is_said_in_a_sentence(name, arrays, status, said, step_file, capfd):
    out, err = extract(capfd, f"{step_file}:{name}", *arrays, status=status)
    assert out == ""
    assert said in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_an_optimized_function_poses_the_problems_that_it_replaces():
    def product(x, w):
        return x @ w

    x, fast = jnp.ones((8, 16)), scheduler.optimize(product)
    (row,) = scheduler.problems(fast, x, x.T)
    assert str(row.problem) == "m=8 n=8 k=16 dtype=float32"

    class Model:
        product = scheduler.optimize(lambda self, x, *, w: x @ w)

    for given in (functools.partial(fast, w=x.T), functools.partial(Model().product, w=x.T)):
        assert [each.problem for each in scheduler.problems(given, x)] == [row.problem]
    with pytest.raises(TypeError, match="expected a function, found None"):
        scheduler.problems(None, x)


def test_a_name_without_a_module_is_refused():
    with pytest.raises(ValueError, match=r"expected package\.module:STEP or file\.py:STEP"):
        named.function("STEP")


def test_scalars_and_short_dtypes_are_arrays_too():
    assert named.array("i32[]") == jax.ShapeDtypeStruct((), jnp.int32)
    assert named.array("u8[3]") == jax.ShapeDtypeStruct((3,), jnp.uint8)
