"""What a comparison of kernels with their equations allows."""

import jax
import jax.numpy as jnp
import pytest

from scheduler.rewriting.comparison import Comparison

WEIGHTS, KEYS = (64, 256), (256, 32)
PLACES = [jax.ShapeDtypeStruct(WEIGHTS, jnp.float32), jax.ShapeDtypeStruct(KEYS, jnp.bfloat16)]
RESULT = [jax.ShapeDtypeStruct((64, 32), jnp.float32)]


def product(weights, keys):
    return jnp.dot(weights, keys.astype(jnp.float32), precision="highest")


def plain(weights, keys):
    """As in the backward pass of attention: the weights of a row cancel, and all keys have a common part."""
    return [product(weights - weights.mean(1, keepdims=True), keys + 64)]


def rounded(weights, keys):
    own = (weights - weights.mean(1, keepdims=True)).astype(jnp.bfloat16)
    return [product(jax.lax.optimization_barrier(own).astype(jnp.float32), keys + 64)]


def test_a_kernel_may_round_the_operands_of_a_mixed_product_to_the_narrower_dtype():
    def disagreement(tuned, coarse):
        return Comparison(plain, plain, tuned, PLACES, RESULT, 2.0**-10, coarse=coarse).disagreement()

    assert "in the mean square" in disagreement(rounded, None)
    assert disagreement(rounded, rounded) is None
    assert disagreement(lambda *args: [2 * x for x in rounded(*args)], rounded) is not None


@pytest.mark.parametrize(
    ("error", "of_library", "agrees"),
    [(0.013, 0.01, True), (0.02, 0.01, False), (0.04, 0.029, True), (0.04, 0.031, False), (0.013, None, False)],
)
def test_a_region_that_hands_on_rounded_results_may_be_wrong_as_its_library_is(error, of_library, agrees):
    """Relative errors. The equations are exact here; a library that is wrong by more than 3 % counts for nothing."""
    struct = [jax.ShapeDtypeStruct((64, 32), jnp.float32)]
    library = None if of_library is None else (lambda x: [x * (1 + of_library)])
    exact = lambda x: [x]  # noqa: E731
    compared = Comparison(exact, exact, lambda x: [x * (1 + error)], struct, struct, 2.0**-10, library=library)
    assert (compared.on(jax.random.normal(jax.random.key(0), (64, 32))) is None) == agrees
    assert compared.disagreement() is not None  # on random operands, only the equations count


@pytest.mark.parametrize(("flips", "agrees"), [(3, True), (4, False)])
def test_rounding_decides_which_huge_elements_overflow(flips, agrees):
    """Float32 differs from the plain version in one element; a kernel may differ in three."""

    def with_infinite(count):
        return lambda x: [x.at[:count].set(jnp.inf)]

    struct = [jax.ShapeDtypeStruct((16,), jnp.float32)]
    compared = Comparison(with_infinite(4), with_infinite(5), with_infinite(4 + flips), struct, struct, 2.0**-10)
    assert (compared.on(jnp.arange(16.0)) is None) == agrees
