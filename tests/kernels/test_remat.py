"""What `jax.checkpoint` keeps of tuned products: what its policies keep of dots."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import scheduler
from scheduler import tuned, tuned_matmul, tuned_softmax
from search_spaces import jax_compat
from search_spaces.matmul import MATMUL

pytestmark = pytest.mark.slow_but_first

policies = jax.checkpoint_policies
POLICIES = {
    "none": None,
    "dots": policies.dots_saveable,
    "dots without batch": policies.dots_with_no_batch_dims_saveable,
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
    "names": policies.save_only_these_names("first"),
    "offload": policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
    "offload names": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["first"],
        names_which_can_be_offloaded=[],
        offload_src="device",
        offload_dst="pinned_host",
    ),
    "either": policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("first")),
}


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


def plain(matmul, x, w):
    return jnp.tanh(matmul(checkpoint_name(jnp.tanh(matmul(x, w)), "first"), w))


def jitted(matmul, x, w):
    return jax.jit(functools.partial(plain, matmul))(x, w)


def scanned(matmul, x, w):
    return jax.lax.scan(lambda y, _: (plain(matmul, y, w), None), x, None, length=3)[0]


def vmapped(matmul, x, w):
    """Another `w` for each element: a product with a batch axis."""
    return jax.vmap(functools.partial(plain, matmul))(jnp.stack([x, x + 1]), jnp.stack([w, -w]))


def vmapped_rows(matmul, x, w):
    """One `w` for all: a larger product."""
    return jax.vmap(functools.partial(plain, matmul), (0, None))(jnp.stack([x, x + 1]), w)


def leading_axes(matmul, x, w):
    return plain(matmul, jnp.stack([x, x + 1]), w)


def leading_axes_of_both(matmul, x, w):
    return plain(matmul, jnp.stack([x, x + 1]), jnp.stack([w, -w]))


PLACES = [plain, jitted, scanned, vmapped, vmapped_rows, leading_axes, leading_axes_of_both]
X, W = (jax.random.normal(jax.random.key(seed), (8, 8)) / 3 for seed in (0, 1))


def kept(place, matmul, policy, capsys):
    """Dtype, memory and number of elements of what is kept for the backward pass, without the arguments."""
    block = jax.checkpoint(lambda x, w: place(matmul, x, w).sum(), policy=policy)
    capsys.readouterr()
    print_saved_residuals(block, X, W)
    types = [
        line.split()[0].strip("]").split("[") for line in capsys.readouterr().out.splitlines() if "argument" not in line
    ]
    return sorted((dtype, math.prod(map(int, filter(None, shape.split(","))))) for dtype, shape in types)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_keeps_of_tuned_products_what_it_keeps_of_dots(place, policy, capsys):
    assert kept(place, tuned_matmul, POLICIES[policy], capsys) == kept(place, jnp.matmul, POLICIES[policy], capsys)


def test_the_policies_for_dots_keep_two_products_of_two_and_none_with_a_batch_axis(capsys):
    count = lambda place, policy: len(kept(place, tuned_matmul, POLICIES[policy], capsys))  # noqa: E731
    assert [count(plain, policy) for policy in ("dots", "dots without batch", "nothing")] == [2, 2, 0]
    assert [count(vmapped, policy) for policy in ("dots", "dots without batch")] == [2, 0]
    assert set(kept(plain, tuned_matmul, POLICIES["offload"], capsys)) == {("f32<host>", 64)}


def gradients(block):
    return jax.jit(jax.grad(lambda x, w: (block(x, w) ** 2).sum(), (0, 1)))(X, W)


@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_the_same_whatever_is_kept(place):
    wanted = gradients(functools.partial(place, jnp.matmul))
    for policy in ("nothing", "dots", "offload"):
        tuned_place = functools.partial(place, functools.partial(tuned_matmul, backends="interpret"))
        found = gradients(jax.checkpoint(tuned_place, policy=POLICIES[policy]))
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5, err_msg=policy)


def test_products_are_not_made_again_where_a_policy_keeps_them():
    def calls(policy):
        block = jax.checkpoint(functools.partial(plain, tuned_matmul), policy=POLICIES[policy])
        return str(jax.make_jaxpr(jax.grad(lambda x, w: block(x, w).sum(), (0, 1)))(X, W)).count("tuned_call[")

    assert (calls("dots"), calls("nothing")) == (2 + 4, 2 + 4 + 2)  # forwards, backwards, and once more


def test_what_follows_a_product_and_an_operation_of_ones_own_are_kept_as_dots_are(capsys):
    biased = lambda x, w: tuned_matmul(x, w, bias=w[0], activation="gelu", residual=x)  # noqa: E731
    assert kept(plain, biased, POLICIES["dots"], capsys).count(("f32", 64)) >= 2
    assert len(kept(plain, tuned(MATMUL), POLICIES["dots"], capsys)) == 2


def test_whole_numbers_beside_what_is_differentiated_are_products_too():
    whole = jnp.ones((8, 8), jnp.int8)

    @functools.partial(jax.checkpoint, policy=policies.dots_saveable)
    def block(x):
        return (tuned_matmul(whole, whole, preferred_element_type="bfloat16") * jnp.sin(x)).sum()

    np.testing.assert_allclose(jax.grad(block)(X), 8 * jnp.cos(X), rtol=1e-5)


def test_a_tuned_call_that_is_no_product_is_no_dot(capsys):
    rows = lambda x, w: tuned_softmax(x * w)  # noqa: E731
    assert kept(plain, rows, POLICIES["dots"], capsys) == []


def test_jax_still_has_the_table_of_rules_that_this_needs():
    assert jax_compat.partial_eval.partial_eval_jaxpr_custom_rules
    assert jax.ad_checkpoint.Offloadable._fields == ("src", "dst")
