"""SiLU of one half of each row times the other: ``SILU_AND_MUL``, its problem and its kernels."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from search_spaces.front_end import require_array
from search_spaces.operation import BoundCall, Operation, Unsupported
from search_spaces.problem import Tolerance
from search_spaces.recognise import (
    Node,
    Recognised,
    Value,
    as_of,
    between,
    factors,
    number,
    rounded,
    rows_of,
    same,
    strip,
)
from search_spaces.rowwise import HalvesFormula, XlaRows, problem, row_operation
from search_spaces.rowwise.hopper import HopperHalves
from search_spaces.rowwise.problem import RowProblem, matrix
from search_spaces.rowwise.tpu import TpuHalves
from search_spaces.rowwise.tpu.space import TpuElementCosts

# ------------------------------------------------------------------------------
# SiLU-and-mul on elements at the same position of both halves.


class SiluAndMul(HalvesFormula):
    read, written = ((0, False), (0, True)), (False,)

    def compute(self, *halves: jax.Array) -> tuple[jax.Array, ...]:
        gate, up = halves
        return (gate * (1 / (1 + jnp.exp(-gate))) * up,)


# ------------------------------------------------------------------------------
# SiLU of one half of each row times the other half as a problem.


@dataclasses.dataclass(frozen=True)
class SiluAndMulProblem(RowProblem):
    """``out = silu(x[:, :columns]) * x[:, columns:]``, with ``silu(g) = g / (1 + exp(-g))``.

    The first half is the gate, as in FlashInfer's ``silu_and_mul``.
    """

    @classmethod
    def of(cls, x: Any, **params: Any) -> SiluAndMulProblem:
        """Returns the problem of ``x[rows, 2 * columns]``."""
        rows, columns = matrix(x)
        if columns % 2:
            raise ValueError(f"x has shape {x.shape}; a row is two halves, so its length is even")
        return cls(rows=rows, columns=columns // 2, dtype=str(x.dtype))

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((self.rows, 2 * self.columns), jnp.dtype(self.dtype)),)

    @staticmethod
    def compute(*args: jax.Array, **params: Any) -> jax.Array:
        (x,) = args
        gate, up = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return jax.nn.silu(gate) * up

    @property
    def flops(self) -> float:
        return 5.0 * self.rows * self.columns


# ------------------------------------------------------------------------------
# The gradient of SiLU-and-mul as a problem.


@dataclasses.dataclass(frozen=True)
class SiluAndMulBackwardProblem(RowProblem):
    """The cotangent of ``x[rows, 2 * columns]``, with the gate as first half, given the result's cotangent `d_out`.

    The halves of the cotangent are ``d_out * up * silu'(gate)`` and ``d_out * silu(gate)``, in the order of `x`.
    """

    row_operands: ClassVar[tuple[str, ...]] = ("x", "d_out")

    @classmethod
    def of(cls, x: Any, d_out: Any, **params: Any) -> SiluAndMulBackwardProblem:  # type: ignore[override]
        """Returns the problem of ``x[rows, 2 * columns]`` and ``d_out[rows, columns]``."""
        rows, columns = matrix(d_out)
        if x.shape != (rows, 2 * columns) or x.dtype != d_out.dtype:
            raise ValueError(f"x {x.dtype}{list(x.shape)} is not two of d_out {d_out.dtype}{list(d_out.shape)}")
        return cls(rows=rows, columns=columns, dtype=str(d_out.dtype))

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.result(), jax.ShapeDtypeStruct((self.rows, self.columns), jnp.dtype(self.dtype))

    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, 2 * self.columns), jnp.dtype(self.dtype))

    @staticmethod
    def compute(*args: jax.Array, **params: Any) -> jax.Array:
        x, d_out = args
        gate, up = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([d_out * slope for slope in slopes(gate, up, jax.nn.sigmoid(gate))], axis=-1)

    @property
    def library_bytes_moved(self) -> float:
        """Includes XLA's separate writes of both halves, and another read and write to join them."""
        return self.bytes_moved + 2 * 2.0 * self.rows * self.columns * self.itemsize

    @property
    def row_bytes(self) -> int:
        return 3 * self.columns * self.itemsize

    @property
    def flops(self) -> float:
        return 11.0 * self.rows * self.columns

    def tolerance(self) -> Tolerance:
        """Returns a tolerance for the cancellation where ``silu'`` is near zero: 2^-19 relative, times about 6 x 6."""
        exact = super().tolerance()
        return Tolerance(absolute=2.0**-13, relative=exact.relative)


def slopes(gate: jax.Array, up: jax.Array, sigmoid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the derivatives of ``silu(gate) * up`` in both: ``silu' = s + silu (1 - s)``, with the sigmoid s."""
    active = gate * sigmoid
    return up * (sigmoid + active * (1 - sigmoid)), active


# ------------------------------------------------------------------------------
# Front end of SiLU-and-mul: SiLU of the first half of the last axis times the other half.


def bind(x: Any) -> BoundCall[SiluAndMulProblem] | Unsupported:
    """Binds a call of `scheduler.tuned_silu_and_mul`, with the same argument."""
    require_array("x", x)
    if jnp.ndim(x) == 0 or jnp.shape(x)[-1] % 2:
        raise ValueError(f"x has shape {jnp.shape(x)}; its last axis is two halves, so its length is even")
    if not jnp.issubdtype(dtype := jnp.result_type(x), jnp.inexact):
        raise TypeError(f"x holds {dtype}, of which there is no SiLU: use .astype")
    return problem.bind_rows(SiluAndMulProblem, x)


# ------------------------------------------------------------------------------
# Recognition of a gate in a jaxpr: SiLU of the first half of each row times the other half.


def recognise(node: Node) -> Recognised | None:
    """Recognises ``silu(x[..., :d]) * x[..., d:]``, with halves by slices or by `jnp.split`."""
    if node.name != "mul" or (found := gate_and_up(node.results[0])) is None:
        return None
    gate, up = map(half, found)
    if gate is None or up is None or not same(gate[0], up[0]) or (gate[1], up[1]) != (0, 1):
        return None
    result = rounded(node.results[0])
    if (x := as_of(gate[0], result.dtype)) is None:
        result, x = node.results[0], as_of(gate[0], node.results[0].dtype)
    if x is None:
        return None
    rows, columns = rows_of(result)
    try:
        problem = SiluAndMulProblem(rows=rows, columns=columns, dtype=str(result.dtype))
    except ValueError:
        return None
    return Recognised(problem, between(result, [strip(x)]), (node,))


def gate_and_up(value: Value) -> tuple[Value, Value] | None:
    """Returns the arrays of which ``silu(gate) * up`` is the value; None if it is no such product."""
    found = list(factors(value))
    for gate, sigmoid, up in itertools.permutations(found) if len(found) == 3 else ():
        if (of := _sigmoid(sigmoid)) is not None and same(of, gate) and gate.shape == up.shape:
            return gate, up
    if len(found) == 2:  # g / (1 + exp(-g)) * up
        for silu, up in (found, found[::-1]):
            node = strip(silu).by("div")
            if node is not None and (of := _one_plus_exp(node.inputs[1])) is not None and same(of, node.inputs[0]):
                return node.inputs[0], up
    return None


def _sigmoid(value: Value) -> Value | None:
    if (node := strip(value).by("logistic")) is not None:
        return node.inputs[0]
    if (node := strip(value).by("div")) is not None and number(node.inputs[0]) == 1.0:
        return _one_plus_exp(node.inputs[1])
    return None


def _one_plus_exp(value: Value) -> Value | None:
    """Returns g of ``1 + exp(-g)``."""
    if (node := strip(value).by("add")) is None or 1.0 not in map(number, node.inputs):
        return None
    exp = next((each for each in map(strip, node.inputs) if each.by("exp")), None)
    negated = None if exp is None or exp.node is None else strip(exp.node.inputs[0]).by("neg")
    return None if negated is None else negated.inputs[0]


def half(value: Value) -> tuple[Value, int] | None:
    """Returns the array of whose rows this is a half, and which half."""
    found = strip(value)
    if (node := found.by("split")) is not None:
        sizes = node.params["sizes"]
        halves = node.params["axis"] == len(found.shape) - 1 and len(sizes) == 2 and len(set(sizes)) == 1
        return (strip(node.inputs[0]), node.results.index(found)) if halves else None
    if (node := found.by("slice")) is None or set(node.params["strides"] or (1,)) != {1}:
        return None
    whole, first = node.inputs[0], node.params["start_indices"][-1]
    halves = found.shape == (*whole.shape[:-1], whole.shape[-1] / 2) and first in (0, found.shape[-1])
    return (strip(whole), int(first > 0)) if halves else None


# ------------------------------------------------------------------------------
# The gradient of SiLU-and-mul on elements at the same position of all halves.


class SiluAndMulBackward(HalvesFormula):
    read, written = ((0, False), (0, True), (1, False)), (False, True)

    def compute(self, *halves: jax.Array) -> tuple[jax.Array, ...]:
        gate, up, d_out = halves
        sigmoid = 1 / (1 + jnp.exp(-gate))
        of_gate, of_up = slopes(gate, up, sigmoid)
        return d_out * of_gate, d_out * of_up


# ------------------------------------------------------------------------------
# The gradient of SiLU-and-mul by XLA, which joins both halves as it computes them, or in a separate pass.


class XlaSiluAndMulBackward(XlaRows[SiluAndMulBackwardProblem]):
    # 4096 x 14336 in bfloat16 on an H200: 135 us alone, the same as the kernel; 337 us in a training step of Llama 3
    # 8B.
    loses_ties = True


# ------------------------------------------------------------------------------
# The tangent of SiLU-and-mul as a problem.


@dataclasses.dataclass(frozen=True)
class SiluAndMulJvpProblem(RowProblem):
    """The tangent of ``silu(gate) * up``: of the halves of ``x[rows, 2 * columns]``, with the tangents in `dx`."""

    row_operands: ClassVar[tuple[str, ...]] = ("x", "dx")

    @classmethod
    def of(cls, x: Any, dx: Any, **params: Any) -> SiluAndMulJvpProblem:  # type: ignore[override]
        """Returns the problem of two arrays ``[rows, 2 * columns]``."""
        rows, columns = matrix(x)
        if columns % 2 or (dx.shape, dx.dtype) != (x.shape, x.dtype):
            raise ValueError(
                f"x {x.dtype}{list(x.shape)} and dx {dx.dtype}{list(dx.shape)} are not alike, of two halves"
            )
        return cls(rows=rows, columns=columns // 2, dtype=str(x.dtype))

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((self.rows, 2 * self.columns), jnp.dtype(self.dtype)),) * 2

    @staticmethod
    def compute(*args: jax.Array, **params: Any) -> jax.Array:
        (gate, up), (d_gate, d_up) = (jnp.split(x, 2, axis=-1) for x in args)
        of_gate, of_up = slopes(gate, up, jax.nn.sigmoid(gate))
        return d_gate * of_gate + d_up * of_up

    @property
    def flops(self) -> float:
        return 12.0 * self.rows * self.columns


# ------------------------------------------------------------------------------
# The gradient of SiLU-and-mul: ``SILU_AND_MUL_BACKWARD``, its problem and its kernels.

# An exponential and a reciprocal on the special function units.
MUFU_OPS = 2
SILU_AND_MUL_BACKWARD = row_operation(
    "silu_and_mul_backward",
    SiluAndMulBackwardProblem,
    # In one pass; XLA writes both halves separately and joins them in another.
    HopperHalves(SiluAndMulBackward(), fp32_ops=13, mufu_ops=MUFU_OPS),
    TpuHalves(SiluAndMulBackward(), "silu_and_mul_backward_tpu", TpuElementCosts(fp32_ops=15.0, mufu_ops=MUFU_OPS)),
    library=XlaSiluAndMulBackward(),
    front_end=None,
)


# ------------------------------------------------------------------------------
# The tangent of SiLU-and-mul: ``SILU_AND_MUL_JVP``. XLA computes it; its transpose is the gradient, which is tuned.


def transpose(call: Callable[..., Any], p: SiluAndMulJvpProblem, cotangent: Any, args: Any) -> tuple[None, Any]:
    """Transposes the operation, which is linear in `dx` alone."""
    return None, call(SILU_AND_MUL_BACKWARD, SiluAndMulBackwardProblem(p.rows, p.columns, p.dtype), args[0], cotangent)


SILU_AND_MUL_JVP = Operation[SiluAndMulJvpProblem](
    name="silu_and_mul_jvp",
    problem=SiluAndMulJvpProblem,
    kernels=(XlaRows(),),
    transpose=transpose,
    batch=problem.batch,
    shard=problem.shard,
)


# ------------------------------------------------------------------------------
# Derivative of SiLU-and-mul, by separate operations for the tangent and the gradient.


def jvp(
    call: Callable[..., Any], p: SiluAndMulProblem, primals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array | None]:
    """Returns result and tangent. The tangent's transpose is tuned as the gradient; the backward pass saves `x`."""
    (x,), (dx,) = primals, tangents
    moving = SiluAndMulJvpProblem(p.rows, p.columns, p.dtype)
    return call(p, x), None if dx is None else call(SILU_AND_MUL_JVP, moving, x, dx)


SILU_AND_MUL = row_operation(
    "silu_and_mul",
    SiluAndMulProblem,
    HopperHalves(SiluAndMul(), fp32_ops=8, mufu_ops=MUFU_OPS),
    TpuHalves(SiluAndMul(), "silu_and_mul_tpu", TpuElementCosts(fp32_ops=9.0, mufu_ops=MUFU_OPS)),
    library=XlaRows(SiluAndMulProblem.compute),
    jvp=jvp,
    front_end=bind,
    recognise=recognise,
)
