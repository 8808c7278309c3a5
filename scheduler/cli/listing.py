"""The commands `list` and `report`: show stored schedules in a terminal and as an HTML page."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler.cli import arguments
from scheduler.cli.terminal import console_here, counted, output, print_command, print_json, say
from scheduler.core.errors import SchedulerError
from scheduler.core.files import replace_text
from scheduler.core.records import Key
from scheduler.measure import gpu
from tile_scheduler import __version__

if TYPE_CHECKING:
    from scheduler.core.records import Key, Record, Trial
    from scheduler.store.queries import Head
    from scheduler.store.store import Store


# ------------------------------------------------------------------------------
# Selection of records for `list` and `report`: the user's own first, then those shipped for the local chip.

# Default limit on records. More are rarely read, and each takes a fraction of a second to explain and plot.
MOST = 100


@dataclasses.dataclass(frozen=True)
class Stored:
    """The selected records and unfinished searches, each with the location of its store.

    Attributes:
      stores: location -> store, for the readable stores.
      records: the records: the user's own first, then those of local chips, measured before estimated.
      unfinished: the selected unfinished searches, with their trials.
      left: number of records left out by the limit `most`.
      elsewhere: for each shipped record left out because its chip is not local, the chip.
    """

    stores: Mapping[str, Store]
    records: Sequence[tuple[str, Record]]
    unfinished: Sequence[tuple[str, Key, Sequence[Trial]]]
    left: int
    elsewhere: Sequence[str]

    def left_out_texts(self) -> list[str]:
        """Returns up to two lines about records left out, with the options to show them."""
        lines = []
        if self.left:
            lines.append(
                f"{self.left} more records are left out: --most 0 shows all, --operation and --hardware filter"
            )
        if self.elsewhere:
            counts = collections.Counter(chip.partition(" (")[0] for chip in self.elsewhere)
            chips = ", ".join(f"{count} for {chip}" for chip, count in counts.most_common())
            lines.append(f"{len(self.elsewhere)} more are shipped for other chips ({chips}): --all shows them")
        return lines


def chosen(operation: str | None, hardware: str | None, *, everything: bool, most: int, fields: bool = True) -> Stored:
    """Returns the stored data that command-line options select.

    Args:
      operation, hardware: as in `wanted_by`. An explicit chip selects everything stored for it.
      everything: whether to include data shipped for chips other than the local ones.
      most: maximum number of records; 0 means no limit.
      fields: sort problems by their fields, in the order of their operation, which imports JAX; otherwise by name.
    """
    from scheduler.inspect.provenance import order_of

    kept = list(arguments.ask_stores(lambda store: (store, store.heads(), store.unfinished())))
    keys = [key for _, (_, heads, cut) in kept for key in (*(head.key for head in heads), *cut)]
    meant, kinds = arguments.wanted_by(keys, operation, hardware), _local_kinds()

    def is_local(key: Key) -> bool:
        return key.hardware.partition(" (")[0] in kinds

    def shown(where: str, key: Key) -> bool:
        return everything or hardware is not None or where != arguments.SHIPPED or is_local(key)

    def order(row: tuple[str, Head]) -> tuple[object, ...]:
        (where, head), key = row, row[1].key
        problem = order_of(key, fields=fields)
        return where == arguments.SHIPPED, not is_local(key), head.estimated, key.hardware, problem

    found = [(where, head) for where, (_, heads, *_) in kept for head in heads if meant(head.key)]
    rows = sorted(((where, head) for where, head in found if shown(where, head.key)), key=order)
    stores = {where: store for where, (store, *_) in kept}
    records: dict[tuple[str, Key], Record] = {}
    for where, store in stores.items():
        read = store.read([head.key for place, head in rows[: most or None] if place == where])  # none malformed
        records |= {(where, record.key): record for record in read}
    return Stored(
        stores,
        [(where, records[where, head.key]) for where, head in rows if (where, head.key) in records],
        [(where, key, trials) for where, (_, _, cut) in kept for key, trials in cut.items() if meant(key)],
        max(0, len(rows) - most) if most else 0,
        [head.key.hardware for where, head in found if not shown(where, head.key)],
    )


def _local_kinds() -> frozenset[str]:
    """Returns the chips of this machine, by their drivers' names.

    Imports JAX, which takes a second, only if a TPU may be present, as its kind has no other source.
    """
    platforms = {name for name in os.environ.get("JAX_PLATFORMS", "").split(",") if name}
    plugins = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    if plugins and (not platforms or platforms & {"cuda", "gpu"}):
        visible = gpu.visible_gpus()
        found = [gpu.query_driver("name", name) for name in ([None] if visible is None else visible)]
        if kinds := frozenset(kind for rows in found for (kind,) in rows):
            return kinds
    files = (file for pattern in ("accel*", "vfio/[0-9]*") for file in Path("/dev").glob(pattern))
    if importlib.util.find_spec("libtpu") and (not platforms or "tpu" in platforms) and any(files):
        from scheduler.core import hardware

        with contextlib.suppress(SchedulerError):
            return frozenset({hardware.detect().kind})
    return frozenset({"cpu"})


def list_(
    operation: arguments.OnlyOperation = None,
    hardware: arguments.Chips = None,
    everything: arguments.Everything = False,
    most: arguments.Most = MOST,
    as_json: arguments.AsJson = False,
) -> None:
    """List stored schedules: the user's own, those shipped for the local chip, and unfinished searches."""
    from scheduler.cli import record_report
    from scheduler.inspect import provenance

    stored = chosen(operation, hardware, everything=everything, most=0 if as_json else most, fields=not as_json)
    if as_json:
        print_json([{"where": where, **record_report.record_json(record)} for where, record in stored.records])
        return
    if stored.records:
        output(*record_report.records(stored.records, console_here().width))
    for where, key, trials in stored.unfinished:
        output("", f"{key}, {where}: {provenance.unfinished_text(trials)}")
        print_goes_on(key)
    if not (stored.records or stored.unfinished):
        _print_none([where for where in stored.stores if where != arguments.SHIPPED], operation)
    for left in stored.left_out_texts():
        output("", left)


def _print_none(places: Sequence[str], operation: str | None) -> None:
    """Prints that nothing is stored, with an example command to start a search."""
    from scheduler.core import hints
    from scheduler.inspect.case import example
    from search_spaces import OPERATIONS, load

    op = load(operation if operation in OPERATIONS else OPERATIONS[0])
    small = example(op, 64)
    if small is None or operation not in (None, *OPERATIONS):  # a function's problem is typed by its arrays
        name = operation if operation is not None and ":" in operation else "file.py:NAME"
        command = hints.typed(name, ["x=float32[64,128]"])
    else:
        command = hints.tune(op, small)
    of = f" of {operation}" if operation is not None else ""
    for place in places:  # unreadable stores are excluded, and were reported before
        output(f"No record{of} is in {place}, and none is shipped for this chip; to tune a problem, for example:")
    print_command(command)


def print_goes_on(key: Key, command: str | None = None) -> None:
    """Prints the command that resumes an unfinished search.

    For user operations, only the caller knows the defining file, so `command` must be given to be printed.
    """
    from scheduler.core import hints
    from search_spaces import OPERATIONS, load

    if command is None and key.operation in OPERATIONS:
        op = load(key.operation)
        with contextlib.suppress(ValueError):  # the stored problem may be invalid in the current version
            command = hints.tune(op, op.problem.from_canonical(key.problem), arguments.chip_of(key.hardware))
    if command is None:
        output("the original command resumes it")
    else:
        if (chip := arguments.chip_of(key.hardware)) is not None and chip.abilities.interpreted:
            from scheduler.search.tuner import LONGEST_INTERPRETED_S

            # An interpreted search that takes longer than this can only have been started with --seconds.
            command += f" --seconds {LONGEST_INTERPRETED_S:.0f}"
        output("resume it with:")
        print_command(command)


# ------------------------------------------------------------------------------
# The command `report`: writes a cache as an HTML page.


def report(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    operation: arguments.OnlyOperation = None,
    hardware: arguments.Chips = None,
    everything: arguments.Everything = False,
    most: arguments.Most = MOST,
    pictures: Annotated[
        str, typer.Option(help="Pictures of each record: few, all or none. Drawing takes most of the time.")
    ] = "few",
) -> None:
    """Write stored schedules as one HTML file, each with its explanation, confidence and trials.

    The records are those that `list` prints: the user's own, and those shipped for the local chip.
    """
    if pictures not in ("few", "all", "none"):
        raise typer.BadParameter(f"--pictures must be few, all or none, found {pictures}")
    arguments.require_writable(out)
    from scheduler.inspect import plots
    from scheduler.inspect.report import content, page
    from search_spaces import load

    own = []
    if operation is not None and ":" in operation:
        with arguments.usage_errors():
            own = [load(operation)]
    stored = chosen(operation, hardware, everything=everything, most=most)
    now = datetime.datetime.now(datetime.UTC)
    versions = {"tile-scheduler": __version__, "jax": importlib.metadata.version("jax")}
    origin = page.Origin(list(stored.stores), versions, f"{now:%Y-%m-%dT%H:%M:%SZ}", stored.left_out_texts())
    rows = [(where, record, stored.stores[where].last_trials(record.key)) for where, record in stored.records]
    records = list(counted("explaining records", content.gather(rows, own), len(rows)))
    if pictures == "none":
        drawn = content.no_pictures(records, "This report was written without pictures (--pictures none).")
    elif not plots.available():
        drawn = content.no_pictures(
            records, "Pictures need matplotlib: run pip install 'tile-scheduler[plots]', and write the report again."
        )
    else:
        count = functools.partial(counted, "drawing the pictures of records", total=len(records))
        drawn = content.drawn_pictures(records, count, every=pictures == "all")
    text = page.page(records, stored.unfinished, origin, drawn)
    with arguments.file_errors(out):
        replace_text(out, text)
    say(f"wrote {len(rows)} record{'' if len(rows) == 1 else 's'} to {out} ({out.stat().st_size / 1e6:.1f} MB)")
    for left in stored.left_out_texts():
        say(left)
