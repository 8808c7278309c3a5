"""Rows of adjacent channels at all positions of a sample: group normalization of arrays with channels last."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from search_spaces.front_end import in_front, unsupported_reason, weakly_typed
from search_spaces.operation import BoundCall, Kernels, Operation, Unsupported
from search_spaces.problem import Problem, Tolerance, nbytes
from search_spaces.rows.calls import formula_dtype
from search_spaces.rows.formulas import EPS, LayerNormProblem, require_like_rows
from search_spaces.rows.named import DTYPES
from search_spaces.rows.operation import CHANNELS, XlaRows
from search_spaces.rows.program import Program
from search_spaces.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class GroupNormProblem(Problem):
    """A group norm of x ``[samples, positions, channels]``, with a weight and a bias ``[channels]``.

    A row consists of `group` adjacent channels at all positions of a sample, position by position. The function of a
    row is that of a layer norm, to which weight and bias have the values of these channels again for each position.

    Attributes:
      group: adjacent channels that share a mean and a variance.
      dtype: dtype of x.
      weight_dtype: dtype of weight and bias: "float32", or "" for that of x.
    """

    shared_axis: ClassVar[str] = "channels"

    samples: int
    positions: int
    channels: int
    group: int
    dtype: str = "bfloat16"
    weight_dtype: str = ""

    def __post_init__(self) -> None:
        self._spell_dtypes()
        for name in ("samples", "positions", "channels", "group"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.channels % self.group:
            raise ValueError(f"{self.channels} channels are no groups of {self.group}")
        self._require("dtype", DTYPES)
        object.__setattr__(self, "weight_dtype", self.rows.weight_dtype)
        super().__post_init__()

    @classmethod
    def of(cls, x: Any, weight: Any, bias: Any, *, group: int) -> GroupNormProblem:
        """Returns the problem of arrays.

        Raises:
          TypeError, ValueError: dtypes or shapes that do not fit.
        """
        if x.ndim != 3:
            raise ValueError(f"x has shape {x.shape}; [samples, positions, channels] is needed")
        samples, positions, channels = x.shape
        problem = cls(samples, positions, channels, group, str(x.dtype), str(weight.dtype))
        for name, found, wanted in zip(("weight", "bias"), (weight, bias), problem.operands()[1:], strict=True):
            if found.shape != wanted.shape:
                raise ValueError(f"{name} has shape {found.shape}; x {x.shape} needs {wanted.shape}")
            if found.dtype != wanted.dtype:
                raise TypeError(f"{name} is {found.dtype}, and weight is {weight.dtype}: they need the same dtype")
        return problem

    @property
    def rows(self) -> Any:
        """The layer norm of the same rows, if each was contiguous."""
        count, columns = self.samples * self.channels // self.group, self.positions * self.group
        return LayerNormProblem(rows=count, columns=columns, dtype=self.dtype, weight_dtype=self.weight_dtype)

    def program_of(self, **params: Any) -> Program:
        """Returns the function of a row, for the parameters of a call."""
        program: Program = self.rows.program_of(**params)
        return program

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        vector = jax.ShapeDtypeStruct((self.channels,), jnp.dtype(self.weight_dtype or self.dtype))
        return self.result(), vector, vector

    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.samples, self.positions, self.channels), jnp.dtype(self.dtype))

    def reference(self, *args: jax.Array, **params: Any) -> jax.Array:
        return group_norm(*args, group=self.group, **params)

    by_xla = reference

    @property
    def flops(self) -> float:
        return float(self.rows.flops)

    @property
    def library_bytes_read_again(self) -> float:
        """XLA reads x once for each stage."""
        return float(len(self.program_of().stages) * nbytes(self.result()))

    @property
    def arithmetic(self) -> str:
        return "float32"

    def tolerance(self) -> Tolerance:
        tolerance: Tolerance = self.rows.tolerance()
        return tolerance

    def neighbour(self) -> GroupNormProblem | None:
        """Returns fewer positions, which do not divide into the same parts and chunks."""
        return dataclasses.replace(self, positions=self.positions - 3) if self.positions > 64 else None


def group_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, *, group: int, eps: float = EPS) -> jax.Array:
    """Computes a group norm of x ``[samples, ..., channels]`` in float32 or in a wider dtype of an operand.

    Source: Wu, He, arXiv:1803.08494.
    """
    wide = formula_dtype(x, weight, bias)
    grouped = x.astype(wide).reshape(x.shape[0], -1, x.shape[-1] // group, group)
    centred = grouped - jnp.mean(grouped, (1, 3), keepdims=True)
    norm = centred * lax.rsqrt(jnp.mean(centred * centred, (1, 3), keepdims=True) + eps)
    return norm.reshape(x.shape) * weight.astype(wide) + bias.astype(wide)


def _bind(x: Any, weight: Any, bias: Any, *, groups: int, eps: float = EPS) -> BoundCall[Any] | Unsupported:
    """Binds a call of `scheduler.tuned_group_norm`, with the same arguments."""
    require_like_rows(x, weight=weight, bias=bias)
    if jnp.ndim(x) < 2:
        raise ValueError(f"x has shape {jnp.shape(x)}; [samples, ..., channels] is needed")
    channels = jnp.shape(x)[-1]
    if not isinstance(groups, numbers.Integral) or groups < 1 or channels % groups:
        raise ValueError(f"{channels} channels are not {groups!r} groups of the same size")
    group = channels // groups

    def by_xla() -> jax.Array:
        arrays = [jnp.asarray(each) for each in (x, weight, bias)]
        found = group_norm(*arrays, group=group, eps=eps)
        return found.astype(arrays[0].dtype) if jnp.issubdtype(arrays[0].dtype, jnp.inexact) else found

    if reason := unsupported_reason({"x": x, "weight": weight, "bias": bias}) or weakly_typed(x, weight, bias):
        return Unsupported(reason, by_xla)
    folded = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), channels)
    try:
        problem = GroupNormProblem.of(folded, weight, bias, group=group)
    except (TypeError, ValueError) as error:
        return Unsupported(str(error), by_xla)
    return BoundCall(problem, (folded, weight, bias), lambda found: found.reshape(x.shape), (("eps", eps),))


def _batch(call: Callable[..., Any], p: GroupNormProblem, args: Any, dims: Any) -> tuple[Any, int] | None:
    """Folds the batch axis into the samples; None if weight or bias are batched."""
    if any(dim is not None for dim in dims[1:]):
        return None
    x, size = args[0], args[0].shape[dims[0]]
    folded = in_front(x, dims[0], size).reshape(size * p.samples, p.positions, p.channels)
    found = call(dataclasses.replace(p, samples=size * p.samples), folded, *args[1:])
    return found.reshape(size, p.samples, p.positions, p.channels), 0


_SHARDING: Sharding[GroupNormProblem] = Sharding(
    "samples positions channels, channels, channels -> samples positions channels", ("samples",)
)

GROUP_NORM: Operation[GroupNormProblem] = Operation(
    "group_norm",
    GroupNormProblem,
    Kernels(CHANNELS, XlaRows()),
    params=("eps",),
    front_end=_bind,
    batch=_batch,
    shard=lambda problem: _SHARDING,
)
