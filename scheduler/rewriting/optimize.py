"""Compiles a function with and without tuned kernels, and keeps the faster version: `optimize()`."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import inspect
import threading
import types
import typing
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax

from scheduler.core import arguments
from scheduler.core.arguments import backends_of_each
from scheduler.core.errors import SchedulerError
from scheduler.core.interrupts import interruptible
from scheduler.core.plan import Plan
from scheduler.dispatch import calls, dispatch, planned
from scheduler.dispatch.calls import Backends
from scheduler.dispatch.dispatch import OnMiss
from scheduler.dispatch.planned import InForce
from scheduler.rewriting import interleaved, module_libraries, pure
from scheduler.rewriting.call_arguments import CallArguments
from scheduler.rewriting.call_tree import has_state, is_library_jitted, parameters_of
from scheduler.rewriting.decided import Decided
from scheduler.rewriting.equations import replacing_operations
from scheduler.rewriting.plan import plan_of
from scheduler.rewriting.pure import Outputs
from scheduler.rewriting.trial import FunctionTrial
from search_spaces import lowering_compat
from search_spaces.space import unknown

Keep = Literal["faster", "tuned"]
KEEP: tuple[Keep, ...] = typing.get_args(Keep)
# Limit of the decisions kept, each with its compiled version. The oldest is evicted first.
MOST_VERSIONS = 256
# JAX raises these when a function needs the concrete value of a traced number.
_CONCRETE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# Number of versions compiled for the same array types but different constants at which a warning is issued.
MANY_CONSTANTS = 8
# The whole function is timed, so a kernel is tried if the expected loss equals the gain: a slower version is not kept.
EVEN_ODDS = 1.0
# Options of `jax.jit` that do not refer to individual arguments.
_OF_THE_WHOLE = ("backend", "compiler_options", "device", "inline", "keep_unused")
# Options of `jax.jit` that mark individual arguments. `pure_call` applies them.
_MARKS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
# Options of `flax.nnx.jit` among those.
_OF_FLAX = {*_MARKS, "backend", "device", "inline", "keep_unused"}


def optimize(
    fn: Callable[..., Any],
    *,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    keep: Keep = "faster",
    seconds: float = interleaved.INTERLEAVED_S,
    **jit_options: Any,
) -> Optimized:
    """Returns `fn` jitted, with tuned kernels for matmuls, attention and rows where the whole function is faster.

    Three kinds of equations become tuned calls while `fn` is lowered: matmuls (`lax.dot_general`, also from
    `jnp.matmul`, `jnp.einsum` and models), grouped products (`lax.ragged_dot`), and attention that requests cuDNN
    (``jax.nn.dot_product_attention(implementation="cudnn")``). They are also replaced in backward passes, scans, remat,
    custom derivatives and batches. Row programs, such as norms, softmaxes, cross-entropies and their backward passes,
    are replaced as a whole, with the elementwise equations around them. An equation is replaced only if a record or the
    cost model selects a kernel for it. JAX lowers every other equation as usual, with three exceptions. A
    scatter that adds one number to each row of zeros, as in the gradient of a cross-entropy, becomes a selection, which
    XLA fuses. On NVIDIA GPUs, a product with unaligned rows (a vocabulary of 50257) is padded. A backward pass computes
    activations again rather than reading them. If XLA partitions `fn` over the automatic axes of a mesh, kernels are
    selected for the part of one device.

    The first call for each combination of shapes, dtypes, weak types, shardings, static arguments and structure
    compiles both versions and runs both on the arguments. Each kernel is compared with its equations in float32, on the
    function's own values, and left out if it disagrees. The results of both versions may differ by 3 times the change
    that rounding noise makes. Both are timed in interleaved rounds for up to `seconds`. The tuned version is kept if
    its results agree and it is faster with 99 % confidence. If it gains less than 90 % of what its kernels save alone,
    by records or the cost model, up to five versions with fewer kernels are compiled, compared and timed, too. Kernels
    without which the function is no slower are left out, and the fastest version is kept. If no equation is replaced,
    or if `fn` has side effects, XLA's version is used and nothing is timed. Under a plan (`scheduler.plan`), exactly
    its kernels are used, and nothing is compared or timed. A job of several processes without a plan uses XLA's
    version. `report()` lists the decisions and their reasons, and `plan()` returns them as a plan. The cache stores
    decisions, and later processes use those of the same function, arguments, kernels, chip and versions.

    Donated arguments survive the comparison, which runs on copies of them. State that `fn` updates in place (modules,
    optimizers and generators of flax.nnx; dicts, lists and objects among its arguments) is updated once. Arguments and
    results that are not arrays, such as the activations of an Equinox model, are static. `jax.grad`, `jax.vmap` and
    other transformations cannot be applied to the result: optimize the transformed function instead.

    Args:
      fn: A plain function, or one jitted by `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit`; a method, a partial, or
        a module. A function jitted by `jax.jit` keeps the semantics of `jax.jit`: updates in place are lost, and
        arguments that are not arrays are rejected.
      on_miss, backends: As in `scheduler.tuned_matmul`, for each matmul and attention call. Calls that no allowed
        kernel can compute are not replaced. Changed environment variables count after `scheduler.reload()`.
      keep: "tuned" keeps the tuned version whenever its results agree, without timing.
      seconds: Maximum time of one timing. A minimum number of rounds may take longer. There are up to three timings: of
        both versions, of versions without groups of kernels, and of the version that is left.
      jit_options: `static_argnums`, `donate_argnums` and other options of `jax.jit`.

    Raises:
      ValueError: `on_miss`, `backends` or `keep` is not a known value, or `seconds` is negative, NaN or infinite.
      TypeError: `fn` is not callable, or was jitted by an unsupported library.

    A call raises a SchedulerError if `fn` has effects that cannot be carried out of a trace.
    """
    known = [name for name in inspect.signature(jax.jit).parameters if name not in ("fun", "fn", "f", "kwargs")]
    for name in jit_options:
        if name not in known:
            raise TypeError(f"optimize has no option {unknown(name, (*_OPTIONS, *known))}")
    if not callable(fn):
        raise TypeError(f"optimize expects a function, got {fn!r}")
    if hasattr(fn, "lower") and not lowering_compat.is_jitted(fn) and not is_library_jitted(fn):
        raise TypeError(
            f"optimize expects a plain function, or one jitted by jax.jit, flax.nnx.jit or equinox.filter_jit, got a "
            f"{type(fn).__qualname__} of {type(fn).__module__}: optimize the function inside"
        )
    arguments.checked_choice("keep", keep, KEEP)
    arguments.checked_number("seconds", seconds)
    return Optimized(fn, on_miss, backends, keep, seconds, jit_options)


_OPTIONS = ("on_miss", "backends", "keep", "seconds")


class Optimized:
    """A function compiled with and without tuned kernels, and its decisions by arguments. It is thread-safe."""

    def __init__(
        self,
        fn: Callable[..., Any],
        on_miss: OnMiss | None,
        backends: Backends | None,
        keep: Keep,
        seconds: float,
        jit_options: dict[str, Any],
    ) -> None:
        self._fn, self._jit_options, self._backends = fn, jit_options, backends
        self._by_jax = lowering_compat.is_jitted(fn)
        traced = fn if self._by_jax else pure.checked(fn)
        self._jitted: Any = fn if self._by_jax and not jit_options else jax.jit(traced, **jit_options)
        self._static = lowering_compat.static_arguments(self._jitted)
        self._parameters, self._shown = functools.partial(parameters_of, fn), None
        # Whether the function branches on Python numbers, so that they must be compile-time constants.
        self._static_numbers = False
        # Whether every call must go through `pure_call`. Computed at the first call, since globals may be assigned
        # until then.
        self._always_opened = False if self._by_jax else None
        # The function jitted by flax.nnx or Equinox, with `_Inner` inside, for functions or calls of these libraries.
        self._by_library: Any = None
        self._inner: _Inner | None = None
        self._on_miss, self._keep, self._seconds = on_miss, keep, seconds
        self._table: collections.OrderedDict[Any, _UsedVersion] = collections.OrderedDict()
        self._constants: collections.Counter[Any] = collections.Counter()
        self._guard, self._library_guard = threading.Lock(), threading.Lock()
        self._deciding: dict[Any, threading.Lock] = {}
        self._operations = replacing_operations()
        self._named = backends_of_each(self._operations, backends)
        self._current_options()  # raises errors in the arguments now
        functools.update_wrapper(self, fn, updated=())  # a callable model keeps its own attributes
        self.__name__: str = _name(fn)
        # Calls the version of known arguments, while `dispatch.changes` is `_changes`, which is None for functions of
        # modules.
        self._dispatched: Any = None
        self._changes: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._changes != dispatch.changes():
            return self._call_prepared(args, kwargs)
        try:
            result = self._dispatched(*args, **kwargs)
        except lowering_compat.InternalFloatingPointError as error:
            raise self._invalid(error) from None
        except BaseException:
            self._changes = None  # JAX no longer keeps a program for these arguments
            raise
        return self._call_undispatched(args, kwargs) if result is NotImplemented else result

    def _call_prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return self._fn(*args, **kwargs)
        if self._always_opened is None:
            self._always_opened = self._must_open()
        if self._by_library is not None:
            try:
                return self._by_library(*args, **kwargs)
            except (pure.Impure, *_CONCRETE):
                self._by_library, self._always_opened = None, True
        if self._always_opened:
            return self._call_opened(args, kwargs)
        # Read first: the decision of this call may be a change.
        changes = dispatch.changes()
        self._dispatched = lowering_compat.dispatched(self.__name__, self._fn, self._select, self._static)
        self._changes = changes
        return self(*args, **kwargs)

    def _must_open(self) -> bool:
        fn = module_libraries.unwrapped_flax(self._fn)
        if pure.holds_arrays_or_state(fn):
            return True
        if is_library_jitted(self._fn):
            self._jit_by_library()
        return bool(self._always_opened)

    def _jit_by_library(self) -> None:
        """Makes later calls those of flax.nnx or Equinox, which split modules, with a function of arrays inside."""
        with self._library_guard:
            if self._by_library is None:
                self._by_library = self._jitted_by_library()
                self._always_opened, self._changes = self._by_library is None, None

    def _jitted_by_library(self) -> Any:
        if module_libraries.is_equinox_jitted(self._fn):
            inside = functools.partial(self._inside, shown=module_libraries.arguments_of_equinox)
            return None if self._jit_options else module_libraries.jitted_by_equinox(self._fn, inside)
        fn = module_libraries.unwrapped_flax(self._fn)
        if not isinstance(fn, types.FunctionType) or self._jit_options.keys() - _OF_FLAX:
            return None
        return module_libraries.jitted_by_flax(self._fn, pure.checked(fn), self._jit_options, self._inside)

    def _inside(self, jitted: Any, shown: Any = None) -> _Inner:
        inner = self._inner = _Inner(jitted, self._on_miss, self._backends, self._keep, self._seconds, {})
        inner.__name__, inner._parameters, inner._shown = self.__name__, self._parameters, shown
        return inner

    def _select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the compiled version for these arguments, and those that it takes; None if JAX cannot dispatch it."""
        found = self._version(args, kwargs)
        if found is None or not isinstance(found[1].run, jax.stages.Compiled):
            return None
        given, version = found
        return version.run, *given.dynamic

    def _version(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallArguments, _UsedVersion] | None:
        """Returns the version for these arguments, decided now if need be; None if they are not arrays alone."""
        given = CallArguments(self._static, args, kwargs, self._parameters, self._shown)
        try:
            key = (self._current_options(), lowering_compat.trace_context(), given.key())
            version = self._table.get(key)
        except TypeError:  # an argument that is not an array: static, or rejected by JAX
            return None
        if version is None:
            version = self._decide(key, functools.partial(self._compile_arrays, key[0], given))
        return None if version is _OPENED else (given, version)

    def _call_undispatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._version(args, kwargs) is not None or self._by_jax:
            return self._jitted(*args, **kwargs)
        if has_state((args, kwargs)) and self._always_opened is False:
            self._jit_by_library()
            return self(*args, **kwargs)
        return self._call_opened(args, kwargs)

    def _call_opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function as a pure function of its arrays, for modules and updates in place."""
        try:
            return self._call_pure(args, kwargs, trace_numbers=not self._static_numbers)
        except _CONCRETE:
            if self._static_numbers or not CallArguments(self._static, args, kwargs).numbers:
                raise
        outputs = self._call_pure(args, kwargs, trace_numbers=False)
        self._static_numbers = True
        return outputs

    def _call_pure(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, trace_numbers: bool) -> Any:
        donated = lowering_compat.donated_arguments(self._jitted)
        call = pure.pure_call(self._fn, args, kwargs, static=self._static, donated=donated, trace_numbers=trace_numbers)
        given = CallArguments(((), ()), call.arrays, {}, call.owners)
        key = (self._current_options(), lowering_compat.trace_context(), given.key(), call.static)
        version = self._table.get(key)
        try:
            if version is not None:
                return call.finish(version.run(*call.arrays))
            with call.compiling():
                version = self._decide(key, functools.partial(self._compile_modules, key, given, call))
                return call.finish(version.run(*call.arrays))
        except lowering_compat.InternalFloatingPointError as error:
            raise self._invalid(error) from None

    def _invalid(self, error: Exception) -> FloatingPointError:
        """Returns an error of `jax.debug_nans` or `jax.debug_infs` with the function's name."""
        return FloatingPointError(
            f"a result of the tuned version of {self.__name__} has an invalid value {error.args}: call the plain "
            "function to see which operation makes it"
        )

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the plain function, as `trace` of a `jax.jit` function does. Nothing is replaced."""
        return self._traceable("trace")(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the function with all kernels that records and the cost model select: nothing is compared or timed.

        A `jax.ShapeDtypeStruct` may replace an array. The result is that of `lower` of the library that jits.
        """
        lower = self._traceable("lower")
        if self._by_library is not None:
            return lower(*args, **kwargs)
        given = CallArguments(self._static, args, kwargs, self._parameters, self._shown)
        return self._trial(self._current_options(), self._jitted, given).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the shapes and dtypes of the results, as `eval_shape` of a `jax.jit` function does."""
        return self._traceable("eval_shape")(*args, **kwargs)

    def _traceable(self, name: str) -> Any:
        """Returns the method of the jitted function, of JAX or of the library of the function's modules."""
        if self._always_opened is None:
            self._always_opened = self._must_open()
        if self._always_opened:
            raise SchedulerError(
                f"{self.__name__} holds modules or arrays, or updates its arguments in place, and {name} is for "
                "functions of their arguments alone: pass what it holds as arguments"
            )
        return getattr(self._jitted if self._by_library is None else self._by_library, name)

    def clear_cache(self) -> None:
        """Drops all decisions and compiled versions."""
        with self._guard:
            self._table.clear()
        self._changes = None
        self._jitted.clear_cache()
        if self._inner is not None:
            self._inner.clear_cache()

    def __copy__(self) -> Optimized:
        """Copies decide again."""
        return self._again(self._fn)

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimized:
        jitted = self._by_jax or is_library_jitted(self._fn)  # a deep copy of a `jax.jit` function cannot be lowered
        return self._again(self._fn if jitted else copy.deepcopy(self._fn, memo))

    def _again(self, fn: Any) -> Optimized:
        return Optimized(fn, self._on_miss, self._backends, self._keep, self._seconds, self._jit_options)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds as a method, as plain functions and those of `jax.jit` do."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def decisions(self) -> tuple[Decided, ...]:
        """The decisions, one for each kind of arguments, in the order of their first calls."""
        with self._guard:
            own = tuple(version.decided for version in self._table.values() if version is not _OPENED)
        return own + (() if self._inner is None else self._inner.decisions)

    def report(self) -> str:
        """Returns the decisions, their arguments and their reasons as text."""
        return "\n".join(map(str, self.decisions)) or f"no decision yet: {self.__name__} was not called with arrays"

    def plan(self) -> Plan:
        """Returns the plan of all decisions so far: their kernels, what XLA computes and why, and the times.

        A problem about which two decisions disagree, for example of two shapes, is left to XLA. Tuned calls that the
        function makes itself are not in the plan.

        Raises:
          SchedulerError: The function was not called yet, or has decisions for several chips.
        """
        return plan_of(self.__name__, self.decisions)

    def _current_options(self) -> tuple[dispatch.Options, ...]:
        """Returns the options now in force for each operation."""
        target, force = calls.target.value, planned.in_force()
        plan = force and InForce(force.plan)  # what a plan does not contain is left to XLA
        loss_per_gain = EVEN_ODDS if self._keep == "faster" else None
        return tuple(
            dispatch.options(
                operation, on_miss=self._on_miss, backends=named, target=target, plan=plan, loss_per_gain=loss_per_gain
            )
            for operation, named in zip(self._operations, self._named, strict=True)
        )

    def _decide(self, key: Any, tried: Callable[[], _UsedVersion]) -> _UsedVersion:
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
                        self._changes = None  # drops the version's program
            finally:
                with self._guard:
                    self._deciding.pop(key, None)
            return version

    def _compile_arrays(self, options_in_force: tuple[dispatch.Options, ...], given: CallArguments) -> _UsedVersion:
        if not self._by_jax and has_state(given.dynamic):
            return _OPENED
        try:
            return self._tried(options_in_force, self._jitted, given)
        except pure.Impure:
            return _OPENED
        except _CONCRETE:
            if self._by_jax or not given.numbers:
                raise
            return _OPENED

    def _compile_modules(self, key: Any, given: CallArguments, call: pure.PureCall) -> _UsedVersion:
        if refused := self._jit_options.keys() - {*_OF_THE_WHOLE, *_MARKS}:
            raise SchedulerError(
                f"{self.__name__} is called with modules, or updates its arguments in place, and the jax.jit options "
                f"{', '.join(refused)} apply to arrays only: pass them to the jit of the library (flax.nnx.jit), and "
                "optimize its result"
            )
        options = {name: x for name, x in self._jit_options.items() if name in _OF_THE_WHOLE}

        run = call.function  # does not reference `call`, so that its arrays can be freed

        def function(*arrays: Any) -> Outputs:
            return run(*arrays)

        function.__name__ = self.__name__
        with self._guard:
            self._constants[key[:3]] += 1
            constants = self._constants[key[:3]]
        if constants == MANY_CONSTANTS:
            warnings.warn(
                f"{self.__name__} is compiled for the {constants}th time for arrays of the same shapes, because "
                "another argument, or an attribute of its object, changes with each call. Pass changing values as "
                "arrays (jax.numpy.asarray)",
                RuntimeWarning,
                stacklevel=2,
            )
        donated = [i for i, each in enumerate(call.donated) if each]
        return self._tried(key[0], jax.jit(function, donate_argnums=donated, **options), given)

    @interruptible()
    def _tried(self, options_in_force: tuple[dispatch.Options, ...], jitted: Any, given: CallArguments) -> _UsedVersion:
        decided = self._trial(options_in_force, jitted, given).decide()
        run = decided.compiled
        if run is None:  # JAX finds the program that the trial compiled
            traced = jitted.trace(*given.args, **given.kwargs)
            run = jitted if getattr(traced.jaxpr, "effects", ()) else traced.lower().compile()
        return _UsedVersion(decided, run)

    def _trial(
        self, options_in_force: tuple[dispatch.Options, ...], jitted: Any, given: CallArguments
    ) -> FunctionTrial:
        options = {operation.name: each for operation, each in zip(self._operations, options_in_force, strict=True)}
        return FunctionTrial(self.__name__, jitted, given, options, self._seconds if self._keep == "faster" else None)


class _Inner(Optimized):
    """The jitted function that a jitted function of flax.nnx or Equinox calls with split modules."""

    def _call_undispatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._version(args, kwargs) is None:
            raise pure.Impure
        return self._jitted(*args, **kwargs)


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", None) or (_name(fn.func) if hasattr(fn, "func") else type(fn).__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class _UsedVersion:
    """The version used for calls with the same key. `run` is a compiled program, or jitted if that has effects."""

    decided: Decided
    run: Any


# Marks a key: its calls must go through `_call_opened`.
_OPENED = _UsedVersion(Decided("", "", None, ""), None)
