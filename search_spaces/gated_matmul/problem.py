"""The gated matmul problem: operands, inputs, reference and tolerance, independent of the kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from search_spaces import checking
from search_spaces.matmul import epilogue
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.problem import Problem, TakeRows, Tolerance, scaled

DTYPES = ("bfloat16", "float16")


class GatedOperands(NamedTuple):
    """One value per operand of a problem; weights and biases are one, or the gate's and then the other factor's."""

    x: Any
    weights: tuple[Any, ...]
    biases: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class GatedMatmulProblem(Problem):
    """``activation(x @ gate + gate_bias) * (x @ up + up_bias)``, with ``x[m, k]`` and weights ``[k, n]`` each.

    The accumulators and the epilogue are in float32; only the result is rounded.

    Attributes:
      m, n, k: extents, at least 1; n is that of the result.
      dtype: of `x`, the weights and the result.
      transpose_w: weights are stored ``[n, k]``.
      pair: the weights are two arrays, and so are the biases. Otherwise they are one array, the gate first: ``[k, 2
        n]``, or ``[2 n, k]`` if transposed, and the bias is ``[2 n]``.
      activation: a name in `epilogue.ACTIVATIONS`.
      bias: dtype of the biases; "" means none.
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    transpose_w: bool = False
    pair: bool = False
    activation: str = "silu"
    bias: str = ""

    _dtype_fields = ("bias",)

    def __post_init__(self) -> None:
        self._spell_dtypes()
        for name in ("m", "n", "k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name, allowed in (("dtype", DTYPES), ("activation", tuple(epilogue.ACTIVATIONS))):
            self._require(name, allowed)
        self._require("bias", ("", *epilogue.DTYPES), "; leave it out for none")
        super().__post_init__()

    @classmethod
    def of(
        cls, x: Any, *others: Any, transpose_w: bool = False, pair: bool = False, activation: str = "silu"
    ) -> GatedMatmulProblem:
        """Builds the problem from operands in the layout of `operands`: `x`, the weights, then the biases."""
        count = 2 if pair else 1
        if len(others) not in (count, 2 * count):
            wanted = "gate and up, and then two biases or none" if pair else "one array of weights, and a bias or none"
            raise ValueError(f"after x come {wanted}, and not {len(others)} arrays")
        weights, biases = others[:count], others[count:]
        if x.ndim != 2 or any(w.ndim != 2 for w in weights):
            raise ValueError(f"x {x.shape} and the weights {_shapes(weights)} have 2 axes each")
        k, columns = weights[0].shape[:: -1 if transpose_w else 1]
        if any(w.shape != weights[0].shape for w in weights) or k != x.shape[1] or columns % (1 if pair else 2):
            wanted = "[k, n] each" if pair else "[k, 2 n]"
            raise ValueError(
                f"x {x.shape} is [m, k] and the weights are {wanted}, not {_shapes(weights)}, {transpose_w=}"
            )
        if any(b.shape != (columns,) for b in biases):
            raise ValueError(f"a bias has shape {(columns,)}, not {_shapes(biases)}")
        if any(w.dtype != x.dtype for w in weights):
            raise TypeError(f"x is {x.dtype} and the weights are {weights[0].dtype}; one dtype is needed")
        if len({str(b.dtype) for b in biases}) > 1:
            raise TypeError(f"the biases are {biases[0].dtype} and {biases[1].dtype}; one dtype is needed")
        return cls(
            m=x.shape[0],
            n=columns if pair else columns // 2,
            k=k,
            dtype=str(x.dtype),
            transpose_w=transpose_w,
            pair=pair,
            activation=activation,
            bias=str(biases[0].dtype) if biases else "",
        )

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns `x`, one or two arrays of weights, and no bias or as many biases as weights."""
        count, columns = (2, self.n) if self.pair else (1, 2 * self.n)
        w = (columns, self.k) if self.transpose_w else (self.k, columns)
        shapes: list[tuple[str, tuple[int, ...]]] = [(self.dtype, (self.m, self.k)), *[(self.dtype, w)] * count]
        shapes += [(self.bias, (columns,))] * (count if self.bias else 0)
        return tuple(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for dtype, shape in shapes)

    def named(self, args: Sequence[Any]) -> GatedOperands:
        """Names values that are given in the order of `operands`."""
        count = 2 if self.pair else 1
        return GatedOperands(args[0], tuple(args[1 : 1 + count]), tuple(args[1 + count :]))

    def apart(self, args: Sequence[jax.Array]) -> GatedOperands:
        """Splits joined operands into the operands of a pair."""
        x, weights, biases = self.named(args)
        if self.pair:
            return GatedOperands(x, weights, biases)
        (w,), n = weights, self.n
        halves = (w[:n], w[n:]) if self.transpose_w else (w[:, :n], w[:, n:])
        return GatedOperands(x, halves, tuple(half for bias in biases for half in (bias[:n], bias[n:])))

    @property
    def gate(self) -> MatmulProblem:
        """The product that feeds the activation."""
        return MatmulProblem(
            self.m,
            self.n,
            self.k,
            self.dtype,
            transpose_b=self.transpose_w,
            bias=self.bias,
            activation=self.activation,
        )

    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.m, self.n), jnp.dtype(self.dtype))

    def reference(self, *args: jax.Array) -> jax.Array:
        x, weights, biases = self.apart([x.astype(jnp.float32) for x in args])
        return self.gated([self.product(x, w, precision=lax.Precision.HIGHEST) for w in weights], biases)

    def product(self, x: jax.Array, w: jax.Array, *, precision: lax.Precision | None = None) -> jax.Array:
        """Computes ``x @ w`` in float32."""
        contract = ((1,), (1 if self.transpose_w else 0,))
        return lax.dot_general(x, w, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)

    def gated(self, products: Sequence[jax.Array], biases: Sequence[jax.Array]) -> jax.Array:
        """Computes the result from ``x @ gate`` and ``x @ up``, in their dtype."""
        gate, up = (
            acc if bias is None else acc + bias.astype(acc.dtype)
            for acc, bias in zip(products, biases or (None, None), strict=True)
        )
        return epilogue.apply(gate, activation=self.activation) * up

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Returns standard normal inputs, with `x` scaled so that the accumulators are standard normal too.

        Activations differ from each other near zero.
        """
        x, *others = super().inputs(seed)
        return scaled(x, self.k**-0.5), *others

    def special(self) -> tuple[str, ...]:
        return checking.PRODUCT_KINDS

    def special_tolerance(self, kind: str) -> tuple[Tolerance, ...]:
        """Returns the accumulator's tolerance relative to the largest accumulator, times the other factor.

        For both factors.
        """
        (one,) = self.gate.special_tolerance(kind)
        return (dataclasses.replace(one, absolute=2 * one.absolute),)

    def at_rows(self, rows: npt.NDArray[np.int32]) -> tuple[GatedMatmulProblem, TakeRows]:
        def take(args: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            return jnp.take(args[0], rows, axis=0), *args[1:]

        return dataclasses.replace(self, m=len(rows)), take

    def neighbour(self) -> GatedMatmulProblem | None:
        below = self.gate.neighbour()
        return None if below is None else dataclasses.replace(self, m=below.m, n=below.n, k=below.k)

    @property
    def flops(self) -> float:
        return 2 * self.gate.flops

    @property
    def library_bytes_moved(self) -> float:
        """XLA writes the float32 accumulators of both products in one kernel, and reads them in another."""
        return self.bytes_moved + 2 * 2 * 4 * self.m * self.n

    def tolerance(self) -> Tolerance:
        """Returns the rounding error of the result, plus the errors of both accumulators, times the other factor.

        The error of an accumulator is that of `MatmulProblem.tolerance`, also with a bias. Factors stay within 6
        standard deviations. An activation is no larger than its argument, and its slope is at most 1.13.
        """
        deviation = math.sqrt(2) if self.bias else 1.0
        one = self.gate.tolerance().absolute
        return Tolerance(absolute=2 * 6 * deviation * one, relative=self.gate.tolerance().relative)


def _shapes(arrays: Sequence[Any]) -> str:
    return " and ".join(str(x.shape) for x in arrays)
