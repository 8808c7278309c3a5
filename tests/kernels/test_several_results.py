"""Operations with several results: a softmax that also returns its log-sum-exp, and invented ones that go wrong."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import Offloadable
from operations import DOUBLE, DoubleProblem

import scheduler
from scheduler import tuned, tuned_softmax
from scheduler.core.hardware import CPU
from scheduler.measure import buffers, verification
from scheduler.measure.bench import Bench
from scheduler.store.store import Store, default_url
from search_spaces import (
    Columns,
    Footprint,
    Kernel,
    LibraryKernel,
    Operand,
    Operation,
    Phase,
    Space,
    Tolerance,
    jax_compat,
    load,
)
from search_spaces.kernel import Library
from search_spaces.problem import nbytes
from search_spaces.rows.formulas import SOFTMAX_WITH_LSE, SoftmaxWithLseProblem

pytestmark = pytest.mark.slow

X = jax.random.normal(jax.random.key(0), (3, 6, 40), jnp.float32)
ours = functools.partial(tuned_softmax, return_lse=True)
pallas = functools.partial(ours, backends="pallas")


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


def plain(x, axis=-1):
    return jax.nn.softmax(x, axis), jax.nn.logsumexp(x, axis)


def close(actual, expected, rtol=2e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6), actual, expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)


def loss(call):
    """Depends on both results."""

    def of(x):
        p, lse = call(x)
        return jnp.sum(jnp.sin(p)) + jnp.sum(jnp.cos(lse))

    return of


@pytest.mark.parametrize("call", [ours, pallas, tuned("softmax_with_lse"), functools.partial(ours, backends="xla")])
def test_both_results_come_back_with_their_leading_axes(call):
    close(call(X), plain(X))
    close(jax.jit(call)(X[0]), plain(X[0]))
    close(call(X[0, 0]), plain(X[0, 0]))


def test_the_interpreted_kernel_is_in_the_program_where_it_is_asked_for():
    assert "while" in jax.jit(pallas).lower(X).as_text()
    assert "while" not in jax.jit(ours).lower(X).as_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_log_sum_exp_of_narrow_rows_is_in_float32(dtype):
    x = X.astype(dtype)
    p, lse = pallas(x)
    assert (p.dtype, lse.dtype) == (x.dtype, jnp.float32)
    exact = plain(x.astype(jnp.float32))
    np.testing.assert_allclose(p.astype(jnp.float32), exact[0], rtol=0.51 * float(jnp.finfo(dtype).eps), atol=1e-7)
    np.testing.assert_allclose(lse, exact[1], rtol=1e-6)


@pytest.mark.parametrize("call", [pallas, functools.partial(ours, backends="xla")])
def test_rows_of_infinities_are_what_jax_makes_of_them(call):
    rows = jnp.array([[-jnp.inf] * 8, [0.0] * 7 + [-jnp.inf], [0.0] * 7 + [jnp.inf], [1e30] * 8])
    (p, lse), (right, right_lse) = call(rows), plain(rows)
    close(lse, right_lse)
    close(p, right)


@pytest.mark.parametrize("axis", [0, -2, (0, 2)])
def test_along_other_axes_it_is_jaxs(axis):
    close(ours(X, axis), plain(X, axis))
    p, lse = ours(X.astype(jnp.bfloat16), axis)
    assert (p.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    close(ours(np.arange(6).reshape(2, 3), 0), plain(jnp.arange(6.0).reshape(2, 3), 0))
    with pytest.raises(scheduler.NoCandidate, match=r"axis=.* is not the last one of x|no kernel of rows_along"):
        pallas(X, axis)


def test_empty_arrays_and_integers_are_answered_by_the_formula():
    p, lse = ours(jnp.zeros((0, 4)))
    assert (p.shape, lse.shape) == ((0, 4), (0,))
    close(ours(np.arange(6).reshape(2, 3)), plain(jnp.arange(6.0).reshape(2, 3)))


def test_vmap_makes_more_rows_of_one_call():
    mapped = jax.vmap(pallas, in_axes=1)
    close(mapped(X), plain(jnp.moveaxis(X, 1, 0)))
    close(jax.jit(mapped)(X), plain(jnp.moveaxis(X, 1, 0)))
    assert str(jax.make_jaxpr(mapped)(X)).count("tuned_call") == 1
    p, lse = jax.vmap(pallas)(X[:0])
    assert (p.shape, lse.shape) == ((0, 6, 40), (0, 6))


def test_forward_and_reverse_mode_agree_with_the_plain_formula():
    def every(call):
        return {
            "jvp": jax.jvp(call, (X,), (jnp.cos(X),)),
            "grad": jax.grad(loss(call))(X),
            "one": jax.grad(lambda x: jnp.sum(jnp.cos(call(x)[1])))(X),
            "vmap": jax.vmap(jax.grad(loss(call)))(X),
            "scan": jax.grad(lambda x: loss(call)(jax.lax.scan(lambda y, _: (call(y)[0], None), x, None, 2)[0]))(X),
        }

    close(jax.jit(every, static_argnums=0)(pallas), jax.jit(every, static_argnums=0)(plain), 2e-4)
    close(jax.grad(loss(pallas))(X), jax.grad(loss(plain))(X), 2e-4)


def test_a_hessian_agrees_with_the_plain_formula():
    x = X[0, :2, :5]
    for outer, inner in ((jax.jacfwd, jax.jacrev), (jax.jacrev, jax.jacfwd)):
        close(outer(inner(loss(pallas)))(x), outer(inner(loss(plain)))(x), 2e-4)


@pytest.mark.parametrize("policy", ["everything_saveable", "nothing_saveable", "dots_saveable"])
def test_under_checkpoint_gradients_are_the_same(policy):
    kept = jax.checkpoint(loss(pallas), policy=getattr(jax.checkpoint_policies, policy))
    close(jax.jit(jax.grad(kept))(X), jax.grad(loss(plain))(X), 2e-4)


def test_both_results_are_offloaded_where_a_policy_says_so():
    def offload(primitive, *_, **params):
        return Offloadable(src="device", dst="pinned_host") if primitive.name == "tuned_call" else False

    def twice(x):
        p, lse = pallas(x)
        return jnp.sum(jnp.sin(p) * jnp.cos(lse)[..., None])

    def theirs(x):
        p, lse = plain(x)
        return jnp.sum(jnp.sin(p) * jnp.cos(lse)[..., None])

    gradient = jax.jit(jax.grad(jax.checkpoint(twice, policy=offload)))
    close(gradient(X), jax.grad(theirs)(X), 2e-4)
    moved = re.findall(r"devices=\((.*?)\)", str(jax.make_jaxpr(gradient)(X)))
    assert set(moved) == {"MemorySpace.Host, MemorySpace.Host", "MemorySpace.Device, MemorySpace.Device"}


def test_inside_shard_map_and_in_an_export():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("rows")
    close(jax.shard_map(pallas, mesh=mesh, in_specs=spec, out_specs=spec)(X), plain(X))
    exported = jax.export.export(jax.jit(pallas))(X)
    assert "while" in exported.mlir_module()
    close(exported.call(X), plain(X))


def test_a_search_finds_and_a_call_serves_a_schedule_from_the_cache():
    operation = load("softmax_with_lse")
    assert operation is SOFTMAX_WITH_LSE
    problem = SoftmaxWithLseProblem(18, 40, "float32")
    with pytest.raises(scheduler.CacheMiss, match=r"tile-scheduler tune softmax_with_lse .*rows=18"):
        ours(X, on_miss="error")
    record = scheduler.tune(operation, problem, budget=3)
    assert not record.failed
    assert {entry.backend for entry in record.entries} == {"interpret", "xla"}
    (stored,) = Store(default_url()).records()
    assert (stored.key.operation, stored.key.problem) == ("softmax_with_lse", problem.canonical())
    scheduler.reload()
    close(ours(X, on_miss="error"), plain(X))
    close(pallas(X, on_miss="error"), plain(X))
    close(jax.jit(jax.vmap(jax.grad(loss(pallas))))(X), jax.vmap(jax.grad(loss(plain)))(X), 2e-4)


# What a bench looks at is every result


@dataclasses.dataclass(frozen=True)
class PairProblem(DoubleProblem):
    """``(2 x, [sum(x), max(x)])``: a long result and a short one of another dtype."""

    def result(self):
        return jax.ShapeDtypeStruct((self.n,), jnp.dtype("float32")), jax.ShapeDtypeStruct((2,), jnp.dtype("bfloat16"))

    def reference(self, *args):
        (x,) = args
        return 2 * x, jnp.stack([x.sum(), x.max()])

    def tolerance(self):
        return Tolerance(1e-6, 1e-6), Tolerance(0.1, 0.02)


@dataclasses.dataclass(frozen=True)
class PairSchedule:
    behave: str


BEHAVIOURS = {
    "right": lambda p, x: tuple(r.astype(s.dtype) for r, s in zip(p.reference(x), p.results(), strict=True)),
    "loose": lambda p, x: (2 * x, jnp.stack([x.sum() + 0.05, x.max()]).astype("bfloat16")),
    "second wrong": lambda p, x: (2 * x, jnp.stack([x.sum(), x.max() + 1]).astype("bfloat16")),
    "first wrong": lambda p, x: (2 * x + 0.05, jnp.stack([x.sum(), x.max()]).astype("bfloat16")),
    "one": lambda p, x: 2 * x,
    "another dtype": lambda p, x: p.reference(x),
    "swapped": lambda p, x: BEHAVIOURS["right"](p, x)[::-1],
}


class Pair(Kernel):
    backend = "scripted"

    def space(self, problem, target):
        return Space(PairSchedule, {"behave": tuple(BEHAVIOURS)})

    def footprint(self, problem, schedules: Columns, target):
        one = np.ones(len(schedules))
        loads = (Operand(bytes=4.0 * problem.n * one, axes=(0,)),)
        written = 1.0 * sum(map(nbytes, problem.results()))
        return Footprint("float32", (one,), Phase(loads, one), 8 * one, Phase(bytes_written=written))

    def run(self, problem, schedule, target, /, *args, **params):
        return BEHAVIOURS[schedule.behave](problem, *args)


class PairLibrary(LibraryKernel):
    def run(self, problem, schedule, target, /, *args, **params):
        return BEHAVIOURS["right"](problem, *args)


PAIR = Operation("pair", PairProblem, (Pair(), PairLibrary()))


@pytest.mark.parametrize(
    ("behave", "said"),
    [
        ("first wrong", "of result 0, 64 of 64 elements are off"),
        ("second wrong", r"of result 1, 1 of 2 elements are off; the worst, at \(1,\)"),
        ("one", r"the result is float32\[64\] instead of float32\[64\] and bfloat16\[2\]"),
        ("another dtype", r"the result is float32\[64\] and float32\[2\] instead of"),
        ("swapped", r"the result is bfloat16\[2\] and float32\[64\] instead of"),
    ],
)
def test_a_candidate_with_one_wrong_result_fails_and_which_is_said(behave, said):
    failure = Bench(PAIR, PairProblem(64), CPU).measure("scripted", {"behave": behave}, 2)
    assert failure.stage == "verify"
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(failure.detail)


@pytest.mark.parametrize("behave", ["right", "loose"])
def test_each_result_has_its_own_tolerance(behave):
    measured = Bench(PAIR, PairProblem(64), CPU).measure("scripted", {"behave": behave}, 2)
    assert measured.median_s > 0


def test_buffers_for_all_results_are_poisoned_and_written_over():
    poison = buffers.poisoning(PairProblem(4))()
    assert [x.dtype for x in poison] == [jnp.float32, jnp.bfloat16]
    assert all(bool(jnp.isnan(x).all()) for x in poison)
    unwritten = jax_compat.writing_over(lambda x: (x + 1, x + 2))
    x = jnp.ones(4)
    lowered = unwritten.lower((x, x), x)
    assert lowered.as_text().count("tf.aliasing_output") == 2
    problem, (long, _) = PairProblem(4), BEHAVIOURS["right"](PairProblem(4), x)
    said = verification.mismatches(problem, (long, poison[1]), problem.reference(x), problem.tolerance())
    assert said.startswith("of result 1, 2 of 2 elements are off")
    assert "as where nothing was written" in said


def test_memory_and_traffic_count_every_result():
    pair, single = PairProblem(2**20), DoubleProblem(2**20)
    assert pair.bytes_moved == single.bytes_moved + 2 * 2
    assert buffers.least_buffer_bytes(pair) == buffers.least_buffer_bytes(single) + 2 * 2
    assert buffers.needed_buffer_bytes(pair, CPU) > buffers.needed_buffer_bytes(single, CPU)
    library = PAIR.library.footprint(pair, Columns.of([Library()]), CPU.target)
    assert float(library.tile.bytes_written[0]) == 4 * 2**20 + 4
    with pytest.raises(ValueError, match="which no memory holds"):
        SoftmaxWithLseProblem(2**62, 1, "bfloat16")


def test_large_results_are_compared_in_the_same_rows(monkeypatch):
    monkeypatch.setattr(verification, "MOST_COMPARED", 500)
    problem = SoftmaxWithLseProblem(64, 40, "float32")
    rows = verification.compared_rows(problem)
    assert 2 <= len(rows) < 64
    assert verification.compared_elements(problem) == len(rows) * 41
    (x,) = problem.inputs(0)
    below, take = problem.at_rows(rows)
    expected = below.reference(*take((x,)))
    p, lse = plain(x)
    judge = functools.partial(verification.mismatches, problem, rows=rows, tolerance=problem.tolerance())
    assert judge(actual=(p, lse), expected=expected) is None
    row = int(rows[1])
    assert f"of result 1, 1 of {len(rows)} elements are off; the worst, at ({row},)" in judge(
        actual=(p, lse.at[row].add(1)), expected=expected
    )
    other = next(row for row in range(64) if row not in rows)
    assert "of result 1, 1 of 64 rows hold elements that are NaN" in judge(
        actual=(p, lse.at[other].set(jnp.nan)), expected=expected
    )
    record = Bench(SOFTMAX_WITH_LSE, problem, CPU).measure("interpret", {"rows": 16}, 2)
    assert record.median_s > 0


def test_an_operation_of_ones_own_returns_a_tuple_and_has_every_transformation():
    call, right = tuned(PAIR), lambda x: BEHAVIOURS["right"](PairProblem(8), x)
    x = jnp.arange(8.0)
    close(call(x), right(x))
    close(jax.vmap(call)(jnp.stack([x, -x])), jax.vmap(right)(jnp.stack([x, -x])))
    close(jax.jvp(call, (x,), (x,)), jax.jvp(right, (x,), (x,)))
    close(jax.grad(lambda x: call(x)[1].astype("float32").sum())(x), jnp.ones(8).at[-1].set(2.0))
    assert isinstance(tuned(DOUBLE)(x), jax.Array), "one result is an array and no tuple"


def test_rules_get_and_give_a_tuple_for_each_of_the_results():
    def jvp(call, problem, primals, tangents):
        doubled, short = call(problem, *primals)
        return (doubled, short), (2 * tangents[0], None)

    def transpose(call, problem, cotangents, args):
        raise AssertionError("not asked where the tangent is not the operation itself")

    def batch(call, problem, args, dims):
        ((x,), (dim,)) = args, dims
        results = [call(problem, jnp.take(x, i, axis=dim)) for i in range(x.shape[dim])]
        return tuple(jnp.stack(each, axis=1) for each in zip(*results, strict=True)), (1, 1)

    own = tuned(dataclasses.replace(PAIR, jvp=jvp, transpose=transpose, batch=batch))
    x = jnp.arange(8.0)
    (doubled, short), (tangent, none) = jax.jvp(own, (x,), (x,))
    close((doubled, tangent), (2 * x, 2 * x))
    assert short.dtype == none.dtype == jnp.bfloat16
    assert not none.any()
    close(jax.grad(lambda x: own(x)[0].sum())(x), jnp.full(8, 2.0))
    stacked = jnp.stack([x, x + 1, x + 2])
    close(jax.vmap(own)(stacked), jax.vmap(lambda x: BEHAVIOURS["right"](PairProblem(8), x))(stacked))
