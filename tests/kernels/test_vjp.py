"""An operation with a backward pass of its own, which calls another operation that is tuned and cached as such."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from operations import DoubleProblem

import scheduler
from scheduler import tuned
from scheduler.core.arguments import backends_of_another
from scheduler.dispatch import dispatch
from scheduler.store.store import Store, default_url
from search_spaces import Footprint, Kernel, LibraryKernel, Operand, Operation, Phase, Space
from search_spaces.matmul import MATMUL

N = 12
X = jax.random.normal(jax.random.key(0), (N,), jnp.float32)
Y = jax.random.normal(jax.random.key(1), (N,), jnp.float32)


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


@dataclasses.dataclass(frozen=True)
class Tile:
    tile: int


class Blocked(Kernel):
    """A formula of whole arrays, some elements a block, in Pallas's interpreter."""

    backend = "blocked"

    def supports(self, problem, target):
        return None if target.platform == "cpu" else "runs in the interpreter"

    def space(self, problem, target):
        return Space(Tile, {"tile": (4, 6, 8, 12)}, {"tile divides n": lambda s: problem.n % s.tile == 0})

    def footprint(self, problem, schedules, target):
        tile, count = schedules.tile, len(problem.operands())
        return Footprint(
            arithmetic="float32",
            grid=(problem.n / tile,),
            step=Phase(loads=(Operand(bytes=4.0 * count * tile, axes=(0,)),), flops=1.0 * tile),
            tile=Phase(bytes_written=4.0 * tile * len(problem.results())),
            onchip_bytes=4 * (count + 1) * tile,
        )

    def run(self, problem, schedule, target, /, *args, **params):
        def body(*refs):
            inputs, outs = refs[: len(args)], refs[len(args) :]
            for out, result in zip(outs, problem.every(*(ref[...] for ref in inputs)), strict=True):
                out[...] = result

        block = pl.BlockSpec((schedule.tile,), lambda i: (i,))
        return pl.pallas_call(
            body,
            grid=(problem.n // schedule.tile,),
            in_specs=[block] * len(args),
            out_specs=problem.pack([block] * len(problem.results())),
            out_shape=problem.result(),
            interpret=True,
        )(*args)


class Plain(LibraryKernel):
    def run(self, problem, schedule, target, /, *args, **params):
        return problem.reference(*args)


class Elementwise(DoubleProblem):
    def reference(self, *args):
        return self.pack(self.every(*args))


@dataclasses.dataclass(frozen=True)
class TwistProblem(Elementwise):
    """``(x y, x sin(y))``."""

    def operands(self):
        return super().operands() * 2

    def result(self):
        return self.operands()

    @staticmethod
    def every(x, y):
        return x * y, x * jnp.sin(y)


@dataclasses.dataclass(frozen=True)
class TwistBackwardProblem(Elementwise):
    """``(dp y + dq sin(y), x (dp + dq cos(y)))`` of x, y, dp and dq."""

    def operands(self):
        return super().operands() * 4

    def result(self):
        return self.operands()[:2]

    @staticmethod
    def every(x, y, dp, dq):
        return dp * y + dq * jnp.sin(y), x * (dp + dq * jnp.cos(y))


TWIST_BACKWARD = Operation("twist_backward", TwistBackwardProblem, (Blocked(), Plain()))


def forward(call, problem, args):
    return call(problem, *args), args


def backward(call, problem, residuals, cotangents):
    given = [jnp.zeros(problem.n, "float32") if ct is None else ct for ct in cotangents]
    return call(TWIST_BACKWARD, TwistBackwardProblem(problem.n), *residuals, *given)


TWIST = Operation("twist", TwistProblem, (Blocked(), Plain()), vjp_fwd=forward, vjp_bwd=backward)
twist = functools.partial(tuned(TWIST), backends="pallas")


def plain(x, y):
    return TwistProblem.every(x, y)


def loss(call):
    def of(x, y):
        p, q = call(x, y)
        return jnp.sum(jnp.cos(p) + q * q)

    return of


def close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)


def asked():
    """The operations that answers were asked for, with the backends that gave them."""
    return {(key[0].name, found.kernel.backend) for key, found in dispatch._decisions.decisions.items()}


def test_gradients_come_from_the_other_operation_and_agree():
    gradient = jax.grad(loss(twist), argnums=(0, 1))
    right = jax.grad(loss(plain), argnums=(0, 1))(X, Y)
    close(gradient(X, Y), right)
    close(jax.jit(gradient)(X, Y), right)
    assert asked() == {("twist", "blocked"), ("twist_backward", "blocked")}


def test_gradients_under_vmap_scan_and_checkpoint_agree():
    xs, ys = jnp.stack([X, 2 * X]), jnp.stack([Y, -Y])

    def every(call):
        gradient = jax.grad(loss(call), argnums=(0, 1))

        def steps(x, y):
            return loss(call)(jax.lax.scan(lambda x, _: (call(x, y)[1], None), x, None, length=2)[0], y)

        return {
            "vmap of grad": jax.vmap(gradient)(xs, ys),
            "one of them": jax.vmap(gradient, (0, None))(xs, Y),
            "grad of vmap": jax.grad(lambda xs: jax.vmap(loss(call))(xs, ys).sum())(xs),
            "grad of scan": jax.grad(steps, argnums=(0, 1))(X, Y),
            "grad of checkpoint": jax.grad(jax.checkpoint(loss(call)), argnums=(0, 1))(X, Y),
            "jacobian": jax.jacrev(call)(X, Y),
        }

    run = jax.jit(every, static_argnums=0)
    close(run(twist), run(plain))
    assert ("twist_backward", "blocked") in asked()


def test_a_result_that_nobody_uses_has_none_for_a_cotangent():
    seen = []

    def spy(call, problem, residuals, cotangents):
        seen.append([ct is None for ct in cotangents])
        return backward(call, problem, residuals, cotangents)

    spied = tuned(dataclasses.replace(TWIST, vjp_bwd=spy))
    close(jax.grad(lambda x: spied(x, Y)[1].sum())(X), jnp.sin(Y))
    assert seen == [[True, False]]


def test_a_cotangent_of_none_is_a_zero():
    constant = dataclasses.replace(TWIST, vjp_bwd=lambda call, p, residuals, cts: (residuals[1] * cts[0], None))
    close(jax.grad(lambda x, y: tuned(constant)(x, y)[0].sum(), argnums=(0, 1))(X, Y), (Y, jnp.zeros(N)))


def test_forward_mode_raises_the_error_of_a_custom_vjp():
    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\) to a custom_vjp function"):
        jax.jvp(twist, (X, Y), (X, Y))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jit(jax.jacfwd(twist))(X, Y)


def test_second_derivatives_in_either_mode_agree():
    def second(call):
        gradient = jax.grad(loss(call))
        return {
            "forward over reverse": jax.jvp(lambda x: gradient(x, Y), (X,), (Y,)),
            "reverse over reverse": jax.grad(lambda x: jnp.sum(jnp.sin(gradient(x, Y))))(X),
        }

    close(second(twist), second(plain))


def test_a_search_for_a_gradient_stores_both_operations_under_their_names_and_serves_them():
    jax.jit(jax.grad(loss(functools.partial(twist, on_miss="tune"))))(X, Y)
    kept = {(record.key.operation, record.key.problem): record for record in Store(default_url()).records()}
    assert set(kept) == {("twist", '{"n":12}'), ("twist_backward", '{"n":12}')}
    for record in kept.values():
        assert not record.failed
        assert {entry.backend for entry in record.entries} == {"blocked", "xla"}
    scheduler.reload()
    close(jax.grad(loss(functools.partial(twist, on_miss="error")))(X, Y), jax.grad(loss(plain))(X, Y))
    decisions = dispatch._decisions.decisions.values()
    assert all(found.reason.startswith("measured") for found in decisions)


def test_a_miss_in_a_backward_pass_names_the_other_operation():
    scheduler.tune(TWIST, TwistProblem(N), budget=2)
    call = functools.partial(twist, on_miss="error")
    close(call(X, Y), plain(X, Y))
    with pytest.raises(scheduler.CacheMiss, match="no schedule for twist_backward n=12"):
        jax.grad(loss(call))(X, Y)


def test_a_schedule_is_meant_for_the_call_alone():
    close(jax.grad(loss(functools.partial(twist, schedule={"tile": 4})))(X, Y), jax.grad(loss(plain))(X, Y))
    schedules = {key[0].name: key[3].schedule for key in dispatch._decisions.decisions}
    assert schedules == {"twist": (("tile", 4),), "twist_backward": None}


@pytest.mark.parametrize(
    ("allowed", "others"),
    [
        (None, None),
        ({"blocked"}, {*MATMUL.backends} - {"xla"}),
        ({"xla"}, {"xla"}),
        ({"blocked", "xla"}, {*MATMUL.backends}),
    ],
)
def test_what_a_caller_allows_of_one_operation_is_allowed_of_the_ones_that_it_calls(allowed, others):
    frozen = lambda names: None if names is None else frozenset(names)  # noqa: E731
    assert backends_of_another(MATMUL, TWIST, frozen(allowed)) == frozen(others)
    assert backends_of_another(TWIST_BACKWARD, TWIST, frozen(allowed)) == frozen(allowed)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"vjp_fwd": forward}, "one of vjp_fwd and vjp_bwd, which belong together"),
        ({"vjp_bwd": backward}, "one of vjp_fwd and vjp_bwd, which belong together"),
        ({"vjp_fwd": forward, "vjp_bwd": backward, "jvp": forward}, "takes the place of jvp and transpose"),
    ],
)
def test_rules_that_exclude_each_other_are_refused(rules, said):
    with pytest.raises(ValueError, match=said):
        Operation("wrong", TwistProblem, (Plain(),), **rules)
