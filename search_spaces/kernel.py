"""The interface of a kernel: what it supports, its space of schedules, their footprint, and how to run one."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar

import jax
import numpy as np

from search_spaces.bindings import epoch
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.problem import Problem, Tolerance, as_tuple, nbytes
from search_spaces.space import Column, Columns, DeclarationError, Space, of_each, one_truth_value, round_up
from search_spaces.target import Target

# From 0.11 on, JAX keeps the trace of a Pallas kernel function, with the values of the globals that it read. It traces
# again for another value of this context: the problem; the schedule as text, which tells 0.0 from -0.0; and the number
# of reloads.
_traced_for: Any = jax.make_user_context(None)
# Number of array elements that 32-bit indices reach.
INDICES_OF_32_BITS = 2**31 - 1

P = TypeVar("P", bound=Problem)
S = TypeVar("S")


class Kernel(abc.ABC, Generic[P, S]):
    """One operation on one backend.

    Attributes:
      backend: JAX's name of the backend: "mosaic_gpu", "xla", ...
      version: increase it when the code changes its results or its speed; older records are then ignored. 0 derives it
        from the program: a record keeps fingerprints of each schedule's jaxpr and of the reference's, and is used while
        both are unchanged (`search_spaces.fingerprint`).
      library: whether this is the XLA implementation, the baseline: one or two programs, nothing to prune.
      loses_ties: XLA may not fuse this kernel within a function as it does alone, so a tie goes to another kernel.
      vendor: the library of the chip's vendor that this kernel calls ("cuDNN"), "" for none. "pallas" excludes these
        kernels, as it does XLA's.
      most_elements: limit of the kernel's indices on the elements of the largest array (`largest_array`); None if there
        is none. Problems with larger arrays are not supported.
      verified_on: architectures on which this version has been checked on a device. Elsewhere the kernel is selected
        only if the problem or a near one was measured (see `verified`).
    """

    backend: ClassVar[str]
    version: ClassVar[int] = 1
    library: ClassVar[bool] = False
    loses_ties: ClassVar[bool] = False
    vendor: ClassVar[str] = ""
    most_elements: ClassVar[int | None] = None
    verified_on: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # What a kernel says is checked where it is said: it is asked in many places.
        for name, checked in (("supports", _in_words), ("footprint", _of_many), ("verified", _of_many)):
            if name in vars(cls):
                setattr(cls, name, checked(vars(cls)[name]))

    def supports(self, problem: P, target: Target) -> str | None:
        """Returns None, or the reason why this kernel cannot run `problem` on `target`.

        Any other return value raises a `DeclarationError` in the caller. A kernel needs no check of its own for arrays
        above `most_elements`.
        """
        return None

    def require_results(self, problem: P, target: Target) -> None:
        """Raises a `DeclarationError` if no schedule returns what the problem asks for.

        A call asks this on a cache miss. A search does not: it traces schedules in its workers.
        """
        return

    def largest_array(self, problem: P) -> int:
        """Returns the elements of the largest array that any schedule accesses in device memory, padding included."""
        return max(s.size for s in (*problem.operands(), *problem.results()))

    @abc.abstractmethod
    def space(self, problem: P, target: Target) -> Space[S]:
        """Returns the schedules worth considering.

        The space does not depend on the capacity of a chip: the footprint decides what fits.
        """

    @abc.abstractmethod
    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint | None:
        """Returns the resource demands of one launch of each of `schedules`.

        None if they are not known for any: no schedule is then pruned by its footprint, and the model ranks none.
        """

    def verified(self, problem: P, schedules: Columns, target: Target) -> Column | bool:
        """Returns which of `schedules` were checked on a device of this architecture; by default all or none.

        A part of the space that is newer than the check is excluded here. A search tries its schedules, because it
        verifies each candidate itself. Without a measurement they are not selected.
        """
        return target.architecture in self.verified_on

    def tolerance(self, problem: P, schedule: S) -> Tolerance | tuple[Tolerance, ...]:
        """Returns the allowed error of the result of `schedule`: by default the problem's tolerance.

        A library kernel allows more for a program that users would otherwise run themselves.
        """
        return problem.tolerance()

    @abc.abstractmethod
    def run(self, problem: P, schedule: S, target: Target, /, *args: Any, **params: Any) -> Any:
        """Computes the result. Traceable; arguments as in `problem.operands()`. `schedule` is a legal point of `space`.

        Returns:
          An array, or a tuple of them, as in `problem.result()`.
        """

    def results(self, problem: P, schedule: S, target: Target, /, *args: Any, **params: Any) -> tuple[jax.Array, ...]:
        """Returns the results of `run`, always as a tuple.

        A kernel is traced without `jax.default_matmul_precision`: its products have the precision that it declares, and
        compilers of kernels refuse others. The library is XLA's program of the caller, and keeps that setting.
        """
        precision = contextlib.nullcontext() if self.library else jax.default_matmul_precision(None)
        with _traced_for((problem, repr(schedule), epoch())), precision:
            return as_tuple(self.run(problem, schedule, target, *args, **params))


def _in_words(supports: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(supports)
    def checked(self: Kernel[Any, Any], *args: Any, **kwargs: Any) -> str | None:
        answer = supports(self, *args, **kwargs)
        if answer is None:
            return _beyond(self, *args, **kwargs)
        if isinstance(answer, str) and answer:
            return answer
        raise DeclarationError(
            f"{type(self).__name__}.supports returned {answer!r}: it returns None where the kernel can do the problem, "
            "and else the reason in words"
        )

    return checked


def _beyond(kernel: Kernel[Any, Any], problem: Problem, target: Target) -> str | None:
    """Returns why an array is too large for the kernel's indices, or None."""
    if kernel.most_elements is None or (elements := kernel.largest_array(problem)) <= kernel.most_elements:
        return None
    return f"its indices reach {kernel.most_elements} elements of an array, not {elements}"


def padded_elements(arrays: Iterable[jax.ShapeDtypeStruct], axis: int, multiple: int) -> int:
    """Returns the elements of the largest array, with `axis` of each padded to a multiple of `multiple`."""
    return max(s.size // s.shape[axis] * round_up(s.shape[axis], multiple) for s in arrays)


def _of_many(declared: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(declared)
    def checked(self: Kernel[Any, Any], problem: Any, schedules: Columns, target: Target) -> Any:
        with one_truth_value(f"{type(self).__name__}.{declared.__name__}"):
            return of_each(lambda points: declared(self, problem, points, target), schedules)

    return checked


@dataclasses.dataclass(frozen=True)
class Library:
    """The schedule of a library kernel: which program XLA compiles.

    Attributes:
      program: "float32", which rounds accumulators and epilogue once; or "plain", the program that users write, in the
        dtype of the operands.
    """

    program: str = "float32"


class LibraryKernel(Kernel[P, Library]):
    """The XLA implementation as a backend; its schedules are its programs."""

    backend = "xla"
    library = True

    def programs(self, problem: P) -> tuple[str, ...]:
        """Returns the programs for `problem`; the first, `Library`'s default, is used if nothing was measured.

        A search tries them all before any other candidate.
        """
        return (Library.program,)

    def space(self, problem: P, target: Target) -> Space[Library]:
        return Space(Library, {"program": self.programs(problem)})

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        """Returns the whole problem as one block that moves only the compulsory bytes."""
        one, written = np.ones(len(schedules)), sum(map(nbytes, problem.results()))
        return Footprint(
            arithmetic=problem.arithmetic,
            grid=(one,),
            step=Phase(
                loads=(Operand(bytes=one * (problem.bytes_moved - written), axes=(0,)),),
                flops=one * problem.flops,
            ),
            tile=Phase(bytes_written=one * written),
            onchip_bytes=np.zeros(len(schedules), dtype=np.int64),
        )
