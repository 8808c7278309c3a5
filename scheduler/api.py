"""The public calls: those of row-wise operations, ``tuned`` for any operation, and what steers them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import reprlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Never, overload

import jax
import jax.numpy as jnp
import numpy as np

from scheduler.core import checked, safe_text
from scheduler.core import hardware as chips
from scheduler.core.backends import named_backends
from scheduler.core.records import Record
from scheduler.dispatch import calls, dispatch
from scheduler.dispatch.dispatch import OnMiss
from scheduler.dispatch.stored import evidence
from scheduler.measure.runner import RunnerOptions
from scheduler.prediction.between import answer
from scheduler.prediction.predict import Answer
from scheduler.search import candidates, tuner
from search_spaces import OPERATIONS, end_load, load, run_by
from search_spaces.autotuned.rebinding import drop_traces
from search_spaces.operation import Bound, Operation, Unbound
from search_spaces.problem import Problem
from search_spaces.silu_and_mul import SILU_AND_MUL
from search_spaces.softmax import SOFTMAX
from search_spaces.softmax_with_lse import SOFTMAX_WITH_LSE
from search_spaces.space import unknown

if TYPE_CHECKING:
    from scheduler.store.store import Store

Backends = str | Sequence[str]
# What a call takes as an array, whether it has values or not.
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


@overload
def tuned_softmax(
    x: Any,
    axis: int = -1,
    *,
    return_lse: Literal[False] = False,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
) -> jax.Array: ...
@overload
def tuned_softmax(
    x: Any,
    axis: int = -1,
    *,
    return_lse: Literal[True],
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
) -> tuple[jax.Array, jax.Array]: ...
def tuned_softmax(
    x: Any,
    axis: int = -1,
    *,
    return_lse: bool = False,
    on_miss: OnMiss | None = None,
    backends: Backends | None = None,
    schedule: Any = None,
    **others: Never,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """``jax.nn.softmax(x, axis)`` by the best known schedule for its shape on this chip.

    It is computed in float32 and rounded once; or, of bfloat16 and float16, in the dtype of `x`, as `jax.nn.softmax`
    does it, where that program of XLA's was measured to be the fastest (``schedule={"program": "float32"}`` or
    ``backends="pallas"`` leaves it out). Along another axis it is `jax.nn.softmax`. Integers are converted first, so
    that unsigned ones do not wrap.

    Works where `tuned_matmul` works; derivatives are XLA's. XLA also answers for another axis than the last, for
    arrays other than float32, bfloat16 or float16, and for empty ones; with `return_lse` also on a mesh outside of
    manual axes.

    Args:
      x: ``[..., columns]``.
      axis: along which the results sum to 1: an integer, several in a tuple, or None for all.
      return_lse: return ``jax.nn.logsumexp(x, axis)`` in float32, too. It is an operation of its own,
        "softmax_with_lse", tuned as such, and always computed in float32.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      An array of the shape and dtype of `x`; or that and the log-sum-exp, ``[...]`` without `axis`.

    Raises:
      CacheMiss, NoCandidate, IllegalSchedule, TypeError, ValueError: as `tuned_matmul`.
    """
    if others:
        raise calls.unexpected(tuned_softmax, others)
    called = _SOFTMAX_WITH_LSE if calls.flag("return_lse", return_lse) else _SOFTMAX
    return calls.answer(called, (on_miss, backends, schedule, calls.axes(axis)), x)


def tuned_silu_and_mul(
    x: Any, *, on_miss: OnMiss | None = None, backends: Backends | None = None, schedule: Any = None, **others: Never
) -> jax.Array:
    """``silu(x[..., :d]) * x[..., d:]`` with ``silu(g) = g / (1 + exp(-g))``, by the best known schedule.

    It is computed in float32 and rounded once; or, of bfloat16 and float16, in the dtype of `x`, as
    ``jax.nn.silu(gate) * up`` is, where that program of XLA's was measured to be the fastest
    (``schedule={"program": "float32"}`` or ``backends="pallas"`` leaves it out).

    Works where `tuned_matmul` works; its gradient is a tuned call, too ("silu_and_mul_backward"). XLA also answers for
    arrays other than float32, bfloat16 or float16, and for empty ones.

    Args:
      x: ``[..., 2 * d]``; the first half of the last axis is the gate.
      on_miss, backends, schedule: as in `tuned_matmul`.

    Returns:
      ``[..., d]``, of the dtype of `x`.

    Raises:
      ValueError: the last axis has no two halves.
      TypeError: `x` holds integers or truth values, as `jax.nn.silu` raises it.
      CacheMiss, NoCandidate, IllegalSchedule: as `tuned_matmul`.
    """
    if others:
        raise calls.unexpected(tuned_silu_and_mul, others)
    return calls.answer(_SILU_AND_MUL, (on_miss, backends, schedule), x)


def tuned(operation: Operation[Any] | str) -> Callable[..., Any]:
    """A function that runs `operation` by the best known schedule: the treatment of `tuned_matmul` for any kernel.

    `operation` may be given by its name, as `search_spaces.load` takes it. The function is
    ``f(*arrays, on_miss=None, backends=None, schedule=None, **params)``. What `arrays` and `params` are says the
    operation's `front_end`. Without one, `arrays` are shaped as ``operation.problem.operands()`` says, and `params` are
    fields of the problem that shapes do not tell, and the operation's own `params`, which reach the kernel; an
    operation with several results returns a tuple. The other arguments and errors are those of `tuned_matmul`.
    It differentiates, batches and shards by the operation's rules, or by their defaults (see `Operation`).

    Raises:
      TypeError, ValueError: `operation` is none, and no name of one.
    """
    operation = _operation_of(operation)

    def call(
        *arrays: Any,
        on_miss: OnMiss | None = None,
        backends: Backends | None = None,
        schedule: Any = None,
        **params: Any,
    ) -> Any:
        named = {name: params.pop(name) for name in list(params) if isinstance(params[name], _ARRAYS)}
        called = calls.signature(operation, tuple(params), tuple(named))
        return calls.answer(called, (on_miss, backends, schedule, *params.values()), *arrays, *named.values())

    call.__name__ = call.__qualname__ = f"tuned_{operation.name}"

    def problem(*arrays: Any, **params: Any) -> Problem:
        """The problem that a call poses, of arrays or `jax.ShapeDtypeStruct`; a ValueError says why there is none."""
        return _posed_by(operation, arrays, params)

    call.operation, call.problem = operation, problem  # type: ignore[attr-defined]
    call.tune = functools.partial(tune, call)  # type: ignore[attr-defined]
    backends_here = ", ".join(operation.backends)
    call.__doc__ = f"{operation.name} by the best known schedule (backends: {backends_here}); see `scheduler.tuned`."
    return call


@contextlib.contextmanager
def target(kind: str) -> Iterator[None]:
    """Answer for a chip that is not here: ``with target("NVIDIA H200"): jitted.trace(a, b).lower(...)``.

    It matters while a call is traced; what `jax.jit` has traced outside of it is traced again here, and the other way
    round. What is not here cannot be measured: ``on_miss="tune"`` then means "model".

    Raises:
      ValueError: no such chip is known; the message names those that are.
    """
    chips.find(checked.text("kind", kind))
    with calls.target(kind):
        yield


def reload() -> None:
    """Forgets the answers given so far, so that the next calls ask the stores and the environment again.

    What the caller's own `jax.jit` has compiled keeps its schedules: clear it with ``jitted.clear_cache()``.
    """
    dispatch.reload()
    calls.forget()
    drop_traces()


def forget(operation: Operation[Any]) -> None:
    """Forgets the answers to calls of one operation, whose kernels or reference now compute something else."""
    dispatch.forget(operation)
    calls.forget(operation)


def tune(
    operation: Operation[Any] | str | Callable[..., Any],
    *posed: Any,
    store: Store | None = None,
    backends: Backends | None = None,
    hardware: str = "",
    **named: Any,
) -> Record:
    """Searches the best schedule of a problem on this machine's device, stores it and lets calls use it.

    ``tune(f, problem, budget=64)``; or, of the problem that a call poses, ``tune(f, *arrays, **options, budget=64)``,
    which ``f.tune(*arrays, **options, budget=64)`` is, too, for functions by `tuned` and `autotune`.

    Where `store` has a record already that still holds, that is the answer, and nothing is searched. A backend none of
    whose schedules ran is warned of, and named in the record's `failed`; the next `tune` tries it again.

    Args:
      operation: an `Operation`, its name as in `search_spaces.load`, or a function that runs it (`tuned_matmul`).
      posed: a problem of that operation, or its fields; or what a call of the operation takes by place: arrays, or
        `jax.ShapeDtypeStruct` in place of them.
      store: a `Store`; None is the one that calls ask first, the user's own, and none where a recording is searched.
      backends: the kernels to try beside the library, named as in `tuned_matmul`; None tries all.
      hardware: a chip, by a part of its name; "" is the one that is here. Times of another are what its compiler, which
        the extra `tpu` installs, estimates (`Record.estimated`).
      named: `force`, `first_error`, `budget`, `effort`, `seconds`, `seed`, `sampler`, `l2`, `runner`, `options`,
        `progress`: as in `search.tuner.tune`. Beside arrays, what else the call takes by name. A parameter that is
        named as one of these, or as an argument above, is given by its problem: ``tune(f, f.problem(x, seed=3),
        seed=0)``.

    Raises:
      ValueError: an unknown operation, field, backend or chip; the call poses no problem.
      TypeError: an argument of another type or name, with what is wanted.
      NoCandidate, CandidateFailed, WorkerError: as `search.tuner.tune`.
    """
    end_load()
    if isinstance(store, str | os.PathLike):
        raise TypeError(f"store={store!r} is a path; give the store there: scheduler.Store({str(store)!r})")
    checked.text("hardware", hardware)
    search = {name: named.pop(name) for name in tuner.OPTIONS if name in named}
    operation, problem = _named(operation, posed, named, frozenset(search))
    recorded = isinstance(search.get("runner"), candidates.Recorded)
    cache = dispatch.user_cache() if store is None and not recorded else store
    if hardware:
        options = search.get("options") or RunnerOptions()
        search["options"] = dataclasses.replace(options, hardware=chips.find(hardware).kind)
    record = tuner.tune(operation, problem, store=cache, backends=named_backends(operation, backends), **search)
    for lost in record.failed:
        safe_text.warn(lost)
    reload()
    if store is None and not recorded:
        dispatch.user_cache().remember(record)
    return record


def predict(
    operation: Operation[Any] | str | Callable[..., Any],
    problem: Problem | Mapping[str, Any],
    *,
    kind: str | None = None,
    backends: Backends | None = None,
) -> Answer:
    """The top prediction for `problem`, on this machine's device or the chip of that `kind`; measures nothing.

    What is stored of similar problems on that chip counts; what is stored of this one, or of a range that it lies in,
    and still holds, is the answer.
    """
    operation, posed = _named(operation, (problem,))
    chip = chips.detect() if kind is None else chips.find(checked.text("kind", kind))
    found = evidence(dispatch.user_cache(), operation, posed, chip)
    among = named_backends(operation, backends)
    return answer(operation, posed, chip, backends=among, records=found.records, ranges=found.ranges)


def _named(
    given: Any, posed: tuple[Any, ...], options: Mapping[str, Any] | None = None, search: frozenset[str] = frozenset()
) -> tuple[Operation[Any], Problem]:
    """The operation, and its problem: itself, its fields, or of what a call takes by place and by name.

    Args:
      options: what the call takes by name.
      search: names of what the search is told.
    """
    operation, named = _operation_of(given), dict(options or {})
    if not posed and "problem" in named:
        posed = (named.pop("problem"),)
    if any(isinstance(x, _ARRAYS) for x in jax.tree.leaves((posed, named))):
        pose = getattr(given, "problem", None) if isinstance(given, types.FunctionType) else None
        known = (*operation.options, *_parameters(given), *tuner.OPTIONS)
        for name in named:
            if name not in known:
                raise TypeError(f"{operation.name} has no option {unknown(name, known)}")
        for name in search.intersection(operation.options):
            raise TypeError(
                f"{name} is the search's here, and a parameter of {operation.name}, too: give tune the problem, "
                f"tune(f, f.problem(..., {name}=...), {name}=...)"
            )
        return operation, _posed_by(operation, posed, named) if pose is None else pose(*posed, **named)
    for name in named:
        raise TypeError(f"tune has no option {unknown(name, ('store', 'backends', 'hardware', *tuner.OPTIONS))}")
    if len(posed) == 1 and isinstance(posed[0], operation.problem):
        return operation, posed[0]
    if len(posed) != 1 or isinstance(posed[0], Problem) or not isinstance(posed[0], Mapping):
        fields = ", ".join(field.name for field in dataclasses.fields(operation.problem))
        found = ", ".join(map(reprlib.repr, posed)) or "nothing"
        raise TypeError(
            f"{found} is no problem of {operation.name}: give arrays, as a call does, or a problem, or a dict of its "
            f"fields ({fields})"
        )
    return operation, operation.problem.parse({name: _typed(value) for name, value in posed[0].items()})


def _parameters(function: Any) -> tuple[str, ...]:
    """Names of what a decorated function takes; of another, and of what is no function, none."""
    if not isinstance(function, types.FunctionType) or not hasattr(function, "__wrapped__"):
        return ()
    return tuple(inspect.signature(function).parameters)


def _posed_by(operation: Operation[Any], arrays: Sequence[Any], params: Mapping[str, Any]) -> Problem:
    """The problem that a call poses, of arrays or `jax.ShapeDtypeStruct`; a ValueError says why there is none."""
    bound: list[Bound[Any] | Unbound] = []
    named = {name: x for name, x in params.items() if isinstance(x, _ARRAYS)}
    options = {name: x for name, x in params.items() if name not in named}
    jax.eval_shape(lambda xs, named: bound.append(operation.bind(*xs, **named, **options)), tuple(arrays), named)
    if isinstance(bound[0], Unbound):
        raise ValueError(f"this call of {operation.name} poses no problem: {bound[0].reason}")
    return bound[0].problem


def _operation_of(given: Any) -> Operation[Any]:
    if isinstance(given, str):
        return load(given)
    if (operation := run_by(given)) is not None:
        return operation
    raise TypeError(f"{given!r} is no Operation, nor a tuned function; by name: {', '.join(map(repr, OPERATIONS))}")


_functions: tuple[tuple[Any, Operation[Any]], ...] = (
    (tuned_silu_and_mul, SILU_AND_MUL),
    (tuned_softmax, SOFTMAX),
)
for _function, _its in _functions:
    _function.operation = _its


def _typed(value: Any) -> str:
    """A field's value as a command line has it; `jnp.float32` is a type, and a dtype by its name."""
    return jnp.dtype(value).name if isinstance(value, type) else str(value)


_SOFTMAX, _SOFTMAX_WITH_LSE = calls.Signature(SOFTMAX, ("axis",)), calls.Signature(SOFTMAX_WITH_LSE, ("axis",))
_SILU_AND_MUL = calls.Signature(SILU_AND_MUL)
