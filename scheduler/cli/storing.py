"""Commands that move, delete and check records: `export`, `import`, `forget`, `build-cache`, `check-records`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler.cli import arguments
from scheduler.cli.terminal import output, say
from scheduler.core.errors import SchedulerError
from scheduler.core.files import read_stream, replace_text
from scheduler.core.records import Key

if TYPE_CHECKING:
    from scheduler.store.sources import Index, IndexedFile


def export(
    file: Annotated[
        Path | None, typer.Argument(help="A file, or a directory such as records/; by default standard output.")
    ] = None,
    operation: arguments.OnlyOperation = None,
    hardware: arguments.Chips = None,
    index: Annotated[
        bool,
        typer.Option("--index", help="With a directory: also write its index.json, which import reads from a URL."),
    ] = False,
) -> None:
    """Write the user's own records as text, one JSON object per line; in a directory, a file per chip and operation.

    Imported records that were not verified here are included.
    """
    from scheduler.store import sources, text_files

    if index and (file is None or file.is_file()):
        raise typer.BadParameter("--index needs a directory")
    store = arguments.user_store()
    records = arguments.records_of(store, operation, hardware)
    if index and file is not None:
        arguments.require_directory(file)
    if unverified := sum(record.imported is not None for record in records):
        say(f"{unverified} of {len(records)} records were imported, and not verified here")
    if file is None:
        sys.stdout.write(text_files.export_text(records))
    elif file.is_dir():
        for path in text_files.add_records(file, records):
            say(f"wrote {path}")
        if index:
            say(f"wrote {sources.write_index(file)}")
    else:
        with arguments.file_errors(file):
            replace_text(file, text_files.export_text(records))
        say(f"wrote {len(records)} records to {file}")


def import_(
    source: Annotated[
        str,
        typer.Argument(help="A file that export wrote, its URL, or an index.json, also by URL; - is standard input."),
    ],
    sha256: Annotated[str | None, typer.Option(help="The SHA-256 digest that the file or the index must have.")] = None,
    hardware: arguments.Chips = None,
) -> None:
    """Import records into the user's own cache. They replace earlier imports of the same problems; all or none.

    Records measured here are kept. Imported ones are marked until verify times them here, or a search measures their
    problem. From an index, only the records of this machine's chip are imported, unless --hardware names others.
    """
    from scheduler.store import sources

    with arguments.usage_errors():
        digest = sources.parsed_digest(sha256) if sha256 is not None else None
    store = arguments.user_store()
    store.require_writable()
    if source == "-":
        with arguments.file_errors(Path(source)):
            read = sources.Source("standard input", read_stream(sys.stdin.buffer))
    else:
        read = sources.read(source)
    if digest is not None:
        read.require_digest(digest)
    index = sources.index_of(read)
    if index is None:
        records = sources.gathered([read])
    else:
        indexed = _chosen(index, read.name, hardware)
        records = sources.gathered(sources.read_indexed(source, indexed, say), indexed)
    wanted = arguments.wanted_by([record.key for record in records], None, hardware)
    records = [record for record in records if wanted(record.key)]
    left = store.put_all(records)
    stays = f"; {len(left)} are left out, because a measurement of the problem exists" if left else ""
    count = len(records) - len(left)
    say(f"put {count} records into {store.location}{stays}")
    if index is None and digest is None:
        say(f"SHA-256 of {read.name}: {read.sha256}")
    if count:
        say("they are not verified here: tile-scheduler verify times them on this machine")


def _chosen(index: Index, name: str, hardware: str | None) -> list[IndexedFile]:
    """Returns the files of an index for this machine's chip, or for the chips that `hardware` names.

    Raises:
      SchedulerError: there is none.
    """
    here = hardware or arguments.hardware_here(0).id
    wanted = arguments.wanted_by([Key("", file.hardware, "") for file in index.files], None, hardware)
    files = [
        file
        for file in index.files
        if (file.hardware == here if hardware is None else wanted(Key("", file.hardware, "")))
    ]
    if not files:
        chips = ", ".join(sorted({file.hardware for file in index.files})) or "none"
        raise SchedulerError(f"{name} has no records of {here}; --hardware selects one of its chips: {chips}")
    return files


def forget(
    operation: arguments.OptionalOperation = None,
    fields: arguments.OptionalFields = None,
    hardware: arguments.Chips = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all (of the operation, on the chip).")] = False,
) -> None:
    """Delete records and trials (also of unfinished searches) from the user's own cache."""
    arguments.reject(
        {
            "name a problem, or give --all": not everything and (operation is None or not fields),
            "--all and the fields of one problem exclude each other": everything and bool(fields),
        }
    )
    store = arguments.user_store()
    keys = store.keys()
    deleted = list(filter(arguments.wanted_by(keys, operation, hardware, fields), keys))
    store.forget(*deleted)
    for key in deleted:
        say(f"forgot {key}")
    if not deleted:
        raise SchedulerError(f"nothing matches in {store.location}")


def build_cache(
    records: Annotated[Path, typer.Argument(help="The directory of records as text.")] = Path("records"),
    cache: Annotated[Path, typer.Argument(help="The file to write.")] = Path("cache.db"),
) -> None:
    """Build the shipped cache.db from its records."""
    from scheduler.store.store import build_shipped

    say(f"wrote {build_shipped(records, cache)} records to {cache}")


def check_records(
    places: Annotated[
        list[Path] | None, typer.Argument(help="Files that export wrote, or directories such as records/.")
    ] = None,
) -> None:
    """Check records before they are shared, without a device: text, schedules, and measured against predicted times.

    A record must be as export writes it, its schedules must be legal by the rules and versions of the installed
    kernels, and no time may be below the hardware's limit or far from the cost model's prediction.
    """
    from scheduler.inspect import record_check

    total, found = 0, 0
    for place in places or [Path("records")]:
        files = sorted(place.glob("*/*.jsonl")) if place.is_dir() else [place]
        for file in files:
            count, findings = record_check.check_file(file)
            total, found = total + count, found + len(findings)
            for finding in findings:
                output(f"{file}, {finding}")
        if place.is_dir() and not found:
            record_check.check_directory(place)
    if found:
        raise SchedulerError(f"{found} of {total} records should not be shared")
    if not total:
        raise SchedulerError("no record was found")
    say(f"{total} records pass: text, schedules, and measured against predicted times")
