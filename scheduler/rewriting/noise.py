"""Evaluates a function with rounding noise: what its results may differ by when another program computes it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scheduler.rewriting import equations
from search_spaces import fingerprint, lowering_compat, recognise
from search_spaces.checking import mixed_bits

# Relative noise of float32 results that programs round differently: sums in another order, and exponentials.
FINEST = 2.0**-20
# Primitives with float32 results that depend on the order of a sum, or on the approximation of a function. Quotients
# differ by less: noise at each of an optimizer's would double the time of compilation.
_PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "tuned_call"})
_SUMS_AND_FUNCTIONS = """
    cbrt cos cosh cumlogsumexp cumprod cumsum digamma erf erf_inv erfc exp exp2 expm1 lgamma log log1p
    logistic pow reduce_prod reduce_sum reduce_window_sum rsqrt scatter-add sin sinh sqrt tan tanh
"""
_APPROXIMATED = frozenset(_SUMS_AND_FUNCTIONS.split())
# Primitives that move or select elements and round nothing.
_MOVES = """
    abs argmax argmin bitcast_convert_type broadcast_in_dim clamp concatenate copy copy_p cummax cummin device_put
    dynamic_slice dynamic_update_slice expand_dims gather iota max min name neg optimization_barrier pad pvary
    reduce_max reduce_min reduce_precision reshape rev scatter select_and_gather_add select_n sharding_constraint sign
    slice sort split squeeze stop_gradient top_k transpose
"""
_EXACT = frozenset(_MOVES.split())


# Equations so many apart have the same noise.
KEYS = 97


def keys(seed: int) -> list[np.uint32]:
    """Returns the keys of the noise of one run."""
    return [*np.random.default_rng(seed).integers(2**32, size=KEYS, dtype=np.uint32)]


def with_noise(closed: Any, products: float = FINEST) -> Callable[..., list[Any]]:
    """Returns ``run(keys, *args)``, which computes a closed jaxpr with each rounding moved by up to one unit at random.

    Noise is added to matmuls, convolutions and grouped products, to casts to a narrower dtype, to other arithmetic in
    dtypes narrower than float32, and to sums and transcendental functions. The bits of the noise are a hash of the
    element's index, so nothing is stored, and XLA fuses it. Equations inside of a `while` loop and of kernels stay
    as they are: with noise, an iteration might not converge.

    The keys are arguments, so that the same equations of several layers are the same code, which XLA compiles once.

    Args:
      products: Least relative noise of a product, for arithmetic that is coarser than its dtypes (TF32).
    """

    def run(keys: Sequence[Any], *args: Any) -> list[Any]:
        return _Noise(itertools.cycle(keys), products).evaluated(closed, args)

    return run


@dataclasses.dataclass(frozen=True)
class _Noise:
    """Evaluates jaxprs with noise.

    Attributes:
      keys: Of the equations, in order.
      iteration: What the keys differ by in each iteration of a loop.
    """

    keys: Iterator[Any]
    products: float
    iteration: jax.Array | None = None

    def evaluated(self, closed: Any, args: Sequence[Any]) -> list[Any]:
        jaxpr = fingerprint.opened_jaxpr(closed)
        return equations.evaluated(jaxpr, getattr(closed, "consts", ()), args, self._results)

    def _results(self, equation: Any, args: Sequence[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if (inside := recognise.body(equation)) is not None:
            # As JAX lowers it: a backward pass computes these equations again on purpose.
            again = params.get("prevent_cse") and params.get("differentiated")
            return self.evaluated(inside, lax.optimization_barrier(args) if again else args)
        if name == "scan":
            return self._scanned(params, args)
        if name == "cond":
            index, *operands = args
            branches = [functools.partial(self._branch, branch) for branch in params["branches"]]
            return [*lax.switch(index, branches, *operands)]
        found = lowering_compat.evaluate_equation(equation, *args)
        narrowest = min((_eps(x.aval.dtype) for x in equation.invars), default=0.0)
        sizes = [self._size(name, x.dtype, narrowest) if x.size else 0.0 for x in found]
        return [_moved(x, self._key(), size) if size else x for x, size in zip(found, sizes, strict=True)]

    def _branch(self, closed: Any, *operands: Any) -> list[Any]:
        return self.evaluated(closed, operands)

    def _scanned(self, params: Any, args: Sequence[Any]) -> list[Any]:
        constants, carried = lowering_compat.scan_inputs(params)
        held, carry, xs = args[:constants], args[constants : constants + carried], args[constants + carried :]

        def body(state: Any, sliced: Sequence[Any]) -> Any:
            count, carry = state
            inside = dataclasses.replace(self, iteration=mixed_bits(count))
            results = inside.evaluated(params["jaxpr"], (*held, *carry, *sliced))
            return (count + np.uint32(1), results[:carried]), results[carried:]

        how = {"length": params["length"], "reverse": params["reverse"], "unroll": params["unroll"]}
        (_, carry), ys = lax.scan(body, (self._key(), [*carry]), list(xs), **how)
        return [*carry, *ys]

    def _key(self) -> Any:
        key = jnp.asarray(next(self.keys), jnp.uint32)
        return key if self.iteration is None else key ^ self.iteration

    def _size(self, name: str, dtype: Any, before: float) -> float:
        """Returns the relative noise of a result: 0 if the equation does not round it."""
        own = _eps(dtype)
        if not own or name in _EXACT or (name == "convert_element_type" and not 0 < before < own):
            return 0.0
        if name in _PRODUCTS:
            return max(own, self.products)
        if own > float(jnp.finfo(jnp.float32).eps):
            return own
        return max(own, FINEST) if name in _APPROXIMATED else 0.0


@functools.partial(jax.jit, static_argnames="size")
def _moved(x: jax.Array, key: jax.Array, size: float) -> jax.Array:
    """Moves each element by up to this relative size."""
    bits = mixed_bits(lax.iota(jnp.uint32, x.size).reshape(x.shape) ^ key)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    real = jnp.finfo(wide).dtype
    unit = bits.astype(real) * jnp.asarray(2.0**-31, real) - jnp.asarray(1, real)
    return (x.astype(wide) * (1 + unit * jnp.asarray(size, real))).astype(x.dtype)


def _eps(dtype: Any) -> float:
    """Returns the relative unit of a floating-point dtype; 0 for other dtypes."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0
