"""optimize(): a function that knows nothing of tuned calls, compiled both ways; the faster answers."""

from __future__ import annotations

import collections
import functools
import threading
import types
import typing
from collections.abc import Callable
from typing import Any, Literal

import jax

from scheduler.core.backends import backends_of_each
from scheduler.dispatch import calls, dispatch, planned
from scheduler.dispatch.calls import Backends
from scheduler.dispatch.dispatch import OnMiss
from scheduler.functions import in_turns, replacing
from scheduler.functions.arguments import Arguments
from scheduler.functions.trial import Decided, Trial
from search_spaces import debugging_compat, lowering_compat

Keep = Literal["faster", "tuned"]
KEEP: tuple[Keep, ...] = typing.get_args(Keep)
# Decisions that are kept, with what they compiled; the oldest goes first.
MOST_VERSIONS = 256
# Where the whole is timed, a kernel may take part that is as likely to be faster as not: nothing else can be lost.
EVEN_ODDS = 0.5


def optimize(
    fn: Callable[..., Any],
    *,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    keep: Keep = "faster",
    seconds: float = in_turns.SECONDS,
    **jit_options: Any,
) -> Optimized:
    """`fn`, jitted, with kernels in place of its products and its attention where the whole is faster for it.

    A product (`lax.dot_general`, as `jnp.matmul`, `jnp.einsum` and models have it), and attention that cuDNN is asked
    for (``jax.nn.dot_product_attention(implementation="cudnn")``), becomes a tuned call while `fn` is lowered:
    forwards, backwards, in scans, remat, custom derivatives and batches. Only where a kernel answers it, by a record or
    the model; every other equation is lowered as JAX lowers it.

    At the first call with other shapes, dtypes, weak types, shardings, static arguments or structure both versions are
    compiled and run on the arguments: their results are compared, and they are timed in turns, which takes
    `seconds`. The tuned one is kept where it computed the same and is faster beyond doubt. XLA's version
    answers, and nothing is timed, where no kernel answers any of these, and where `fn` has side effects. In a job of
    several processes nothing is timed, either: a plan answers (`scheduler.plan`), or else XLA. `report()` says what was
    decided, and why.

    Arguments that `fn` donates survive the comparison, which runs on copies of them. `jax.grad`, `jax.vmap` and other
    transformations cannot look inside: optimize the function that they make.

    Args:
      fn: of arrays, plain or jitted.
      on_miss, backends: as in `scheduler.tuned_matmul`, for each product and attention; those that no allowed kernel
        can compute are left as they are.
      keep: "tuned" keeps the tuned version wherever it computes the same, and times nothing.
      seconds: of timing, at most, unless a few rounds take longer.
      jit_options: `static_argnums`, `donate_argnums` and whatever else `jax.jit` takes.

    Raises:
      ValueError: an unknown policy, backend or choice of what to keep.
      TypeError: `fn` cannot be called, or a library jitted it in a way of its own, as `flax.nnx.jit`.
    """
    if not callable(fn):
        raise TypeError(f"optimize wants a function, and got {fn!r}")
    if hasattr(fn, "trace") and hasattr(fn, "lower") and not lowering_compat.is_jitted(fn):
        raise TypeError(
            f"optimize wants a function that is plain or jitted by jax.jit; this one is a {type(fn).__qualname__} of "
            f"{type(fn).__module__}, which may update objects that no result holds: optimize a function that takes "
            "arrays and returns all that it updates"
        )
    if keep not in KEEP:
        raise ValueError(f"keep={keep!r} is not one of {', '.join(KEEP)}")
    return Optimized(fn, on_miss, backends, keep, seconds, jit_options)


class Optimized:
    """A function compiled both ways, and its decisions by arguments. Threads may share it."""

    def __init__(
        self,
        fn: Callable[..., Any],
        on_miss: OnMiss | None,
        backends: Backends | None,
        keep: Keep,
        seconds: float,
        jit_options: dict[str, Any],
    ) -> None:
        self._jitted: Any = fn if lowering_compat.is_jitted(fn) and not jit_options else jax.jit(fn, **jit_options)
        self._static = lowering_compat.static_arguments(self._jitted)
        self._on_miss, self._keep, self._seconds = on_miss, keep, seconds
        self._table: collections.OrderedDict[Any, Decided] = collections.OrderedDict()
        self._guard = threading.Lock()
        self._deciding: dict[Any, threading.Lock] = {}
        self._operations = tuple(replacing.answering().values())
        self._named = backends_of_each(self._operations, backends)
        self._asked()  # what is wrong is refused now
        functools.update_wrapper(self, fn, updated=())  # the attributes of a model that is called are its own
        self.__name__: str = getattr(fn, "__name__", "function")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self._jitted(*args, **kwargs)
        given = Arguments(self._static, args, kwargs)
        try:
            key = (self._asked(), lowering_compat.trace_context(), given.key())
            decided = self._table.get(key)
        except TypeError:  # what has no key is no array: for JAX to refuse
            return self._jitted(*args, **kwargs)
        if decided is None:
            decided = self._decide(key, given)
        if decided.compiled is None:
            return self._jitted(*args, **kwargs)
        try:
            return given.call(decided.compiled)
        except debugging_compat.InternalFloatingPointError as error:  # `jax.debug_nans` or `jax.debug_infs`
            raise FloatingPointError(
                f"a result of the tuned version of {self.__name__} holds an invalid value {error.args}: call the plain "
                "function, of which JAX says which operation makes it"
            ) from None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method of a class, as functions are and those of `jax.jit`."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def decisions(self) -> tuple[Decided, ...]:
        """What was decided, by arguments, as first asked for."""
        with self._guard:
            return tuple(self._table.values())

    def report(self) -> str:
        """What was decided for which arguments, and why, as text."""
        return (
            "\n".join(map(str, self.decisions)) or f"nothing is decided: {self.__name__} was not called with arrays yet"
        )

    def _asked(self) -> tuple[dispatch.Options, ...]:
        """What may answer now, of each operation."""
        target, plan = calls.target.value, planned.in_force()
        sure = EVEN_ODDS if self._keep == "faster" else None
        return tuple(
            dispatch.options(operation, on_miss=self._on_miss, backends=named, target=target, plan=plan, sure=sure)
            for operation, named in zip(self._operations, self._named, strict=True)
        )

    def _decide(self, key: Any, given: Arguments) -> Decided:
        with self._guard:
            lock = self._deciding.setdefault(key, threading.Lock())
        with lock:
            if (known := self._table.get(key)) is not None:
                return known
            try:
                decided = self._tried(key[0], given)
                with self._guard:
                    self._table[key] = decided
                    while len(self._table) > MOST_VERSIONS:
                        self._table.popitem(last=False)
            finally:
                with self._guard:
                    self._deciding.pop(key, None)
            return decided

    def _tried(self, asked: tuple[dispatch.Options, ...], given: Arguments) -> Decided:
        options = {operation.name: each for operation, each in zip(self._operations, asked, strict=True)}
        seconds = self._seconds if self._keep == "faster" else None
        return Trial(self.__name__, self._jitted, given, options, seconds).decide()
