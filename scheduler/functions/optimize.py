"""optimize(): a function that knows nothing of tuned calls, compiled both ways; the faster answers."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import threading
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from scheduler.core import checked
from scheduler.core.backends import backends_of_each
from scheduler.core.errors import SchedulerError
from scheduler.core.interrupts import interruptible
from scheduler.dispatch import calls, dispatch, planned
from scheduler.dispatch.calls import Backends
from scheduler.dispatch.dispatch import OnMiss
from scheduler.functions import in_turns, pure, replacing
from scheduler.functions.arguments import Arguments
from scheduler.functions.call_tree import has_state, is_library_jitted
from scheduler.functions.outputs import Outputs
from scheduler.functions.trial import Decided, Trial
from search_spaces import debugging_compat, lowering_compat
from search_spaces.space import unknown

Keep = Literal["faster", "tuned"]
KEEP: tuple[Keep, ...] = typing.get_args(Keep)
# Decisions that are kept, with what they compiled; the oldest goes first.
MOST_VERSIONS = 256
# A function asks a traced number for its value.
_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# Versions for arrays of one kind, as constants differ, at which a warning says so.
MANY_CONSTANTS = 8
# Where the whole is timed, a kernel may take part that is as likely to be faster as not: nothing else can be lost.
EVEN_ODDS = 0.5
# What `jax.jit` takes that says nothing of single arguments.
_OF_THE_WHOLE = ("backend", "compiler_options", "device", "inline", "keep_unused")
# Of the arguments of one call each, which `pure_call` marks.
_MARKS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")


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

    Arguments that `fn` donates survive the comparison, which runs on copies of them, and what `fn` updates in place
    (modules, optimizers and generators of flax.nnx; dicts, lists and objects among its arguments) is updated once. What
    is no array among the arguments and results, as the activations of an Equinox model, is static. `jax.grad`,
    `jax.vmap` and other transformations cannot look inside: optimize the function that they make.

    Args:
      fn: plain, or jitted by `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit`; a method, a partial, or a module. By
        `jax.jit` it behaves as `jax.jit` has it: updates in place are lost, and what is no array is refused.
      on_miss, backends: as in `scheduler.tuned_matmul`, for each product and attention; those that no allowed kernel
        can compute are left as they are.
      keep: "tuned" keeps the tuned version wherever it computes the same, and times nothing.
      seconds: of timing, at most, unless a few rounds take longer.
      jit_options: `static_argnums`, `donate_argnums` and whatever else `jax.jit` takes.

    Raises:
      ValueError: an unknown policy, backend or choice of what to keep; `seconds` that are negative, NaN or infinite.
      TypeError: `fn` cannot be called, or another library jitted it in a way of its own.

    A call raises a SchedulerError where `fn` has effects that cannot be carried out of a trace.
    """
    known = [name for name in inspect.signature(jax.jit).parameters if name not in ("fun", "fn", "f", "kwargs")]
    for name in jit_options:
        if name not in known:
            raise TypeError(f"optimize has no option {unknown(name, (*_OPTIONS, *known))}")
    if not callable(fn):
        raise TypeError(f"optimize wants a function, and got {fn!r}")
    if hasattr(fn, "lower") and not lowering_compat.is_jitted(fn) and not is_library_jitted(fn):
        raise TypeError(
            f"optimize wants a function that is plain or jitted by jax.jit, flax.nnx.jit or equinox.filter_jit; this "
            f"one is a {type(fn).__qualname__} of {type(fn).__module__}: optimize the function inside"
        )
    checked.one_of("keep", keep, KEEP)
    checked.number("seconds", seconds)
    return Optimized(fn, on_miss, backends, keep, seconds, jit_options)


_OPTIONS = ("on_miss", "backends", "keep", "seconds")


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
        self._fn, self._jit_options = fn, jit_options
        self._by_jax = lowering_compat.is_jitted(fn)
        traced = fn if self._by_jax else pure.checked(fn)
        self._jitted: Any = fn if self._by_jax and not jit_options else jax.jit(traced, **jit_options)
        self._static = lowering_compat.static_arguments(self._jitted)
        # Whether the function decides by Python numbers what it does, so that they are part of the program.
        self._static_numbers = False
        # Whether no call is one of arrays alone; known once it is called, as globals may be assigned until then.
        self._always_opened = False if self._by_jax else None
        self._on_miss, self._keep, self._seconds = on_miss, keep, seconds
        self._table: collections.OrderedDict[Any, _Version] = collections.OrderedDict()
        self._constants: collections.Counter[Any] = collections.Counter()
        self._guard = threading.Lock()
        self._deciding: dict[Any, threading.Lock] = {}
        self._operations = tuple(replacing.answering().values())
        self._named = backends_of_each(self._operations, backends)
        self._asked()  # what is wrong is refused now
        functools.update_wrapper(self, fn, updated=())  # the attributes of a model that is called are its own
        self.__name__: str = _name(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self._fn(*args, **kwargs)
        if self._always_opened is None:
            self._always_opened = is_library_jitted(self._fn) or pure.holds_arrays_or_state(self._fn)
        if self._always_opened:
            return self._call_opened(args, kwargs)
        given = Arguments(self._static, args, kwargs)
        try:
            key = (self._asked(), lowering_compat.trace_context(), given.key())
            version = self._table.get(key)
        except TypeError:  # what has no key is no array: static, or for JAX to refuse
            return self._jitted(*args, **kwargs) if self._by_jax else self._call_opened(args, kwargs)
        if version is None:
            version = self._decide(key, functools.partial(self._of_arrays, key[0], given))
        if version is _OPENED:
            return self._call_opened(args, kwargs)
        compiled = version.decided.compiled
        if compiled is None:
            return self._jitted(*args, **kwargs)
        with self._float_errors():
            return given.call(compiled)

    def _call_opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of modules, or with updates in place, by the pure function that it is of its arrays."""
        try:
            return self._call_pure(args, kwargs, trace_numbers=not self._static_numbers)
        except _CONCRETE:
            if self._static_numbers or not Arguments(self._static, args, kwargs).numbers:
                raise
        outputs = self._call_pure(args, kwargs, trace_numbers=False)
        self._static_numbers = True
        return outputs

    def _call_pure(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, trace_numbers: bool) -> Any:
        donated = lowering_compat.donated_arguments(self._jitted)
        call = pure.pure_call(self._fn, args, kwargs, static=self._static, donated=donated, trace_numbers=trace_numbers)
        given = Arguments(((), ()), call.arrays, {})
        key = (self._asked(), lowering_compat.trace_context(), given.key(), call.static)
        version = self._table.get(key)
        if version is not None:
            with self._float_errors():
                return call.finish(version.run(*call.arrays))
        with call.compiling(), self._float_errors():
            version = self._decide(key, functools.partial(self._of_modules, key, given, call))
            return call.finish(version.run(*call.arrays))

    @contextlib.contextmanager
    def _float_errors(self) -> Iterator[None]:
        """Names the function in the error of `jax.debug_nans` or `jax.debug_infs`."""
        try:
            yield
        except debugging_compat.InternalFloatingPointError as error:
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
            return tuple(version.decided for version in self._table.values() if version is not _OPENED)

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

    def _decide(self, key: Any, tried: Callable[[], _Version]) -> _Version:
        with self._guard:
            lock = self._deciding.setdefault(key, threading.Lock())
        with lock:
            if (known := self._table.get(key)) is not None:
                return known
            try:
                version = tried()
                with self._guard:
                    self._table[key] = version
                    while len(self._table) > MOST_VERSIONS:
                        self._table.popitem(last=False)
            finally:
                with self._guard:
                    self._deciding.pop(key, None)
            return version

    def _of_arrays(self, asked: tuple[dispatch.Options, ...], given: Arguments) -> _Version:
        if not self._by_jax and has_state(given.dynamic):
            return _OPENED
        try:
            return self._tried(asked, self._jitted, given)
        except pure.Impure:
            return _OPENED
        except _CONCRETE:
            if self._by_jax or not given.numbers:
                raise
            return _OPENED

    def _of_modules(self, key: Any, given: Arguments, call: pure.PureCall) -> _Version:
        if refused := self._jit_options.keys() - {*_OF_THE_WHOLE, *_MARKS}:
            raise SchedulerError(
                f"{self.__name__} is called with modules, or updates its arguments in place, and {', '.join(refused)} "
                "of jax.jit means arrays alone: give that to the jit of the library (flax.nnx.jit), and optimize what "
                "it returns"
            )
        options = {name: x for name, x in self._jit_options.items() if name in _OF_THE_WHOLE}

        run = call.function  # without the call, whose arrays nothing is to keep

        def function(*arrays: Any) -> Outputs:
            return run(*arrays)

        function.__name__ = self.__name__
        with self._guard:
            self._constants[key[:3]] += 1
            constants = self._constants[key[:3]]
        if constants == MANY_CONSTANTS:
            warnings.warn(
                f"{self.__name__} is compiled for the {constants}th time for arrays of the same shapes, as something "
                "else among its arguments, or an attribute of its object, is new each time. What changes from call to "
                "call should be an array (jax.numpy.asarray)",
                RuntimeWarning,
                stacklevel=2,
            )
        donated = [i for i, each in enumerate(call.donated) if each]
        return self._tried(key[0], jax.jit(function, donate_argnums=donated, **options), given)

    @interruptible()
    def _tried(self, asked: tuple[dispatch.Options, ...], jitted: Any, given: Arguments) -> _Version:
        options = {operation.name: each for operation, each in zip(self._operations, asked, strict=True)}
        seconds = self._seconds if self._keep == "faster" else None
        return _Version(Trial(self.__name__, jitted, given, options, seconds).decide(), jitted)


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", None) or (_name(fn.func) if hasattr(fn, "func") else type(fn).__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class _Version:
    """What answers calls that are alike: `decided.compiled`, or `jitted` where that is None."""

    decided: Decided
    jitted: Any

    @property
    def run(self) -> Any:
        return self.jitted if self.decided.compiled is None else self.decided.compiled


# In place of a version: calls of these arguments are no calls of arrays alone.
_OPENED = _Version(Decided("", "", None, ""), None)
