"""Grouped products as problems: rows times the matrix of their group, and the gradient of these matrices.

A problem takes the boundaries of its groups: group g has the rows ``boundaries[g]`` to ``boundaries[g + 1]``. They are
known only at run time. Rows before the first and after the last boundary belong to no group.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from search_spaces import checking
from search_spaces.matmul import epilogue
from search_spaces.matmul.problem import RESULTS, MatmulProblem, in_proportion
from search_spaces.problem import Problem, T, TakeRows, Tolerance, nbytes, scaled

FLOATS = ("bfloat16", "float16", "float32")
# Rows that the reference multiplies at a time.
BLOCK = 128

# ------------------------------------------------------------------------------
# Distributions of rows over groups, for which schedules are timed and verified.

# Equal sizes; sizes in proportion to 1/2, 1/3, 1/4, ... (the tables of most benchmarks); every other group empty.
DISTRIBUTIONS = ("balanced", "skewed", "half_empty")
# Between recorded sizes: "256+0+128".
PLUS = "+"


def group_sizes(distribution: str, rows: int, groups: int) -> npt.NDArray[np.int32]:
    """Returns the sizes of groups in a distribution of `DISTRIBUTIONS`, which add up to `rows`, or recorded sizes.

    Raises:
      ValueError: `distribution` is neither; or the recorded sizes are not `groups` sizes of at most `rows` in all.
    """
    if distribution not in DISTRIBUTIONS:
        return _recorded_sizes(distribution, rows, groups)
    weights = {
        "balanced": np.ones(groups),
        "skewed": 1.0 / (np.arange(groups) + 2),
        "half_empty": np.arange(groups) % 2 == 0,
    }[distribution]
    ends = np.round(np.cumsum(weights) / np.sum(weights) * rows).astype(np.int32)
    return np.diff(ends, prepend=np.int32(0)).astype(np.int32)


def _recorded_sizes(text: str, rows: int, groups: int) -> npt.NDArray[np.int32]:
    try:
        sizes = [int(size) for size in text.split(PLUS)]
    except ValueError:
        names = ", ".join(DISTRIBUTIONS)
        raise ValueError(f"distribution={text!r} is not one of {names}, and not sizes of groups, 256+0+128") from None
    if len(sizes) != groups or min(sizes) < 0 or not 0 < sum(sizes) <= rows:
        raise ValueError(
            f"distribution has {len(sizes)} sizes, the least {min(sizes)}, of {sum(sizes)} rows in all: {groups} sizes "
            f"from 0 on and 1 to {rows} rows in all are needed"
        )
    return np.array(sizes, np.int32)


def boundaries_of(sizes: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Returns the boundaries of groups of these sizes, of which the first starts at row 0."""
    return np.concatenate([[0], np.cumsum(np.asarray(sizes))]).astype(np.int32)


def sizes_of(boundaries: jax.Array) -> jax.Array:
    """Returns the sizes of groups, with the rows before the first group as part of it."""
    starts = boundaries[:-1]
    return boundaries[1:] - jnp.where(lax.broadcasted_iota(jnp.int32, starts.shape, 0) == 0, 0, starts)


def random_boundaries(seed: int, rows: int, groups: int) -> npt.NDArray[np.int32]:
    """Draws ascending boundaries; some groups are empty, and some rows belong to no group."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.integers(0, rows + 1, groups + 1)).astype(np.int32)


# ------------------------------------------------------------------------------
# The problems.

G = TypeVar("G", bound="GroupedProblem")


@dataclasses.dataclass(frozen=True)
class GroupedProblem(Problem):
    """What grouped products share.

    Attributes:
      rows: number of rows of all groups, and of no group.
      groups: number of groups.
      k, n: extents of a group's matrix.
      dtype: of the operands.
      out_dtype: of the result; "" means `dtype`, and is not allowed for 8-bit operands.
      distribution: the sizes of groups for which schedules are timed: one of `DISTRIBUTIONS`, or recorded sizes,
        256+0+128; "" means all of `DISTRIBUTIONS`.
    """

    rows: int
    groups: int
    k: int
    n: int
    dtype: str = "bfloat16"
    out_dtype: str = ""
    distribution: str = ""

    dtypes: ClassVar[tuple[str, ...]] = FLOATS

    def __post_init__(self) -> None:
        self._spell_dtypes()
        for name in ("rows", "groups", "k", "n"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        self._require("dtype", self.dtypes)
        given = RESULTS[self.dtype]
        self._require(
            "out_dtype", ("", *given) if self.dtype in given else given, f", which {self.dtype} operands give"
        )
        if self.out_dtype == self.dtype:
            object.__setattr__(self, "out_dtype", "")
        self.draws()
        super().__post_init__()

    @property
    def product(self) -> MatmulProblem:
        """The matmul of all rows with a single matrix."""
        return MatmulProblem(self.rows, self.n, self.k, self.dtype, out_dtype=self.out_dtype)

    @property
    def boundaries(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.groups + 1,), jnp.int32)

    def draws(self) -> tuple[npt.NDArray[np.int32], ...]:
        """Returns the boundaries for which schedules are timed; a schedule's time is their mean."""
        each = (self.distribution,) if self.distribution else DISTRIBUTIONS
        return tuple(boundaries_of(group_sizes(one, self.rows, self.groups)) for one in each)

    def variants(self, operands: Sequence[T]) -> tuple[tuple[T, ...], ...]:
        """Returns the operands with the boundaries of each of `draws`."""
        return tuple((*operands[:-1], cast("T", boundaries)) for boundaries in self.draws())

    @property
    def touched(self) -> float:
        """Returns the mean number of groups with rows, over `draws`."""
        return float(np.mean([np.count_nonzero(np.diff(each)) for each in self.draws()]))

    @property
    def used_rows(self) -> float:
        """Returns the mean number of rows in groups, over `draws`."""
        return float(np.mean([each[-1] - each[0] for each in self.draws()]))

    @property
    def flops(self) -> float:
        """Floating-point operations of the rows in groups, in the mean over `draws`."""
        return 2.0 * self.used_rows * self.k * self.n

    @property
    def bytes_moved(self) -> float:
        """Traffic of the rows in groups and of the matrices of groups with rows, in the mean over `draws`."""
        shares = {2: self.used_rows / self.rows, 3: self.touched / self.groups}
        read = sum(nbytes(s) * shares.get(len(s.shape), 1.0) for s in self.operands())
        return read + sum(map(nbytes, self.results()))

    def library_flops(self, platform: str) -> float:
        """Counts all rows for each matrix: XLA masks the rows of other groups (H100; it has kernels for TPUs only)."""
        return self.flops * (1 if platform == "tpu" else self.groups)

    @property
    def library_bytes_moved(self) -> float:
        """Counts the matrices of all groups, even of those without rows."""
        return float(sum(map(nbytes, (*self.operands(), *self.results()))))

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Draws standard normal operands, and boundaries at any row; for seed 0, the first of `draws`."""
        *operands, _ = super().inputs(seed)
        drawn = random_boundaries(seed, self.rows, self.groups) if seed else self.draws()[0]
        return *operands, jnp.asarray(drawn)

    def special(self) -> tuple[str, ...]:
        return self.product.special()

    def special_inputs(self, kind: str, seed: int) -> tuple[jax.Array, ...]:
        """Alters the operands (of integers the first one, so that sums are exact), and draws boundaries at any row."""
        *operands, _ = self.inputs(seed)
        altered = checking.with_special_values(operands[:1] if self.dtype == "int8" else operands, kind)
        return *altered, *operands[len(altered) :], jnp.asarray(random_boundaries(seed, self.rows, self.groups))

    def special_tolerance(self, kind: str) -> tuple[Tolerance, ...]:
        return dataclasses.replace(self.product, k=self._summed).special_tolerance(kind)

    def at_rows(self, rows: npt.NDArray[np.int32]) -> tuple[Problem, TakeRows] | None:
        def take(args: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            lhs, *matrices, boundaries = args
            kept = jnp.searchsorted(jnp.asarray(rows), boundaries).astype(boundaries.dtype)
            return jnp.take(lhs, rows, axis=0), *matrices, kept

        return self.resized(len(rows), self.k, self.n), take

    def resized(self: G, rows: int, k: int, n: int) -> G:
        """Returns this problem with other extents; recorded sizes are replaced by all of `DISTRIBUTIONS`."""
        kept = self.distribution if self.distribution in DISTRIBUTIONS else ""
        return dataclasses.replace(self, rows=rows, k=k, n=n, distribution=kept)

    @property
    def _summed(self) -> int:
        """Number of products that an element of the result adds."""
        return self.k

    def tolerance(self) -> Tolerance:
        """Returns the tolerance of a product with as many terms (`MatmulProblem.tolerance`)."""
        return dataclasses.replace(self.product, k=self._summed).tolerance()


@dataclasses.dataclass(frozen=True)
class RaggedDotProblem(GroupedProblem):
    """``out[row] = lhs[row] @ rhs[g]`` for the rows of each group g; rows of no group are zeros.

    Attributes:
      transpose_rhs: `rhs` is stored ``[groups, n, k]``.
    """

    transpose_rhs: bool = False

    dtypes = tuple(RESULTS)

    @classmethod
    def of(
        cls,
        lhs: Any,
        rhs: Any,
        boundaries: Any,
        *,
        transpose_rhs: bool = False,
        out_dtype: Any = "",
        distribution: str = "",
    ) -> RaggedDotProblem:
        """Returns the problem of ``lhs[rows, k]``, ``rhs[groups, k, n]`` and ``boundaries[groups + 1]``."""
        check(lhs, boundaries, rhs.shape[0] if rhs.ndim else 0)
        if rhs.ndim != 3 or lhs.shape[1] != rhs.shape[2 if transpose_rhs else 1]:
            raise ValueError(
                f"lhs {lhs.shape} and rhs {rhs.shape} are not [rows, k] and [groups, k, n] ({transpose_rhs=})"
            )
        if lhs.dtype != rhs.dtype:
            raise TypeError(f"lhs is {lhs.dtype} and rhs is {rhs.dtype}; one dtype is needed")
        (rows, k), n = lhs.shape, rhs.shape[1 if transpose_rhs else 2]
        out_dtype = out_dtype and str(jnp.dtype(out_dtype))
        return cls(rows, rhs.shape[0], k, n, str(lhs.dtype), out_dtype, distribution, transpose_rhs=transpose_rhs)

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns `lhs`, `rhs` and the boundaries."""
        dtype = jnp.dtype(self.dtype)
        matrix = (self.n, self.k) if self.transpose_rhs else (self.k, self.n)
        return (
            jax.ShapeDtypeStruct((self.rows, self.k), dtype),
            jax.ShapeDtypeStruct((self.groups, *matrix), dtype),
            self.boundaries,
        )

    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.rows, self.n), jnp.dtype(self.out_dtype or self.dtype))

    def reference(self, *args: jax.Array) -> jax.Array:
        """Computes in float32, where sums of integers are exact up to 2^24, as in `MatmulProblem.reference`."""
        lhs, rhs, boundaries = args
        out = by_blocks(lhs, functools.partial(_product_of_block, rhs, self.transpose_rhs), boundaries, self.n)
        return out.astype(jnp.int32) if self.out_dtype == "int32" else out

    def neighbour(self) -> RaggedDotProblem | None:
        below = self.product.neighbour()
        return None if below is None else self.resized(below.m, below.k, below.n)


@dataclasses.dataclass(frozen=True)
class GatedRaggedDotProblem(GroupedProblem):
    """``out[row] = activation(lhs[row] @ gate[g]) * (lhs[row] @ up[g])`` for the rows of each group g.

    Rows of no group are zeros.

    Attributes:
      transpose_rhs: `gate` and `up` are stored ``[groups, n, k]``.
      activation: a name in `epilogue.ACTIVATIONS`.
    """

    transpose_rhs: bool = False
    activation: str = "silu"

    def __post_init__(self) -> None:
        self._require("activation", tuple(epilogue.ACTIVATIONS))
        super().__post_init__()

    @classmethod
    def of(
        cls,
        lhs: Any,
        gate: Any,
        up: Any,
        boundaries: Any,
        *,
        transpose_rhs: bool = False,
        activation: str = "silu",
        out_dtype: Any = "",
        distribution: str = "",
    ) -> GatedRaggedDotProblem:
        """Returns the problem of ``lhs[rows, k]``, `gate` and `up` ``[groups, k, n]``, and the boundaries."""
        if gate.shape != up.shape or gate.dtype != up.dtype:
            raise ValueError(f"gate {gate.dtype}{gate.shape} and up {up.dtype}{up.shape} are not alike")
        how = {"transpose_rhs": transpose_rhs, "out_dtype": out_dtype, "distribution": distribution}
        return cls(**vars(RaggedDotProblem.of(lhs, gate, boundaries, **how)), activation=activation)

    @property
    def one(self) -> RaggedDotProblem:
        """The product of one of both factors."""
        return RaggedDotProblem(
            self.rows,
            self.groups,
            self.k,
            self.n,
            self.dtype,
            self.out_dtype,
            self.distribution,
            transpose_rhs=self.transpose_rhs,
        )

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns `lhs`, `gate`, `up` and the boundaries."""
        lhs, rhs, boundaries = self.one.operands()
        return lhs, rhs, rhs, boundaries

    def result(self) -> jax.ShapeDtypeStruct:
        return self.one.result()

    def reference(self, *args: jax.Array) -> jax.Array:
        lhs, gate, up, boundaries = args
        gate, up = (self.one.reference(lhs, x, boundaries) for x in (gate, up))
        return epilogue.apply(gate, activation=self.activation) * up

    def inputs(self, seed: int) -> tuple[jax.Array, ...]:
        """Scales `lhs` so that both products are standard normal."""
        lhs, *others = super().inputs(seed)
        return scaled(lhs, self.k**-0.5), *others

    @property
    def flops(self) -> float:
        return 2 * super().flops

    def neighbour(self) -> GatedRaggedDotProblem | None:
        below = self.one.neighbour()
        return None if below is None else self.resized(below.rows, below.k, below.n)

    def tolerance(self) -> Tolerance:
        """Returns the tolerance of a product of two factors that are standard normal, so at most 36."""
        one = dataclasses.replace(self.product, activation=self.activation).tolerance()
        return one.wider(12)

    def special_tolerance(self, kind: str) -> tuple[Tolerance, ...]:
        return (in_proportion(self.tolerance(), 1.0),)


@dataclasses.dataclass(frozen=True)
class RaggedDotWeightsProblem(GroupedProblem):
    """``out[g] = lhs[rows of g].T @ rhs[rows of g]``, the gradient of the matrices; zeros for an empty group.

    Rows of no group, and of other groups, do not contribute, even if they are NaN or infinite.
    """

    @classmethod
    def of(cls, lhs: Any, rhs: Any, boundaries: Any, *, out_dtype: Any = "") -> RaggedDotWeightsProblem:
        """Returns the problem of ``lhs[rows, k]``, ``rhs[rows, n]`` and ``boundaries[groups + 1]``."""
        check(lhs, boundaries, boundaries.shape[0] - 1 if boundaries.ndim else 0)
        if rhs.ndim != 2 or lhs.shape[0] != rhs.shape[0]:
            raise ValueError(f"lhs {lhs.shape} and rhs {rhs.shape} are not [rows, k] and [rows, n]")
        if lhs.dtype != rhs.dtype:
            raise TypeError(f"lhs is {lhs.dtype} and rhs is {rhs.dtype}; one dtype is needed")
        (rows, k), n = lhs.shape, rhs.shape[1]
        out_dtype = out_dtype and str(jnp.dtype(out_dtype))
        return cls(rows, boundaries.shape[0] - 1, k, n, str(lhs.dtype), out_dtype)

    def operands(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Returns `lhs`, `rhs` and the boundaries."""
        dtype = jnp.dtype(self.dtype)
        return (
            jax.ShapeDtypeStruct((self.rows, self.k), dtype),
            jax.ShapeDtypeStruct((self.rows, self.n), dtype),
            self.boundaries,
        )

    def result(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.groups, self.k, self.n), jnp.dtype(self.out_dtype or self.dtype))

    @property
    def _summed(self) -> int:
        return self.rows

    def at_rows(self, rows: npt.NDArray[np.int32]) -> tuple[Problem, TakeRows]:
        """Takes rows of each matrix, which are columns of `lhs`."""

        def take(args: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
            lhs, rhs, boundaries = args
            return jnp.take(lhs, rows, axis=1), rhs, boundaries

        return self.resized(self.rows, len(rows), self.n), take

    def reference(self, *args: jax.Array) -> jax.Array:
        """Adds blocks of rows of one group each, in float32."""
        lhs, rhs, boundaries = args
        rows, valid, group = blocks(boundaries, self.rows)

        def step(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
            rows, valid, group = block
            parts = [jnp.where(valid[:, None], x[rows], 0).astype(jnp.float32) for x in (lhs, rhs)]
            product = jnp.dot(parts[0].T, parts[1], precision=lax.Precision.HIGHEST)
            return total.at[group].add(product, mode="drop"), None

        total, _ = lax.scan(step, jnp.zeros(self.result().shape, jnp.float32), (rows, valid, group))
        return total

    def neighbour(self) -> RaggedDotWeightsProblem | None:
        below = self.product.neighbour()
        return None if below is None else self.resized(below.m, below.k, below.n)


def check(lhs: Any, boundaries: Any, groups: int) -> None:
    """Raises a ValueError if `lhs` is no matrix, or `boundaries` are not ``int32[groups + 1]``."""
    if lhs.ndim != 2:
        raise ValueError(f"lhs has shape {lhs.shape}, not [rows, k]")
    if boundaries.shape != (groups + 1,) or boundaries.dtype != jnp.int32:
        raise ValueError(f"boundaries are int32[{groups + 1}], not {boundaries.dtype}{list(boundaries.shape)}")


# ------------------------------------------------------------------------------
# The reference: blocks of rows, each of a single group.


def blocks(boundaries: jax.Array, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits the rows of each group into blocks: the rows of each block, which of them count, and its group.

    The number of blocks is that for any boundaries; superfluous blocks have no rows, and the number of groups as group.
    """
    groups = boundaries.shape[0] - 1
    counts = (jnp.diff(boundaries) + BLOCK - 1) // BLOCK
    ends = jnp.cumsum(counts)
    block = jnp.arange(-(-rows // BLOCK) + groups)
    group = jnp.searchsorted(ends, block, side="right")
    inside = jnp.minimum(group, groups - 1)
    first = boundaries[inside] + (block - (ends - counts)[inside]) * BLOCK
    each = first[:, None] + jnp.arange(BLOCK)
    valid = (each < boundaries[inside + 1][:, None]) & (group < groups)[:, None]
    return jnp.where(valid, each, rows - 1), valid, group


def by_blocks(lhs: jax.Array, product: Any, boundaries: jax.Array, n: int) -> jax.Array:
    """Computes ``product(rows of a block, group)`` in float32 for all blocks; rows of no group are zeros."""
    rows, valid, group = blocks(boundaries, lhs.shape[0])

    def step(out: jax.Array, block: Any) -> tuple[jax.Array, None]:
        rows, valid, group = block
        found = product(lhs[rows], group)
        return out.at[jnp.where(valid, rows, lhs.shape[0])].set(found, mode="drop"), None

    out, _ = lax.scan(step, jnp.zeros((lhs.shape[0], n), jnp.float32), (rows, valid, group))
    return out


def _product_of_block(rhs: jax.Array, transpose_rhs: bool, lhs: jax.Array, group: jax.Array) -> jax.Array:
    matrix = checking.widened(rhs[jnp.minimum(group, rhs.shape[0] - 1)])
    matrix = matrix.T if transpose_rhs else matrix
    return jnp.dot(checking.widened(lhs), matrix, precision=lax.Precision.HIGHEST)


__all__: Sequence[str] = ("GatedRaggedDotProblem", "GroupedProblem", "RaggedDotProblem", "RaggedDotWeightsProblem")


def covering(boundaries: jax.Array, rows: int) -> jax.Array:
    """Adds two groups to `boundaries`: the rows before the first and after the last of all groups."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), boundaries, jnp.full(1, rows, jnp.int32)])
