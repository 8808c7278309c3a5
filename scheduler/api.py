"""Public API: ``tuned`` for any operation, ``tune`` and ``predict``, and the functions that configure them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import reprlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from scheduler.core import arguments, text
from scheduler.core import hardware as chips
from scheduler.core.arguments import named_backends
from scheduler.core.records import Record
from scheduler.core.status_line import SearchStatus
from scheduler.dispatch import calls, dispatch
from scheduler.dispatch.dispatch import OnMiss
from scheduler.dispatch.stored import evidence
from scheduler.measure.runner import Runner, RunnerOptions
from scheduler.prediction import predict as prediction
from scheduler.prediction.predict import Answer
from scheduler.search import candidates, tuner
from scheduler.search.task import SearchOptions
from scheduler.store.store import require_store
from search_spaces import OPERATIONS, load, run_by, stop_script_import
from search_spaces.bindings import drop_traces
from search_spaces.operation import BoundCall, Operation, Unsupported
from search_spaces.problem import Problem
from search_spaces.space import unknown

if TYPE_CHECKING:
    from scheduler.core.progress import Progress
    from scheduler.store.store import Store

Backends = str | Sequence[str]
# Keyword arguments of `tune`: those that make its `SearchOptions`, and all.
_SEARCH = tuple(field.name for field in dataclasses.fields(SearchOptions) if field.name != "backends")
_OPTIONS = ("store", "backends", "hardware", "runner", "options", "progress", *_SEARCH)
# Types that a call accepts as an array, with or without values.
_ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


def tuned(operation: Operation[Any] | str) -> Callable[..., Any]:
    """Returns a function that runs `operation` with the best known schedule, as `tuned_matmul` does for matmul.

    `operation` may be a name, as accepted by `search_spaces.load`. The signature of the function is
    ``f(*arrays, on_miss=None, backends=None, schedule=None, **params)``. The operation's `front_end` defines `arrays`
    and `params`. Without a `front_end`, `arrays` have the shapes of ``operation.problem.operands()``, and `params` are
    the fields of the problem that the shapes do not determine, plus the operation's own `params`, which are passed to
    the kernel. An operation with several results returns a tuple. The other arguments and the errors are those of
    `tuned_matmul`. The operation's rules for differentiation, vmap and sharding apply, or the default rules (see
    `Operation`).

    Raises:
      TypeError, ValueError: `operation` is not an operation or the name of one.
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
        """Returns the problem of a call with these arrays or `jax.ShapeDtypeStruct`s; raises as `_problem_of_call`."""
        return _problem_of_call(operation, arrays, params)

    call.operation, call.problem = operation, problem  # type: ignore[attr-defined]
    call.tune = functools.partial(tune, call)  # type: ignore[attr-defined]
    backends_here = ", ".join(operation.backends)
    call.__doc__ = f"{operation.name} by the best known schedule (backends: {backends_here}); see `scheduler.tuned`."
    return call


@contextlib.contextmanager
def target(kind: str) -> Iterator[None]:
    """Selects schedules for another chip: ``with target("NVIDIA H200"): jitted.trace(a, b).lower(...)``.

    The context applies while a call is traced. `jax.jit` keeps separate traces for calls inside and outside of the
    context. A chip that is not present cannot be measured, so ``on_miss="tune"`` then means "model".

    Raises:
      ValueError: unknown chip; the message lists the known ones.
    """
    chips.find(arguments.checked_text("kind", kind))
    with calls.target(kind):
        yield


def reload() -> None:
    """Clears the schedules selected so far, so that the next calls read the stores and the environment again.

    Functions that the caller's own `jax.jit` has compiled keep their schedules: clear them with
    ``jitted.clear_cache()``.
    """
    dispatch.reload()
    calls.forget()
    drop_traces()


def forget(operation: Operation[Any]) -> None:
    """Clears the schedules selected for `operation`; required after its kernels or its reference change."""
    dispatch.forget(operation)
    calls.forget(operation)


def tune(
    operation: Operation[Any] | str | Callable[..., Any],
    *args: Any,
    store: Store | None = None,
    backends: Backends | None = None,
    hardware: str = "",
    runner: Runner | None = None,
    options: RunnerOptions | None = None,
    progress: bool | Callable[[Progress], None] = True,
    **named: Any,
) -> Record:
    """Searches for the best schedule of a problem on the local device, stores it, and makes calls use it.

    The problem is given as ``tune(f, problem, budget=64)``, or by the arguments of a call, as
    ``tune(f, *arrays, **options, budget=64)``. Functions created by `tuned` and `autotune` accept the latter as
    ``f.tune(*arrays, **options, budget=64)``.

    If `store` already has a valid record, that record is returned without a search. If no schedule of a backend ran,
    the function warns, lists the backend in the record's `failed`, and the next `tune` tries the backend again.

    Args:
      operation: an `Operation`, its name as accepted by `search_spaces.load`, or a function that runs it
        (`tuned_matmul`).
      args: a problem of that operation, or a dict of its fields; or the positional arguments of a call, arrays or
        `jax.ShapeDtypeStruct`s.
      store: a `Store`. None means the user's own store, which calls read first; for a search on a recording, None means
        no store.
      backends: the kernels to try in addition to the library, named as in `tuned_matmul`; None tries all.
      hardware: a chip, by a part of its name; "" means the local one. Times for a chip that is not present are
        estimates by its compiler (`Record.estimated`), which the extra `tpu` installs.
      runner, options: what runs the candidates, as in `search.tuner.tune`.
      progress: True shows on standard error how far the search is, False shows nothing. A function is called before
        the first trial and after each.
      named: `budget`, `seconds`, `seed`, `l2`, `force`, `first_error`, `sampler`: as in `search.task.SearchOptions`.
        With arrays, also the keyword arguments of the call. If a parameter has the same name as one of these or of the
        arguments above, give the problem instead: ``tune(f, f.problem(x, seed=3), seed=0)``.

    Raises:
      ValueError: unknown operation, field, backend or chip, or a call that no kernel supports.
      TypeError: an argument of the wrong type or an unknown name; the message says what is expected.
      NoCandidate, CandidateFailed, WorkerError: as in `search.tuner.tune`.
    """
    stop_script_import()
    require_store(store)
    arguments.checked_text("hardware", hardware)
    search = {name: named.pop(name) for name in _SEARCH if name in named}
    operation, problem = _named(operation, args, named, frozenset(search))
    recorded = isinstance(runner, candidates.Recorded)
    cache = dispatch.user_cache() if store is None and not recorded else store
    if hardware:
        options = dataclasses.replace(options or RunnerOptions(), hardware=chips.find(hardware).kind)
    if not (isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress={progress!r} is a {type(progress).__name__}; give True, False or a function")
    with contextlib.ExitStack() as stack:
        if progress is True:
            status = SearchStatus()
            stack.enter_context(status.shown(f"{operation.name} {problem}"))
            progress = status.search
        record = tuner.tune(
            operation,
            problem,
            store=cache,
            runner=runner,
            options=options,
            progress=progress or None,
            backends=named_backends(operation, backends),
            **search,
        )
    for lost in record.failed:
        text.warn_safely(lost)
    reload()
    if store is None and not recorded:
        dispatch.user_cache().remember(record)
    return record


def predict(
    operation: Operation[Any] | str | Callable[..., Any],
    problem: Problem | Mapping[str, Any],
    *,
    backends: Backends | None = None,
    hardware: str = "",
) -> Answer:
    """Returns the top prediction for `problem` on the chip `hardware`, by a part of its name, without measuring.

    "" means the chip of `scheduler.target`, and without that context the local device. Stored records of similar
    problems on that chip contribute to the prediction. If there is a valid record of the problem, the result is that
    record's schedule.
    """
    operation, args = _named(operation, (problem,))
    named = arguments.checked_text("hardware", hardware) or calls.target.value
    chip = chips.find(named) if named else chips.detect()
    found = evidence(dispatch.user_cache(), operation, args, chip)
    return prediction.predict(operation, args, chip, backends=named_backends(operation, backends), records=found)


def _named(
    given: Any, args: tuple[Any, ...], options: Mapping[str, Any] | None = None, search: frozenset[str] = frozenset()
) -> tuple[Operation[Any], Problem]:
    """Returns the operation and its problem.

    Args:
      args: a problem, a dict of its fields, or the positional arguments of a call.
      options: keyword arguments of the call.
      search: names of the search options.
    """
    operation, named = _operation_of(given), dict(options or {})
    if not args and "problem" in named:
        args = (named.pop("problem"),)
    if any(isinstance(x, _ARRAYS) for x in jax.tree.leaves((args, named))):
        pose = getattr(given, "problem", None) if isinstance(given, types.FunctionType) else None
        decorated = isinstance(given, types.FunctionType) and hasattr(given, "__wrapped__")
        called = inspect.signature(given).parameters if decorated else ()
        known = dict.fromkeys((*operation.options, *called, *_OPTIONS))
        for name in named:
            if name not in known:
                raise TypeError(f"{operation.name} has no option {unknown(name, known)}")
        for name in search.intersection(operation.options):
            raise TypeError(
                f"{name} is an option of the search and a parameter of {operation.name}: pass the problem, "
                f"tune(f, f.problem(..., {name}=...), {name}=...)"
            )
        problem = _problem_of_call(operation, args, named) if pose is None else pose(*args, **named)
        return _operation_for(given, operation, problem), problem
    for name in named:
        raise TypeError(f"tune has no option {unknown(name, _OPTIONS)}")
    if len(args) == 1 and isinstance(args[0], Problem):
        operation = _operation_for(given, operation, args[0])
    if len(args) == 1 and isinstance(args[0], operation.problem):
        return operation, args[0]
    if len(args) != 1 or isinstance(args[0], Problem) or not isinstance(args[0], Mapping):
        fields = ", ".join(field.name for field in dataclasses.fields(operation.problem))
        found = ", ".join(map(reprlib.repr, args)) or "nothing"
        raise TypeError(
            f"expected arrays as in a call of {operation.name}, a problem, or a dict of its fields ({fields}), found "
            f"{found}"
        )
    # As on the command line; a type such as `jnp.float32` is its dtype's name.
    texts = {name: jnp.dtype(x).name if isinstance(x, type) else str(x) for name, x in args[0].items()}
    return operation, operation.problem.parse(texts)


def _problem_of_call(operation: Operation[Any], arrays: Sequence[Any], params: Mapping[str, Any]) -> Problem:
    """Returns the problem of a call with these arrays or `jax.ShapeDtypeStruct`s.

    Raises:
      ValueError: no kernel supports the call; the message has the reason.
    """
    bound: list[BoundCall[Any] | Unsupported] = []
    named = {name: x for name, x in params.items() if isinstance(x, _ARRAYS)}
    options = {name: x for name, x in params.items() if name not in named}
    jax.eval_shape(lambda xs, named: bound.append(operation.bind(*xs, **named, **options)), tuple(arrays), named)
    if isinstance(bound[0], Unsupported):
        raise ValueError(f"no kernel can be selected for this call of {operation.name}: {bound[0].reason}")
    return bound[0].problem


def _operation_of(given: Any) -> Operation[Any]:
    if isinstance(given, str):
        return load(given)
    if (operation := run_by(given)) is not None:
        return operation
    raise TypeError(
        f"expected an Operation, a tuned function or one of {', '.join(map(repr, OPERATIONS))}, found {given!r}"
    )


def _operation_for(given: Any, operation: Operation[Any], problem: Problem) -> Operation[Any]:
    """Returns the operation with problems of this type, among those of a function; by default `operation`."""
    each = getattr(given, "operations", ()) if isinstance(given, types.FunctionType) else ()
    return next((other for other in each if other.problem is type(problem)), operation)
