"""Row operations: the formula as hooks, kernels of any formula by XLA and by the interpreter, and `row_operation`.

The reduced row is `Reduction.prologue` of the operands that are rows; it may itself be a result.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Library, LibraryKernel
from search_spaces.operation import Operation
from search_spaces.problem import Tolerance, as_tuple, nbytes
from search_spaces.rowwise.problem import RowProblem, batch, bind_rows, shard
from search_spaces.space import Columns, Space
from search_spaces.target import Target

Statistics = tuple[jax.Array, ...]


class Reducer(Protocol):
    """Reduces parts of a row: threads with their elements, or warps with a partial result each."""

    def max(self, parts: jax.Array, /) -> jax.Array: ...
    def sum(self, parts: jax.Array, /) -> jax.Array: ...
    def broadcast(self, reduced: jax.Array, /) -> jax.Array: ...


class Reduction(abc.ABC):
    """The formula, in float32, on fragments of a row: arrays of one shape, with elements distributed over threads.

    A row in registers is computed by `whole_row` at once. For a row that arrives in chunks, each thread keeps
    statistics. They start as `init`, and `update` adds fragments. `reduce` merges the statistics of several threads,
    `combine` those of two parts of a row, and `finalize` completes those of the whole row. When the chunks are read
    again, `apply` computes the results. A `shared` fragment holds the matching elements of an operand that all rows
    share, such as a weight; None if there is no such operand.

    Attributes:
      identity: an element that changes no statistic.
      init: initial value of each statistic.
    """

    identity: ClassVar[float]
    init: ClassVar[tuple[float, ...]]

    @classmethod
    def of(cls, problem: Any, **params: Any) -> Self:
        """Returns the formula of a problem and of the parameters of a call; by default it depends on neither."""
        return cls()

    def prologue(self, *operands: jax.Array) -> jax.Array:
        """Returns the row to reduce, from fragments of the operands that are rows, in their dtype in memory.

        It may be computed again where it is needed again. By default it is the only operand.
        """
        (x,) = operands
        return x

    @abc.abstractmethod
    def whole_row(
        self,
        fragments: Sequence[jax.Array],
        masked: Sequence[jax.Array],
        shared: Sequence[jax.Array | None],
        reducer: Reducer,
    ) -> list[jax.Array]:
        """Returns the results of all `fragments` of a row.

        `masked` are the fragments with `identity` in place of elements that another fragment has, too.
        """

    @abc.abstractmethod
    def update(self, statistics: Statistics, fragments: Sequence[jax.Array]) -> Statistics:
        """Returns the statistics with the elements of `fragments` added."""

    @abc.abstractmethod
    def reduce(self, statistics: Statistics, reducer: Reducer) -> Statistics:
        """Merges the statistics of all threads or warps of the reducer."""

    @abc.abstractmethod
    def combine(self, one: Statistics, other: Statistics) -> Statistics:
        """Merges the statistics of two parts of a row."""

    @abc.abstractmethod
    def finalize(self, statistics: Statistics) -> Statistics:
        """Returns the values of the whole row that `apply` needs."""

    @abc.abstractmethod
    def apply(self, fragment: jax.Array, shared: jax.Array | None, final: Statistics) -> jax.Array:
        """Returns the results of one fragment."""


# ------------------------------------------------------------------------------
# The formula of a kernel on rows of two halves, in which elements are independent.


class HalvesFormula(abc.ABC):
    """A formula on elements at the same position of several halves.

    Attributes:
      read: the halves that are loaded, in the order of `compute`: the operand's number, and whether it is the second
        half of its rows. An operand with as many columns as the problem only has a first half.
      written: whether each half of the only result that is written is the second.
    """

    read: ClassVar[tuple[tuple[int, bool], ...]]
    written: ClassVar[tuple[bool, ...]]

    @abc.abstractmethod
    def compute(self, *halves: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the halves in `written` from those in `read`, in float32."""


# ------------------------------------------------------------------------------
# A row-wise formula as XLA fuses it, in float32 and as users write it: the baseline, and a legal fallback.

P = TypeVar("P", bound=RowProblem)


def rounded_at_each_step(problem: RowProblem) -> Any:
    """Returns the tolerance of a formula computed in the dtype of its operands.

    The exponent of a softmax of normally distributed values reaches 9 below the maximum, and is off by half an eps of
    that.
    """
    exact: tuple[Tolerance, ...] = as_tuple(problem.tolerance())
    return problem.pack([Tolerance(absolute=8 * each.absolute, relative=8 * each.relative) for each in exact])


class XlaRows(LibraryKernel[P], Generic[P]):
    """The formula in float32, and the program that users write.

    Attributes:
      plain: the program that users write, on operands of their dtype; None if that is the formula in float32, too.
    """

    version = 1

    def __init__(self, plain: Callable[..., jax.Array] | None = None) -> None:
        self.plain = plain

    def programs(self, problem: P) -> tuple[str, ...]:
        narrow = problem.dtype != "float32"
        return (Library.program, "plain") if narrow and self.plain is not None else (Library.program,)

    def tolerance(self, problem: P, schedule: Library) -> Any:
        """Returns the problem's tolerance; for "plain", one that allows rounding at each step, as users' code does."""
        return rounded_at_each_step(problem) if schedule.program == "plain" else problem.tolerance()

    def run(self, problem: P, schedule: Library, target: Target, /, *args: Any, **params: Any) -> Any:
        if schedule.program == "plain" and self.plain is not None:
            return self.plain(*args, **params)
        results = as_tuple(problem.compute_in(jnp.float32, *args, **params))
        return problem.pack([x.astype(s.dtype) for x, s in zip(results, problem.results(), strict=True)])


# ------------------------------------------------------------------------------
# A row-wise formula as a plain ``pallas_call`` on blocks of rows, run by Pallas's interpreter on a CPU.


@dataclasses.dataclass(frozen=True)
class InterpretedSchedule:
    """Rows per block; a block has whole rows."""

    rows: int


class InterpretedRows(Kernel[P, InterpretedSchedule], Generic[P]):
    """Operands with one row per result row are divided into blocks; other operands are whole in each block."""

    backend = "interpret"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: P, target: Target) -> str | None:
        return None if target.platform == "cpu" else f"runs in Pallas's interpreter on a CPU, not on {target.kind}"

    def space(self, problem: P, target: Target) -> Space[InterpretedSchedule]:
        p = problem
        # An interpreted grid step takes about a millisecond, regardless of its work.
        few = [rows for rows in (1, 4, 16, 64, 256, 1024) if rows < p.rows <= 1024 * rows]
        return Space(InterpretedSchedule, choices={"rows": (p.rows, *reversed(few))})

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        blocks = -(-p.rows // s.rows)
        by_rows = [x for x in p.operands() if _in_rows(x)]
        whole = [x for x in p.operands() if not _in_rows(x)]
        row_bytes = sum(x.shape[1] * x.dtype.itemsize for x in by_rows)
        whole_bytes = sum(x.size * x.dtype.itemsize for x in whole)
        result_bytes = sum(map(nbytes, p.results())) // p.rows
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(blocks,),
            step=Phase(
                loads=(
                    Operand(bytes=p.rows / blocks * row_bytes, axes=(0,)),
                    Operand(bytes=np.full(len(s), float(whole_bytes)), axes=()),
                ),
                flops=p.flops / p.rows * s.rows,
            ),
            tile=Phase(bytes_written=p.rows / blocks * result_bytes),
            axes=("rows",),
            onchip_bytes=s.rows * (row_bytes + result_bytes) + whole_bytes,
        )

    def run(self, problem: P, schedule: InterpretedSchedule, target: Target, /, *args: Any, **params: Any) -> Any:
        p, s = problem, schedule

        def body(*refs: Any) -> None:
            operands, outs = refs[: len(args)], refs[len(args) :]
            results = p.compute_in(jnp.float32, *(ref[...] for ref in operands), **params)
            for out, result in zip(outs, as_tuple(results), strict=True):
                out[...] = result.astype(out.dtype)

        def some_rows(x: Any) -> pl.BlockSpec:
            return pl.BlockSpec((s.rows, *x.shape[1:]), lambda i: (i, *(0 for _ in x.shape[1:])))

        def block(x: Any) -> pl.BlockSpec:
            return some_rows(x) if _in_rows(x) else pl.BlockSpec(x.shape, lambda i: (0,) * len(x.shape))

        return pl.pallas_call(
            body,
            grid=(-(-p.rows // s.rows),),
            in_specs=[block(x) for x in p.operands()],
            out_specs=p.pack([some_rows(x) for x in p.results()]),
            out_shape=p.result(),
            interpret=True,
        )(*args)


def _in_rows(operand: jax.ShapeDtypeStruct) -> bool:
    return len(operand.shape) == 2


# ------------------------------------------------------------------------------
# The operation of a row-wise formula.


def row_operation(
    name: str, problem: type[P], *kernels: Kernel[P, Any], library: XlaRows[P] | None = None, **rules: Any
) -> Operation[P]:
    """Returns the operation of `problem`, which needs no more than the formula `RowProblem.compute`.

    Args:
      name: as in `Operation`.
      problem: the type of its problems.
      kernels: kernels for GPUs and TPUs, in addition to the interpreted kernel and XLA's.
      library: XLA's kernel; None computes the formula in float32 only.
      rules: fields of `Operation`. By default, a batch becomes more rows, devices divide the rows, and a call takes
        arrays with any leading axes and the `params`.
    """
    fields: dict[str, Any] = {
        "batch": batch,
        "shard": shard,
        "front_end": functools.partial(bind_rows, problem),
    } | rules
    return Operation(name, problem, (*kernels, InterpretedRows(), library or XlaRows()), **fields)
