"""Named operations: their problems, the competing kernels, and how users call and differentiate them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, overload

import jax.numpy as jnp

from search_spaces import value_of
from search_spaces.exact import exact
from search_spaces.kernel import Kernel
from search_spaces.problem import Problem
from search_spaces.sharding import Sharding
from search_spaces.space import meant, unknown

P = TypeVar("P", bound=Problem)


class Params(tuple[tuple[str, Any], ...]):
    """Names and values that a kernel takes besides arrays, and that change no schedule; compared by `exact`."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Params) and exact(tuple(self)) == exact(tuple(other))

    def __ne__(self, other: object) -> bool:  # that of a tuple is its own
        return not self == other

    def __hash__(self) -> int:
        return hash(exact(tuple(self)))


NO_PARAMS = Params()


@dataclasses.dataclass(frozen=True)
class BoundCall(Generic[P]):
    """A call in the form that kernels take.

    Attributes:
      problem: the problem of the call.
      operands: arrays or tracers, shaped as ``problem.operands()``, or with several axes in place of one
        (`front_end.split_axes`).
      restore: ``restore(*results)`` is the caller's result; None is `Problem.pack`, the results unchanged.
      params: arguments of `Kernel.run` besides arrays.
    """

    problem: P
    operands: tuple[Any, ...]
    restore: Callable[..., Any] | None = None
    params: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class MatchedEquation(Generic[P]):
    """The problem that an equation of a jaxpr computes, known by shapes alone.

    Attributes:
      problem: the problem.
      operands: ``operands(*inputs)`` converts the equation's operands to the problem's.
      restore: ``restore(*results)`` converts the problem's results to the equation's.
      params: parameters of the call, such as the scale of logits.
    """

    problem: P
    operands: Callable[..., tuple[Any, ...]]
    restore: Callable[..., tuple[Any, ...]]
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Unsupported:
    """A call that no problem describes, which falls back to the library.

    Attributes:
      reason: the reason, as text.
      answer: computes the call by plain XLA. Arguments that JAX rejects raise JAX's own error there.
    """

    reason: str
    answer: Callable[[], Any]


class KernelName(NamedTuple):
    """A kernel that is imported when its platform, or all kernels, are needed: a back end takes long to import.

    Attributes:
      backend: its `Kernel.backend`. Its `Kernel.version` is not 0, and it is no library kernel.
      platform: the only platform on which it supports problems.
      place: its class, as ``package.module:CLASS``.
    """

    backend: str
    platform: str
    place: str


class Kernels(Sequence[Kernel[P, Any]]):
    """Kernels, of which those declared by name are imported when they are first accessed.

    Attributes:
      declared: the kernels, and the names of others.
    """

    def __init__(self, *declared: Kernel[P, Any] | KernelName) -> None:
        self.declared = declared

    def __len__(self) -> int:
        return len(self.declared)

    def __iter__(self) -> Iterator[Kernel[P, Any]]:
        return map(_imported, self.declared)

    @overload
    def __getitem__(self, index: int) -> Kernel[P, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Kernel[P, Any], ...]: ...
    def __getitem__(self, index: int | slice) -> Kernel[P, Any] | tuple[Kernel[P, Any], ...]:
        return (
            tuple(map(_imported, self.declared[index])) if isinstance(index, slice) else _imported(self.declared[index])
        )


def _imported(kernel: Kernel[P, Any] | KernelName) -> Kernel[P, Any]:
    return _made(kernel.place) if isinstance(kernel, KernelName) else kernel


@functools.cache
def _made(place: str) -> Any:
    return value_of(place)()


def _running_module() -> str:
    """Returns the name of the module whose top-level code is running in this thread, or ""."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


@dataclasses.dataclass(frozen=True, eq=False)
class Operation(Generic[P]):
    """A named operation: its problems, and the kernels that compete to solve them.

    The rules below use `call`, which makes a tuned call: ``call(problem, *args)`` of this operation,
    ``call(operation, problem, *args, **params)`` of another operation, tuned and cached under the other's name. Values
    that correspond to results (results, tangents, cotangents) are one array, or a tuple if `Problem.result` is a tuple.
    A zero tangent or cotangent is None, as an argument and as a result. ``call.params`` are the call's params by name,
    for a formula in the rule or another operation. If a front end or `batch` passes several axes in place of one that
    `shard` names (`front_end.split_axes`), all rules get arrays with these axes, and results have them.

    Attributes:
      name: the name in a cache and on a command line.
      problem: the type of its problems.
      kernels: one per backend, exactly one of them a library kernel; `Kernels` if some are declared by name.
      params: names of arguments of `Kernel.run` that are not arrays and change no schedule (an epsilon, a scale).
      jvp: ``jvp(call, problem, primals, tangents) -> (result, tangent)``. Default: the library kernel's derivative.
      transpose: ``transpose(call, problem, cotangent, args) -> cotangents``, if the operation is linear in the
        arguments given as None. Default: not transposable (its `jvp` then must not need it).
      vjp_params: names of arguments that are not arrays and that only `vjp_fwd` and `vjp_bwd` take; no kernel gets
        them.
      batch: ``batch(call, problem, args, dims) -> (result, dim)``: one call that replaces a vmapped one; an argument
        whose dim is None is not batched. Returns None if one call cannot do it. Default, and fallback: one call for
        each element of the batch, in sequence.
      vjp_fwd: ``vjp_fwd(call, problem, args) -> (result, residuals)``: the result, and any pytree of arrays that the
        backward pass needs. Used with `vjp_bwd`, in place of `jvp` and `transpose`.
      vjp_bwd: ``vjp_bwd(call, problem, residuals, cotangent) -> cotangents``, one for each argument. `vjp_fwd` and
        `vjp_bwd` form a `jax.custom_vjp`: forward mode raises its TypeError, and zero cotangents are arrays of zeros.
        Calls of the same operation within `vjp_fwd` have the library kernel's derivative (for a Hessian).
        ``call.params`` includes `vjp_params`.
      front_end: ``front_end(*args, **options)`` -> `BoundCall` or `Unsupported`: a call as users write it; options are
        keyword-only, and ``**options`` itself means `params`. Default: see `bind`.
      equations: JAX primitives whose equations the operation can replace: ``posed(*inputs, stored=None, **params)`` ->
        `MatchedEquation`, or the reason why not. `inputs` have shapes and dtypes. `stored` has, for each input and for
        the result, the order of its axes in memory; None if it is the axes' own order.
      regions: ``regions(graph)`` -> for each part of a `recognise.Graph` that calls of this operation can replace a
        `recognise.Region`, and for each that only looks so a `recognise.Left`.
      regions_last: whether `regions` is called after the regions of other operations have become calls. Its regions
        have one stage each, and only `scheduler.optimize` replaces them.
      shard: ``shard(problem)`` -> `Sharding`: how the devices of a mesh may divide the problem; None if they may not.
        Default: None for any problem; the library, which XLA partitions itself, is then used.
      module: the name of the module or script whose import creates the operation, where `search_spaces.locate` looks
        for it.

    Raises:
      ValueError: no library kernel or two, two kernels of one backend, or rules that exclude each other.
    """

    name: str
    problem: type[P]
    kernels: Sequence[Kernel[P, Any]]
    params: tuple[str, ...] = ()
    vjp_params: tuple[str, ...] = ()
    jvp: Callable[..., Any] | None = None
    transpose: Callable[..., Any] | None = None
    batch: Callable[..., Any] | None = None
    vjp_fwd: Callable[..., Any] | None = None
    vjp_bwd: Callable[..., Any] | None = None
    front_end: Callable[..., BoundCall[P] | Unsupported] | None = None
    equations: Mapping[Any, Callable[..., MatchedEquation[P] | str]] = dataclasses.field(default_factory=dict)
    regions: Callable[[Any], Any] | None = None
    regions_last: bool = False
    shard: Callable[[P], Sharding[P] | None] | None = None
    module: str = dataclasses.field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "module", _running_module())
        libraries = [kernel.backend for kernel in self._declared if isinstance(kernel, Kernel) and kernel.library]
        if len(libraries) != 1:
            raise ValueError(f"operation {self.name!r} needs exactly one library kernel, found {libraries or 'none'}")
        if len(set(self.backends)) != len(self._declared):
            raise ValueError(f"operation {self.name!r} has two kernels of one backend: {', '.join(self.backends)}")
        if (self.vjp_fwd is None) != (self.vjp_bwd is None):
            raise ValueError(f"operation {self.name!r} has one of vjp_fwd and vjp_bwd, which belong together")
        if self.vjp_fwd is not None and (self.jvp is not None or self.transpose is not None):
            raise ValueError(f"operation {self.name!r} has a vjp, which takes the place of jvp and transpose")

    def __repr__(self) -> str:  # part of each call in a printed jaxpr
        return self.name

    @functools.cached_property
    def _declared(self) -> tuple[Kernel[P, Any] | KernelName, ...]:
        return self.kernels.declared if isinstance(self.kernels, Kernels) else tuple(self.kernels)

    @functools.cached_property
    def backends(self) -> tuple[str, ...]:
        return tuple(kernel.backend for kernel in self._declared)

    @functools.cached_property
    def library(self) -> Kernel[P, Any]:
        return next(kernel for kernel in self._declared if isinstance(kernel, Kernel) and kernel.library)

    @property
    def by_program(self) -> tuple[Kernel[P, Any], ...]:
        """The kernels whose version is their program (`Kernel.version` 0)."""
        return tuple(kernel for kernel in self._declared if isinstance(kernel, Kernel) and kernel.version == 0)

    def kernels_on(self, platform: str) -> tuple[Kernel[P, Any], ...]:
        """Returns the kernels that may support a problem on `platform`, without importing others."""
        return tuple(_imported(k) for k in self._declared if isinstance(k, Kernel) or k.platform == platform)

    def kernel(self, backend: str) -> Kernel[P, Any]:
        """Returns the kernel of `backend`.

        Raises:
          ValueError: there is none; the message lists the backends.
        """
        for kernel in self._declared:
            if kernel.backend == backend:
                return _imported(kernel)
        close = meant(backend, self.backends) if isinstance(backend, str) else None
        hint = f"; did you mean {close!r}?" if close else ""
        raise ValueError(f"{self.name} has no backend {backend!r}{hint} (it has: {', '.join(self.backends)})")

    def sharding(self, problem: P) -> Sharding[P] | None:
        """Returns how the devices of a mesh may divide `problem`; None if they may not."""
        return None if self.shard is None else self.shard(problem)

    def bind(self, *args: Any, **options: Any) -> BoundCall[P] | Unsupported:
        """Converts a call as users write it to a problem, its operands, and a function that restores the result.

        This is `front_end` if there is one. Otherwise `args` are the operands in the order of `Problem.operands`, and
        `options` are `params` and those fields of the problem that shapes do not determine.

        Raises:
          TypeError, ValueError: wrong arguments, with a one-sentence message as JAX users expect.
        """
        if (wrong := next((name for name in options if name not in self.options), None)) is not None:
            raise TypeError(f"{self.name} has no parameter {unknown(wrong, self.options)}")
        if self.front_end is not None:
            return self.front_end(*args, **options)
        operands = tuple(jnp.asarray(x) for x in args)
        told = {name: x for name, x in options.items() if name not in self.params}
        params = tuple((name, x) for name, x in options.items() if name in self.params)
        return BoundCall(self.problem.of(*operands, **told), operands, params=params)

    @functools.cached_property
    def options(self) -> tuple[str, ...]:
        """Names of the keyword arguments of `bind`."""
        if self.front_end is None:
            return *(field.name for field in dataclasses.fields(self.problem)), *self.params
        parameters = inspect.signature(self.front_end).parameters.values()
        named = tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
        return (*named, *self.params) if any(each.kind is each.VAR_KEYWORD for each in parameters) else named
