"""Commands that move and delete records: `export`, `import`, `forget`, `build-cache`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.arguments import (
    Chips,
    file_errors,
    problem_of,
    range_of,
    ranges_of,
    records_of,
    usage_errors,
    user_store,
    wanted_by,
)
from scheduler.cli.terminal import say
from scheduler.core.errors import SchedulerError
from scheduler.core.files import read_stream, read_text, replace_text

if TYPE_CHECKING:
    from search_spaces.operation import Operation
    from search_spaces.problem import Problem


def export(
    file: Annotated[
        Path | None, typer.Argument(help="A file, or a directory such as records/; by default standard output.")
    ] = None,
    operation: Annotated[str | None, typer.Option(help="Only this operation.")] = None,
    hardware: Chips = None,
) -> None:
    """Write the user's own records as text, one JSON object per line; in a directory, a file per chip and operation."""
    from scheduler.store import text_files

    store = user_store()
    records, ranges = records_of(store, operation, hardware), ranges_of(store, operation, hardware)
    if file is None:
        sys.stdout.write(text_files.export_text(records, ranges))
    elif file.is_dir():
        for path in [*text_files.add_records(file, records), *text_files.add_ranges(file, ranges)]:
            say(f"wrote {path}")
    else:
        with file_errors(file):
            replace_text(file, text_files.export_text(records, ranges))
        say(f"wrote {_count_text(len(records), len(ranges))} to {file}")


def import_(file: Annotated[Path, typer.Argument(help="A file that export wrote; - is standard input.")]) -> None:
    """Import records into the user's own cache. They replace records of the same problems; all are imported or none."""
    from scheduler.store import text_files

    with file_errors(file):
        content = read_stream(sys.stdin.buffer).decode("utf-8") if str(file) == "-" else read_text(file)
    records, ranges = text_files.import_lines(content, source=str(file))
    store = user_store()
    left = store.put_all(records, ranges)
    stays = f"; {len(left)} estimates are left out, because measured records exist" if left else ""
    say(f"put {_count_text(len(records) - len(left), len(ranges))} into {store.location}{stays}")


def _count_text(records: int, ranges: int) -> str:
    return f"{records} records" + (f" and {ranges} ranges" if ranges else "")


def forget(
    operation: Annotated[str | None, typer.Argument(help="A name, package.module:NAME, or file.py:NAME.")] = None,
    fields: Annotated[list[str] | None, typer.Argument(help="The problem, as name=value.")] = None,
    hardware: Chips = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all (of the operation, on the chip).")] = False,
) -> None:
    """Delete records, trials (also of unfinished searches) and ranges from the user's own cache."""
    problem = None
    if not everything:
        if operation is None or not fields:
            raise typer.BadParameter("name a problem, or give --all")
        with usage_errors():
            if (ends := range_of(operation, fields)) is not None:
                _forget_range(*ends, hardware)
                return
            op, parsed = problem_of(operation, fields)
        operation, problem = op.name, parsed.canonical()
    elif fields:
        raise typer.BadParameter("--all and the fields of one problem exclude each other")
    store = user_store()
    keys = store.keys()
    wanted = wanted_by(keys, operation, hardware)
    deleted = [key for key in keys if wanted(key) and problem in (None, key.problem)]
    for key in deleted:
        store.forget(key)
        say(f"forgot {key}")
    ranges = ranges_of(store, operation, hardware) if everything else []
    for one in ranges:
        store.ranges.forget(one)
        say(f"forgot the range {one} on {one.hardware}")
    if not deleted and not ranges:
        raise SchedulerError(f"nothing matches in {store.location}")


def _forget_range(op: Operation[Any], field: str, lowest: Problem, highest: Problem, hardware: str | None) -> None:
    """Deletes the range with exactly these ends. The records at its points remain."""
    from scheduler.core.records import family_of

    store, ends = user_store(), (getattr(lowest, field), getattr(highest, field))
    deleted = [
        one
        for one in ranges_of(store, op.name, hardware)
        if (one.problem, one.field, one.low, one.high) == (family_of(lowest, field), field, *ends)
    ]
    for one in deleted:
        store.ranges.forget(one)
        say(f"forgot the range {one} on {one.hardware}; the records at its points remain")
    if not deleted:
        raise SchedulerError(f"no such range is in {store.location}")


def build_cache(
    records: Annotated[Path, typer.Argument(help="The directory of records as text.")] = Path("records"),
    cache: Annotated[Path, typer.Argument(help="The file to write.")] = Path("cache.db"),
) -> None:
    """Build the shipped cache.db from its records."""
    from scheduler.store.store import build_shipped

    say(f"wrote {build_shipped(records, cache)} records to {cache}")
