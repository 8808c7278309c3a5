"""Options and arguments that commands share, and their parsers."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from scheduler.cli.terminal import reserve_stdout, say
from scheduler.core import files
from scheduler.core.arguments import MOST, MOST_SEED, checked_budget
from scheduler.core.errors import SchedulerError, StoreError

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from scheduler.core.records import Key, Record
    from scheduler.measure.runner import RunnerOptions
    from scheduler.search import job_queue
    from scheduler.store.store import Store
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem


def finite(value: float | None) -> float | None:
    """Rejects non-finite values of a float option; Python also parses "nan" and "inf" as floats."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, found {value}")
    return value


def load_each(names: list[str] | None) -> list[str] | None:
    """Loads user-defined operations, so that records and misses can refer to them by name."""
    from search_spaces import load

    with usage_errors():
        for name in names or ():
            load(name)
    return names


def reject(combinations: Mapping[str, bool]) -> None:
    """Raises BadParameter with the first message of which the condition holds."""
    for message, holds in combinations.items():
        if holds:
            raise typer.BadParameter(message)


def _budget(text: str | int) -> int:
    """Parses the number of trials; an error then names the option."""
    try:
        return checked_budget(int(text) if str(text).isdecimal() else text)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


_OPERATION = "A name (matmul), package.module:NAME, or file.py:NAME."
_TIMEOUT = {"min": 0.001, "callback": finite}

OperationName = Annotated[str, typer.Argument(help=_OPERATION)]
OptionalOperation = Annotated[str | None, typer.Argument(help=_OPERATION)]
OnlyOperation = Annotated[
    str | None, typer.Option("--operation", help="Only this operation: a name, package.module:NAME, or file.py:NAME.")
]
Fields = Annotated[list[str], typer.Argument(help="The problem, as name=value: m=4096 n=4096 k=4096 dtype=bfloat16.")]
OptionalFields = Annotated[list[str] | None, typer.Argument(help="The problem, as name=value.")]
JobFile = Annotated[Path | None, typer.Option(help="A TOML file that lists problems.")]
Budget = Annotated[
    int,
    typer.Option(
        parser=_budget,
        metavar="N",
        help="Number of trials; or quick (8), default (64), or full (until nothing improves).",
    ),
]
Seconds = Annotated[float | None, typer.Option(help="Start no trial after this many seconds.", **_TIMEOUT)]
Backends = Annotated[
    str | None, typer.Option(help="Kernels to try in addition to XLA: comma-separated names, or pallas.")
]
Part = Annotated[
    str,
    typer.Option(help="i/n: every n-th problem from the i-th, for hosts that share a job but no cache."),
]
Own = Annotated[
    list[str] | None,
    typer.Option(
        callback=load_each,
        help="A user-defined operation: file.py:NAME or MODULE:NAME, in a job as the job names it. Repeatable.",
    ),
]
SamplerName = Annotated[
    str,
    typer.Option(
        "--sampler",
        help="Sampler of schedules: model (the cost model, then a surrogate), a sampler of Optuna (tpe, gp, cmaes, "
        "nsgaii, qmc, random), or module:NAME.",
    ),
]
L2State = Annotated[
    Any,
    typer.Option(
        parser=str,
        metavar="STATE",
        help="L2 cache state before each run: cold (operands in memory) or warm.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Tune again even if a valid record exists.")]
TargetChip = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        help="Part of a chip's name: v6e. For an absent chip, its compiler estimates times and nothing runs.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, max=MOST, help="Number of compile processes.  [default: one per core; on a CPU none]"),
]
Seed = Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Seed of all random draws and orders.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.", callback=reserve_stdout)]
HardwareName = Annotated[str | None, typer.Option("--hardware", help="Part of a chip's name: h200.")]
Chips = Annotated[str | None, typer.Option("--hardware", help="Only chips with this text in their names (any case).")]
Everything = Annotated[bool, typer.Option("--all", help="Include records shipped for other chips than the local one.")]
Most = Annotated[int, typer.Option(min=0, help="Maximum number of records; 0 includes all.")]
Device = Annotated[int, typer.Option(min=0, max=MOST, help="Index of the GPU among the visible ones.")]
CompileTimeout = Annotated[
    float | None, typer.Option(help="Timeout for compiling a candidate, in seconds.  [default: adapts]", **_TIMEOUT)
]
RunTimeout = Annotated[
    float | None, typer.Option(help="Timeout for running a candidate, in seconds.  [default: adapts]", **_TIMEOUT)
]


def problem_of(name: str, fields: Sequence[str]) -> tuple[Operation[Any], Problem]:
    """Returns the operation and the problem of command-line fields.

    Raises:
      ValueError: there is no such operation, or the fields are not a problem.
    """
    operation, (problem, *others) = problems_of(name, fields)
    if others:
        raise ValueError(f"{operation.name}: a range is several problems; only tune takes a range")
    return operation, problem


def problems_of(name: str, fields: Sequence[str]) -> tuple[Operation[Any], list[Problem]]:
    """Returns the operation and the problem, or the problems at the points of a range, of command-line fields.

    The fields of a row function are its arrays and static arguments.

    Raises:
      ValueError: there is no such operation, or the fields are not a problem or a range.
    """
    from scheduler.search import task
    from search_spaces import load, value_of
    from search_spaces.autotuned import arguments as written

    operation = load(name)
    function: Any = value_of(name) if ":" in name else None
    try:
        texts = field_texts(fields)
        for x, text in texts.items():
            if _OF_64_BITS.match(text) and not jax_enables_64_bits():
                raise ValueError(f"{x}={text} needs types of 64 bits: set JAX_ENABLE_X64=1")
        if not hasattr(function, "operations"):
            return operation, task.problems_of(operation, texts)
        given = {x: written.array_of(x, text) if "[" in text else written.value_of(text) for x, text in texts.items()}
        problem = function.problem(**given)
        return next(each for each in function.operations if each.problem is type(problem)), [problem]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{operation.name}: {error}") from error


# An array type that JAX makes narrower by default.
_OF_64_BITS = re.compile(r"(float64|complex128|u?int64)\[")


def jax_enables_64_bits() -> bool:
    import jax

    return bool(jax.config.read("jax_enable_x64"))


def field_texts(fields: Sequence[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for field in fields:
        key, equals, value = field.partition("=")
        if not equals:
            raise ValueError(f"a field must be name=value, found {field!r}")
        if key in texts:
            raise ValueError(f"{key} is given twice")
        texts[key] = value
    return texts


def has_fields(record: Record, operation: Operation[Any] | None, fields: Mapping[str, str]) -> bool:
    """Whether the problem of a record has these values."""
    from scheduler.core import codec
    from search_spaces import load_known
    from search_spaces.problem import canonical

    if not fields:
        return True
    try:
        values = vars((operation or load_known(record.key.operation)).problem.from_canonical(record.key.problem))
    except ValueError:  # the defaults of omitted fields are unknown without the operation
        fields_here = codec.problem_to_json(record.key.problem)
        values = fields_here if isinstance(fields_here, dict) else {}
    return all(str(values.get(name)).lower() in (text.lower(), canonical(text)) for name, text in fields.items())


def wanted_by(
    keys: Sequence[Key], operation: str | None, hardware: str | None, fields: Sequence[str] | None = None
) -> Callable[[Key], bool]:
    """Returns a filter for keys of an operation, of a chip that matches the name `hardware`, and of one problem.

    None disables a condition.

    Raises:
      BadParameter: the operation or the chip is unknown, and does not occur in `keys`; `fields` are not a problem.
    """
    from search_spaces import OPERATIONS, load
    from search_spaces.space import unknown

    problem = None
    if fields:
        with usage_errors():
            loaded, one = problem_of(str(operation), fields)
        operation, problem = loaded.name, one.canonical()
    elif operation is not None:
        if ":" in operation:
            with usage_errors():
                operation = load(operation).name
        elif operation not in (known := dict.fromkeys((*OPERATIONS, *(key.operation for key in keys)))):
            raise typer.BadParameter(f"no operation {unknown(operation, known)}")
    if hardware is None:
        return lambda key: operation in (None, key.operation) and problem in (None, key.problem)
    from scheduler.core.hardware import named, table, unknown_chip

    kinds = dict.fromkeys((*(row.kind for row in table()), *(key.hardware for key in keys)))
    meant = {row.id for row in table() if named(hardware, row.names)}  # includes names other than the driver's
    if not meant and not named(hardware, kinds):
        raise typer.BadParameter(f"no hardware {unknown_chip(hardware, kinds)}")
    return lambda key: (
        operation in (None, key.operation)
        and problem in (None, key.problem)
        and (key.hardware in meant or bool(named(hardware, [key.hardware])))
    )


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Converts a ValueError to a usage error of the command line, with status 2."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@contextlib.contextmanager
def file_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SchedulerError(f"{file}: {reason}") from error


def require_writable(file: Path) -> None:
    """Raises an error if `file` is not writable, so that a long command fails at once. The content is unchanged."""
    with file_errors(file):
        there = file.exists()
        file.open("a").close()
        if not there:
            file.unlink()


def require_directory(path: Path) -> None:
    """Creates a directory before the work that writes files into it. Its parent must exist."""
    with file_errors(path):
        path.mkdir(exist_ok=True)


def read_text(file: Path) -> str:
    with file_errors(file):
        return files.read_text(file)


def hardware_here(device: int) -> Hardware:
    """Returns the chip of this machine. A worker process queries a GPU, so that this process does not hold it."""
    from scheduler.core import hardware as chips
    from scheduler.measure.gpu import Gpu
    from scheduler.measure.pool import Pool
    from scheduler.measure.runner import RunnerOptions

    if (gpu := Gpu.wanted(device)) is not None:
        with Pool(gpu, RunnerOptions(workers=1)) as pool:
            return pool.hardware
    return chips.detect()


def chip_of(identity: str) -> Hardware | None:
    """Returns the chip of a record, or None if it is not in the table of chips."""
    from scheduler.core import hardware

    return hardware.identified(identity)


# ------------------------------------------------------------------------------
# Access of commands to the stores.

T = TypeVar("T")
# The location that `ask_stores` returns for the store shipped with this package.
SHIPPED = "shipped"


def user_store() -> Store:
    from scheduler.store.store import Store, default_url

    return Store(default_url())


# The errors of unreadable stores that were reported, while a command runs.
_unreadable: ContextVar[list[str]] = ContextVar("unreadable")


@contextlib.contextmanager
def all_stores_read() -> Iterator[None]:
    """Ends a command with status 1 after its output if a store could not be read, which may have held more."""
    token = _unreadable.set([])
    try:
        yield
        if _unreadable.get():
            raise typer.Exit(1)
    finally:
        _unreadable.reset(token)


def ask_stores(ask: Callable[[Store], T]) -> Iterator[tuple[str, T]]:
    """Yields the location and result of `ask` for each store that calls read. Each unreadable one is reported once."""
    from scheduler.store.store import shipped

    for opened in (user_store, shipped):
        try:
            if (store := opened()) is None:
                continue
            answer = ask(store)
        except StoreError as error:
            if str(error) not in (reported := _unreadable.get()):
                reported.append(str(error))
                say(f"tile-scheduler: {error} (continuing without it)")
        else:
            yield SHIPPED if opened is shipped else store.location, answer


def open_stores() -> list[Store]:
    """Returns the readable stores among those that calls read. Unreadable stores are reported."""
    from scheduler.core.records import Key

    def readable(store: Store) -> Store:
        store.get(Key("", "", ""))
        return store

    return [store for _, store in ask_stores(readable)]


def records_of(store: Store, operation: str | None, hardware: str | None) -> list[Record]:
    """Returns the records of a store that match command-line options."""
    keys = [head.key for head in store.heads()]
    wanted = wanted_by(keys, operation, hardware)
    return list(store.read(filter(wanted, keys)))


# ------------------------------------------------------------------------------
# Where searches run.

Devices = Annotated[
    str | None,
    typer.Option(
        help="GPUs of one kind that share the problems: all, indices among the visible ones (0,2,3), or those of a Ray "
        "cluster: ray, or ray:ADDRESS with HOST:PORT or local (starts a cluster on this host).  [default: one]"
    ),
]


def runner_options(
    device: int,
    workers: int | None,
    compile_timeout_s: float | None,
    run_timeout_s: float | None,
    hardware: str | None = None,
) -> RunnerOptions:
    from scheduler.core.hardware import find
    from scheduler.measure.runner import RunnerOptions

    with usage_errors():
        kind = "" if hardware is None else find(hardware).kind
    return RunnerOptions(device, workers, compile_timeout_s, run_timeout_s, hardware=kind)


@contextlib.contextmanager
def executors(
    devices: str | None, operation: Operation[Any] | None, options: RunnerOptions
) -> Iterator[Sequence[job_queue.Executor]]:
    """Yields an executor for each device, and closes them.

    "all" without a GPU is this CPU, and None is the device of `options`.

    Args:
      operation: one of the operations to search; None if there is none, and no executor is needed.

    Raises:
      BadParameter: `devices` is malformed, names a device that is absent, names one twice, or names GPUs of several
        kinds.
      SchedulerError: no Ray cluster of this address can be used.
    """
    from scheduler.measure.gpu import Gpu
    from scheduler.search import job_queue
    from search_spaces import value_of

    if operation is None:
        yield []
        return
    if devices is not None and devices.partition(":")[0] == "ray":
        cluster = value_of("scheduler.contrib.fleet.ray_cluster:executors")
        with cluster(devices.partition(":")[2] or "auto", options) as found:
            yield found
        return
    chips = {} if devices is None else Gpu.chips()
    if chips or devices not in (None, "all"):
        with usage_errors():
            local = job_queue.gpu_executors(operation, _indices(str(devices), chips), options)
    else:
        local = [job_queue.DeviceExecutor.for_operation(operation, options)]
    try:
        yield local
    finally:
        for executor in local:
            executor.close()


def _indices(text: str, chips: dict[int, str]) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if text != "all" and not all(word.isdecimal() and word.isascii() for word in words):
        raise ValueError(f"--devices must be all, indices such as 0,2,3, or ray, found {text!r}")
    indices = list(chips) if text == "all" else [int(word) for word in words]
    if len(set(indices)) < len(indices):
        raise ValueError(f"--devices {text} contains a GPU twice")
    if missing := [index for index in indices if index not in chips]:
        there = f"visible: {', '.join(map(str, chips))}" if chips else "none is visible"
        raise ValueError(f"--devices wants visible GPUs, found {', '.join(map(str, missing))} ({there})")
    kinds: dict[str, list[str]] = {}
    for index in indices:
        kinds.setdefault(chips[index], []).append(str(index))
    if len(kinds) > 1:
        found = "; ".join(f"{kind}: --devices {','.join(those)}" for kind, those in kinds.items())
        raise ValueError(f"--devices wants GPUs of one kind; run the job once for each kind ({found})")
    return indices
