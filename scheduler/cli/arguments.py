"""Options and arguments that commands share, and their parsers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.core import files
from scheduler.core.checked import MOST, MOST_SEED
from scheduler.core.errors import SchedulerError

if TYPE_CHECKING:
    from scheduler.core.hardware import Hardware
    from scheduler.core.records import Key, Record
    from scheduler.search.task import RangeTask, Task
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem


def finite(value: float | None) -> float | None:
    """Rejects non-finite values of a float option; Python also parses "nan" and "inf" as floats."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"a finite number is wanted, found {value}")
    return value


Seed = Annotated[int, typer.Option(min=0, max=MOST_SEED, help="Of every random draw and order.")]


OperationName = Annotated[str, typer.Argument(help="A name (matmul), package.module:NAME, or file.py:NAME.")]


Fields = Annotated[list[str], typer.Argument(help="The problem, as name=value: m=4096 n=4096 k=4096 dtype=bfloat16.")]


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]


HardwareName = Annotated[str | None, typer.Option("--hardware", help="A chip by a part of its name: h200.")]


Chips = Annotated[str | None, typer.Option("--hardware", help="Only chips whose name contains this, in any case.")]


Everything = Annotated[
    bool, typer.Option("--all", help="Also what is shipped for other chips than the one that is here.")
]


Device = Annotated[int, typer.Option(min=0, max=MOST, help="Which GPU, by its index among the visible ones.")]


Part = Annotated[
    str | None,
    typer.Option(help="i/n: every n-th problem of the job from the i-th, for hosts that share it and no cache."),
]


Own = Annotated[
    list[str] | None,
    typer.Option(help="An operation of one's own that the job may name, as the job has it: file.py:NAME. Repeatable."),
]


CompileTimeout = Annotated[
    float | None,
    typer.Option(min=0.001, callback=finite, help="Seconds to build one candidate, at most.  [default: adapts]"),
]


RunTimeout = Annotated[
    float | None,
    typer.Option(
        min=0.001, callback=finite, help="Seconds on the device for one candidate, at most.  [default: adapts]"
    ),
]


def problem_of(name: str, fields: Sequence[str]) -> tuple[Operation[Any], Problem]:
    from search_spaces import load

    operation = load(name)
    try:
        return operation, operation.problem.parse(field_texts(fields))
    except ValueError as error:
        raise ValueError(f"{operation.name}: {error}") from error


def named_task(operation: Operation[Any], fields: Sequence[str], search: Mapping[str, Any]) -> Task | RangeTask:
    """Returns the search task for the problem, or the range of problems, of command-line fields.

    Args:
      operation: the operation.
      fields: the fields, as ``name=value``.
      search: the search options of the task.

    Raises:
      ValueError: the fields are not a problem or a range.
    """
    from scheduler.search import jobs

    try:
        return jobs.task_of(operation, field_texts(fields), **search)
    except ValueError as error:
        raise ValueError(f"{operation.name}: {error}") from error


def range_of(name: str, fields: Sequence[str]) -> tuple[Operation[Any], str, Problem, Problem] | None:
    """Returns the operation, the extent and the problems at both ends of a range; None if no field is a range."""
    from scheduler.search.range_text import ends_of, is_range
    from search_spaces import load

    if not any(is_range(field.partition("=")[2]) for field in fields):
        return None
    operation = load(name)
    try:
        ends = ends_of(operation, field_texts(fields))
    except ValueError as error:
        raise ValueError(f"{operation.name}: {error}") from error
    return None if ends is None else (operation, *ends)


def field_texts(fields: Sequence[str]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for field in fields:
        key, equals, value = field.partition("=")
        if not equals:
            raise ValueError(f"a field is name=value, not {field!r}")
        if key in texts:
            raise ValueError(f"{key} is given twice")
        texts[key] = value
    return texts


def has_fields(record: Record, operation: Operation[Any] | None, fields: Mapping[str, str]) -> bool:
    """Whether the problem of a record has these values."""
    from search_spaces import load_known
    from search_spaces.dtypes import canonical

    if not fields:
        return True
    try:
        values = vars((operation or load_known(record.key.operation)).problem.from_canonical(record.key.problem))
    except ValueError:  # the defaults of omitted fields are unknown without the operation
        values = json_fields(record.key.problem)
    return all(str(values.get(name)).lower() in (text.lower(), canonical(text)) for name, text in fields.items())


def json_fields(problem: str) -> Mapping[str, Any]:
    """Returns the fields of a stored problem, without its operation's types; empty if the problem has no fields."""
    from scheduler.core import codec

    values = codec.problem_to_json(problem)
    return values if isinstance(values, dict) else {}


def wanted_by(keys: Sequence[Key], operation: str | None, hardware: str | None) -> Callable[[Key], bool]:
    """Returns a filter for keys of an operation, and of a chip whose name matches `hardware`.

    None disables either condition.

    Raises:
      BadParameter: the operation or the chip is unknown, and does not occur in `keys`.
    """
    from search_spaces import OPERATIONS, load
    from search_spaces.space import unknown

    if operation is not None:
        if ":" in operation:
            with usage_errors():
                operation = load(operation).name
        elif operation not in (known := dict.fromkeys((*OPERATIONS, *(key.operation for key in keys)))):
            raise typer.BadParameter(f"no operation {unknown(operation, known)}")
    if hardware is None:
        return lambda key: operation in (None, key.operation)
    from scheduler.core.hardware import CHIPS, named, unknown_chip

    kinds = dict.fromkeys((*(row.kind for row in CHIPS), *(key.hardware for key in keys)))
    meant = {row.id for row in CHIPS if named(hardware, row.names)}  # includes names other than the driver's
    if not meant and not named(hardware, kinds):
        raise typer.BadParameter(f"no hardware {unknown_chip(hardware, kinds)}")
    return lambda key: (
        operation in (None, key.operation) and (key.hardware in meant or bool(named(hardware, [key.hardware])))
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
