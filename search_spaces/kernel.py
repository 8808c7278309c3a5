"""What a tuner may ask of a kernel: what it supports, its space of schedules, what each demands, and to run one."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar

import jax
import numpy as np

from search_spaces.errors import DeclarationError
from search_spaces.footprint import Footprint, Operand, Phase
from search_spaces.problem import Problem, Tolerance, as_tuple, nbytes
from search_spaces.space import Column, Columns, Space, of_each, one_truth_value, round_up

# Elements of an array that indices of 32 bits reach.
INDICES_OF_32_BITS = 2**31 - 1

P = TypeVar("P", bound=Problem)
S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class Target:
    """The chip a kernel is asked about: what changes which code can run, and nothing about how much of it fits.

    Attributes:
      platform: JAX's name of the backend: "cpu", "cuda", "tpu".
      kind: the device's own name, such as "NVIDIA H200".
      architecture: "sm_90", "cpu": what machine code it runs.
      cores: streaming multiprocessors, tensor cores: how many blocks a persistent grid starts.
    """

    platform: str
    kind: str
    architecture: str
    cores: int


class Kernel(abc.ABC, Generic[P, S]):
    """One operation on one backend.

    Attributes:
      backend: what JAX calls it: "mosaic_gpu", "xla", ...
      version: raise it when the code changes what it computes or how fast; older answers are then forgotten. 0 leaves
        that to the program: a record keeps a fingerprint of each schedule's jaxpr and of the reference's, and answers
        as long as both are the same (`search_spaces.fingerprint`).
      library: this is the XLA implementation, the answer to beat: a program or two, nothing to prune.
      taken_apart: within a function XLA may not fuse what it fuses alone, so that a tie goes to another kernel.
      vendor: the library of the chip's vendor that this calls ("cuDNN"), "" for none: with XLA's, what "pallas" leaves
        out.
      most_elements: of the largest array (`largest_array`) that the kernel's indices reach, None without a bound: what
        is larger it does not support.
      verified_on: architectures on which this version has been checked on a device; elsewhere an answer that was
        not measured is never taken from it (see `verified`).
    """

    backend: ClassVar[str]
    version: ClassVar[int] = 1
    library: ClassVar[bool] = False
    taken_apart: ClassVar[bool] = False
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
        """None, or the reason in words why this kernel cannot do `problem` on `target`.

        Whoever asks gets a `DeclarationError` where it is anything else. Arrays above `most_elements` need no reason of
        a kernel's own.
        """
        return None

    def largest_array(self, problem: P) -> int:
        """Elements of the largest array that any schedule reads or writes in device memory, padding included."""
        return max(s.size for s in (*problem.operands(), *problem.results()))

    @abc.abstractmethod
    def space(self, problem: P, target: Target) -> Space[S]:
        """The schedules worth considering. Names no capacity of a chip: what fits is the footprint's matter."""

    @abc.abstractmethod
    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint | None:
        """What one launch of each of `schedules` demands.

        None where that is not known of any: nothing is then pruned by it, and the model ranks none before another.
        """

    def verified(self, problem: P, schedules: Columns, target: Target) -> Column | bool:
        """Which of `schedules` were among those checked on a device of this architecture; by default all or none.

        A part of the space that is newer than the check is left out here: a search, which verifies each candidate
        itself, tries it, and an answer that was not measured is not taken from it.
        """
        return target.architecture in self.verified_on

    def tolerance(self, problem: P, schedule: S) -> Tolerance | tuple[Tolerance, ...]:
        """How far from the reference the answer of `schedule` may be: the problem's tolerance, whoever computes it.

        A library kernel has a wider one for a program that users would otherwise run themselves.
        """
        return problem.tolerance()

    @abc.abstractmethod
    def run(self, problem: P, schedule: S, target: Target, /, *args: Any, **params: Any) -> Any:
        """Compute: traceable, arguments as in `problem.operands()`. `schedule` is a legal point of `space`.

        Returns:
          An array, or a tuple of them, as in `problem.result()`.
        """

    def results(self, problem: P, schedule: S, target: Target, /, *args: Any, **params: Any) -> tuple[jax.Array, ...]:
        """What `run` returns, always as a tuple."""
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
    """Why an array is too large for the kernel's indices, or None."""
    if kernel.most_elements is None or (elements := kernel.largest_array(problem)) <= kernel.most_elements:
        return None
    return f"its indices reach {kernel.most_elements} elements of an array, not {elements}"


def padded_elements(arrays: Iterable[jax.ShapeDtypeStruct], axis: int, multiple: int) -> int:
    """Elements of the largest of arrays whose `axis` is padded to a multiple of so many."""
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
      program: "float32", where accumulators and epilogue are rounded once; or "plain", what users write, in the dtype
        of the operands.
    """

    program: str = "float32"


class LibraryKernel(Kernel[P, Library]):
    """The XLA implementation as one more backend, whose schedules are its programs."""

    backend = "xla"
    library = True

    def programs(self, problem: P) -> tuple[str, ...]:
        """Those there are for `problem`; `Library`'s default, the first, answers where nothing was measured.

        A search tries them all before anything else.
        """
        return (Library.program,)

    def space(self, problem: P, target: Target) -> Space[Library]:
        return Space(Library, {"program": self.programs(problem)})

    def footprint(self, problem: P, schedules: Columns, target: Target) -> Footprint:
        """What is visible from outside: the whole problem as one block that moves only the compulsory bytes."""
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
