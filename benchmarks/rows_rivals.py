"""What people write of rows in JAX, forward and backward: XLA's programs that benchmarks/rows.py compares with.

The backward pass of what is written is the jitted ``jax.vjp`` as a function of inputs and cotangents, without the
results of the forward pass. It computes again what a training step would have saved. The library program of an
operation of ours is the other program of XLA: it reads what our forward pass saves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from search_spaces import LibraryKernel, Operation, load
from search_spaces.problem import PROPORTIONAL, Problem, TakeRows, Tolerance, as_tuple
from search_spaces.rows.formulas import EPS
from search_spaces.rows.problem import RowProblem

GROUPS = 32
LARGEST_FLOAT8 = 448.0


def _softmax_with_lse(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(jnp.float32)
    return jax.nn.softmax(wide).astype(x.dtype), jax.nn.logsumexp(wide, axis=-1)


def _cross_entropy(x: jax.Array, label: jax.Array) -> jax.Array:
    """As optax.softmax_cross_entropy_with_integer_labels, of logits in float32."""
    less = x.astype(jnp.float32)
    less -= lax.stop_gradient(jnp.max(less, axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(less, label[..., None], axis=-1)[..., 0]
    return jnp.log(jnp.sum(jnp.exp(less), axis=-1)) - chosen


def _rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """As flax.linen.RMSNorm: statistics and product in float32."""
    wide = x.astype(jnp.float32)
    return (wide * (lax.rsqrt(jnp.mean(lax.square(wide), axis=-1, keepdims=True) + EPS) * weight)).astype(x.dtype)


def _add_rms_norm(x: jax.Array, residual: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As a step of a residual stream."""
    total = x + residual
    return _rms_norm(total, weight), total


def _normalised(x: jax.Array, axis: Any) -> tuple[jax.Array, jax.Array]:
    """Returns centred values and their scale as flax.linen does, with the variance from the mean square."""
    mean = jnp.mean(x, axis, keepdims=True)
    variance = jnp.maximum(0.0, jnp.mean(lax.square(x), axis, keepdims=True) - lax.square(mean))
    return x - mean, lax.rsqrt(variance + EPS)


def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """As flax.linen.LayerNorm."""
    centred, scale = _normalised(x.astype(jnp.float32), -1)
    return (centred * (scale * weight) + bias).astype(x.dtype)


def _group_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """As flax.linen.GroupNorm of images ``[images, ..., channels]``."""
    channels = x.shape[-1] // GROUPS
    centred, scale = _normalised(x.astype(jnp.float32).reshape(x.shape[0], -1, GROUPS, channels), (1, 3))
    weight, bias = weight.reshape(GROUPS, channels), bias.reshape(GROUPS, channels)
    return (centred * (scale * weight) + bias).astype(x.dtype).reshape(x.shape)


def _silu_and_mul(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    return jax.nn.silu(x[..., :half]) * x[..., half:]


def _quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scale = jnp.where(most > 0, most / LARGEST_FLOAT8, 1.0)
    q = jnp.clip(wide / scale, -LARGEST_FLOAT8, LARGEST_FLOAT8)
    return q.astype(jnp.float8_e4m3fn), scale[..., 0]


WRITTEN: Mapping[str, Callable[..., Any]] = {
    "softmax": jax.nn.softmax,
    "softmax_with_lse": _softmax_with_lse,
    "log_softmax": jax.nn.log_softmax,
    "cross_entropy": _cross_entropy,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "silu_and_mul": _silu_and_mul,
    "quantize_rows": _quantize_rows,
}


@functools.lru_cache
def _forward(formula: str, extents: str) -> RowProblem:
    found: RowProblem = load(formula).problem.from_canonical(extents)
    return found


@functools.lru_cache
def _shapes(p: WrittenProblem) -> tuple[tuple[jax.ShapeDtypeStruct, ...], Any]:
    """Returns the operands and the result."""
    inputs = p.forward.operands()
    if p.backward:
        inputs = (*inputs, *as_tuple(jax.eval_shape(WRITTEN[p.formula], *inputs)))
    return inputs, jax.eval_shape(p.compute, *inputs)


@dataclasses.dataclass(frozen=True)
class WrittenProblem(Problem):
    """Inputs of a formula, and cotangents of its results if the operation is its backward pass.

    Attributes:
      operation: name of an operation of ours: a formula, its forward pass that saves more, or its backward pass.
      extents: its problem, as in a key.
    """

    operation: str
    extents: str

    @classmethod
    def of(cls, *args: Any, **params: Any) -> WrittenProblem:
        return cls(**params)

    @property
    def formula(self) -> str:
        return self.operation.removesuffix("_backward").removesuffix("_saving")

    @property
    def backward(self) -> bool:
        return self.operation.endswith("_backward")

    @property
    def forward(self) -> RowProblem:
        """The formula's own problem: those of its parts have the same fields."""
        return _forward(self.formula, self.extents)

    def compute(self, *args: jax.Array) -> Any:
        written = WRITTEN[self.formula]
        if not self.backward:
            return written(*args)
        inputs = args[: len(self.forward.operands())]
        moving = [i for i, x in enumerate(inputs) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_moving(*some: jax.Array) -> Any:
            every = dict(enumerate(inputs)) | dict(zip(moving, some, strict=True))
            return as_tuple(written(*every.values()))

        _, pull = jax.vjp(of_moving, *(inputs[i] for i in moving))
        return pull(args[len(inputs) :])

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return _shapes(self)[0]

    def result(self) -> Any:
        return _shapes(self)[1]

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        inputs = self.forward.inputs(seed)
        return (*inputs, *super().inputs(seed)[len(inputs) :])

    def reference(self, *args: jax.Array) -> Any:
        wide = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in args]
        return jax.tree.map(lambda x: x.astype(jnp.float32), self.compute(*wide))

    def tolerance(self) -> tuple[Tolerance, ...]:
        """Returns four roundings to the dtype of the operands, of the largest element and of the element itself."""
        eps = float(jnp.finfo(self.operands()[0].dtype).eps)
        found = [max(4 * eps, 2.0**-12, float(jnp.finfo(s.dtype).eps)) for s in self.results()]
        return tuple(Tolerance(absolute=x, relative=x, scale=PROPORTIONAL) for x in found)

    @property
    def flops(self) -> float:
        return self.forward.flops * (2 if self.backward else 1)

    @property
    def arithmetic(self) -> str:
        return "float32"

    def _by_row(self) -> list[bool]:
        """Returns, for each operand, whether each row has an own part of it."""
        operands, results = self.forward.arrays
        return [x.kind in ("row", "scalar") for x in (*operands, *results)][: len(self.operands())]

    @property
    def row_axes(self) -> tuple[int, ...]:
        return tuple(-len(s.shape) for s in self.results())

    def at_rows(self, rows: npt.NDArray[np.int32]) -> tuple[Problem, TakeRows] | None:
        if not isinstance(self.forward, RowProblem):  # a group norm
            return None
        by_row = self._by_row()
        if self.backward and not all(by_row):  # a gradient is a sum over rows
            return None
        some = dataclasses.replace(self.forward, rows=len(rows)).canonical()

        def take(args: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            return tuple(jnp.take(x, rows, axis=0) if own else x for x, own in zip(args, by_row, strict=True))

        return dataclasses.replace(self, extents=some), take


@dataclasses.dataclass(frozen=True)
class CopyProblem(Problem):
    """As many bytes written as read, and nothing to compute: minus ``x``, which no compiler leaves out."""

    rows: int
    columns: int
    dtype: str = "bfloat16"

    formula = "copy"
    backward = False

    @classmethod
    def of(cls, *args: Any, **params: Any) -> CopyProblem:
        (x,) = args
        return cls(*x.shape, str(x.dtype))

    def compute(self, x: jax.Array) -> jax.Array:
        return -x

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (self.result(),)

    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.columns), jnp.dtype(self.dtype))

    def reference(self, *args: jax.Array) -> jax.Array:
        return -args[0].astype(jnp.float32)

    def at_rows(self, rows: npt.NDArray[np.int32]) -> tuple[Problem, TakeRows]:
        return dataclasses.replace(self, rows=len(rows)), lambda args: (jnp.take(args[0], rows, axis=0),)

    @property
    def flops(self) -> float:
        return 1.0 * self.rows * self.columns


class AsWritten(LibraryKernel[Any]):
    """What people write, of operands as they come."""

    version = 1

    def run(self, problem: Any, schedule: Any, target: Any, /, *args: Any, **params: Any) -> Any:
        return problem.compute(*args)


# Workers find each by its name in this module.
AS_WRITTEN = Operation("as_written", WrittenProblem, (AsWritten(),))
COPY = Operation("copy", CopyProblem, (AsWritten(),))
