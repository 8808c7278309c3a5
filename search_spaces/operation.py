"""Named operations: their problems, the kernels that compete to solve them, and how users call and differentiate them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import jax.numpy as jnp

from search_spaces import aliases
from search_spaces.kernel import Kernel
from search_spaces.problem import Problem
from search_spaces.sharding import Sharding
from search_spaces.space import meant, unknown

P = TypeVar("P", bound=Problem)
# Names and values that a kernel takes besides arrays, and that change no schedule.
Params = tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Bound(Generic[P]):
    """A call in the form that kernels take.

    Attributes:
      problem: the problem of the call.
      operands: arrays or tracers, shaped as ``problem.operands()``, or with several axes in place of one (`unfolded`).
      restore: ``restore(*results)`` is the caller's result; None is `Problem.pack`, the results unchanged.
      params: arguments of `Kernel.run` besides arrays.
    """

    problem: P
    operands: tuple[Any, ...]
    restore: Callable[..., Any] | None = None
    params: Params = ()


@dataclasses.dataclass(frozen=True)
class Posed(Generic[P]):
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
class Unbound:
    """A call that no problem describes, which falls back to the library.

    Attributes:
      reason: the reason, as text.
      answer: computes the call by plain XLA. Arguments that JAX rejects raise JAX's own error there.
    """

    reason: str
    answer: Callable[[], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Operation(Generic[P]):
    """A named operation: its problems, and the kernels that compete to solve them.

    The rules that follow are in terms of `call`, which makes a tuned call: ``call(problem, *args)`` of this operation,
    ``call(operation, problem, *args, **params)`` of another, tuned and cached under that one's name. What belongs to
    the results (they themselves, tangents, cotangents) is one array, or a tuple where `Problem.result` is a tuple.
    A tangent or cotangent that is zero is None, given or returned. ``call.params`` are the params of the call by their
    names, for a formula of the rule's own or another operation. Where a front end or `batch` leaves several axes in
    place of one that `shard` names (`unfolded`), all rules get such arrays, and results are such.

    Attributes:
      name: as a cache and a command line spell it.
      problem: the type of its problems.
      kernels: one per backend, exactly one of them a library kernel.
      params: names of what `Kernel.run` takes besides arrays and changes no schedule (an epsilon, a scale).
      jvp: ``jvp(call, problem, primals, tangents) -> (result, tangent)``. Default: the library kernel's derivative.
      transpose: ``transpose(call, problem, cotangent, args) -> cotangents``: where the operation is linear in the
        arguments given as None. Default: not transposable (its `jvp` then must not need it).
      vjp_params: names of what only `vjp_fwd` and `vjp_bwd` take besides arrays: no kernel gets it.
      batch: ``batch(call, problem, args, dims) -> (result, dim)``: one call for a vmapped one; a dim that is None is
        not batched. None in place of both, where one call will not do, is the default: one for each element of the
        batch, in sequence.
      vjp_fwd: ``vjp_fwd(call, problem, args) -> (result, residuals)``: the result, and any pytree of arrays that the
        backward pass needs. With `vjp_bwd`, and in place of `jvp` and `transpose`.
      vjp_bwd: ``vjp_bwd(call, problem, residuals, cotangent) -> cotangents``, one for each argument. These two are
        a `jax.custom_vjp`: forward mode raises that one's TypeError, zero cotangents are given as arrays of zeros, and
        what `vjp_fwd` calls of its own operation has the library kernel's derivative (for a Hessian).
        ``call.params`` has `vjp_params`, too.
      front_end: ``front_end(*args, **options)`` -> `Bound` or `Unbound`: a call as users write it; options are
        keyword-only. Default: see `bind`.
      equations: JAX's primitives whose equations the operation can answer: ``posed(*inputs, stored=None, **params)`` ->
        `Posed`, or why it cannot, in words. `inputs` have shapes and dtypes; `stored` has, of each input and of the
        result, the order in which its axes lie in memory, None where that is their own.
      recognise: ``recognise(node)`` -> `Recognised` where an equation of a graph (`search_spaces.recognise`) is the
        last of several that compute what the operation does, else None. What is not there must not be recognised.
      shard: ``shard(problem)`` -> `Sharding`, what of it the devices of a mesh may divide; None where nothing may be.
        Default: nothing, of any problem: the library answers there, which XLA divides by itself.

    Raises:
      ValueError: no library kernel or two, two kernels of one backend, or rules that exclude each other.
    """

    name: str
    problem: type[P]
    kernels: tuple[Kernel[P, Any], ...]
    params: tuple[str, ...] = ()
    vjp_params: tuple[str, ...] = ()
    jvp: Callable[..., Any] | None = None
    transpose: Callable[..., Any] | None = None
    batch: Callable[..., Any] | None = None
    vjp_fwd: Callable[..., Any] | None = None
    vjp_bwd: Callable[..., Any] | None = None
    front_end: Callable[..., Bound[P] | Unbound] | None = None
    equations: Mapping[Any, Callable[..., Posed[P] | str]] = dataclasses.field(default_factory=dict)
    recognise: Callable[[Any], Any] | None = None
    shard: Callable[[P], Sharding[P] | None] | None = None

    def __post_init__(self) -> None:
        libraries = [kernel.backend for kernel in self.kernels if kernel.library]
        if len(libraries) != 1:
            raise ValueError(f"operation {self.name!r} needs exactly one library kernel, found {libraries or 'none'}")
        if len(set(self.backends)) != len(self.kernels):
            raise ValueError(f"operation {self.name!r} has two kernels of one backend: {', '.join(self.backends)}")
        if (self.vjp_fwd is None) != (self.vjp_bwd is None):
            raise ValueError(f"operation {self.name!r} has one of vjp_fwd and vjp_bwd, which belong together")
        if self.vjp_fwd is not None and (self.jvp is not None or self.transpose is not None):
            raise ValueError(f"operation {self.name!r} has a vjp, which takes the place of jvp and transpose")

    def __repr__(self) -> str:  # part of each call in a printed jaxpr
        return self.name

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(kernel.backend for kernel in self.kernels)

    @functools.cached_property
    def library(self) -> Kernel[P, Any]:
        return next(kernel for kernel in self.kernels if kernel.library)

    def kernel(self, backend: str) -> Kernel[P, Any]:
        """The kernel of `backend`, which may be spelled as it once was (`aliases`).

        Raises:
          ValueError: there is none; the message names those there are.
        """
        for kernel in self.kernels:
            if kernel.backend == aliases.backend(backend):
                return kernel
        close = meant(backend, self.backends) if isinstance(backend, str) else None
        hint = f"; did you mean {close!r}?" if close else ""
        raise ValueError(f"{self.name} has no backend {backend!r}{hint} (it has: {', '.join(self.backends)})")

    def sharding(self, problem: P) -> Sharding[P] | None:
        """What of `problem` the devices of a mesh may divide; None where nothing may be."""
        return None if self.shard is None else self.shard(problem)

    def bind(self, *args: Any, **options: Any) -> Bound[P] | Unbound:
        """A call as users write it: the problem that it poses, its operands, and how the result is restored.

        By `front_end`, or without one: `args` are the operands as `Problem.operands` has them, and `options` are
        fields of the problem that shapes do not tell, and `params`.

        Raises:
          TypeError, ValueError: what a JAX user expects of wrong arguments, in one sentence.
        """
        if (wrong := next((name for name in options if name not in self.options), None)) is not None:
            raise TypeError(f"{self.name} has no parameter {unknown(wrong, self.options)}")
        if self.front_end is not None:
            return self.front_end(*args, **options)
        operands = tuple(jnp.asarray(x) for x in args)
        told = {name: x for name, x in options.items() if name not in self.params}
        params = tuple((name, x) for name, x in options.items() if name in self.params)
        return Bound(self.problem.of(*operands, **told), operands, params=params)

    @functools.cached_property
    def options(self) -> tuple[str, ...]:
        """What `bind` takes by name."""
        if self.front_end is None:
            return *(field.name for field in dataclasses.fields(self.problem)), *self.params
        parameters = inspect.signature(self.front_end).parameters.values()
        return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
