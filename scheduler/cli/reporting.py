"""The command `report`: writes a cache as an HTML page."""

from __future__ import annotations

import datetime
import importlib.metadata
from pathlib import Path
from typing import Annotated

import typer

from scheduler.cli.arguments import Chips, Everything, file_errors, require_writable, usage_errors
from scheduler.cli.stored import MOST, chosen
from scheduler.cli.terminal import say, shown_count
from scheduler.core.files import replace_text
from tile_scheduler import __version__


def report(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    operation: Annotated[
        str | None, typer.Option(help="Only this operation; one of your own as package.module:NAME or file.py:NAME.")
    ] = None,
    hardware: Chips = None,
    everything: Everything = False,
    most: Annotated[int, typer.Option(min=0, help="Write at most so many records; 0 writes all.")] = MOST,
    pictures: Annotated[
        str, typer.Option(help="Of each record: few, all or none; they take most of the time.")
    ] = "few",
) -> None:
    """Write the stored schedules as one HTML file: each with its explanation, how sure it is, and its trials.

    They are those that `list` prints: the user's own, and those shipped for the chip that is here.
    """
    if pictures not in ("few", "all", "none"):
        raise typer.BadParameter(f"--pictures is few, all or none, not {pictures}")
    require_writable(out)
    from scheduler.inspect import plots
    from scheduler.inspect.report import gather, page
    from scheduler.inspect.report import pictures as draw
    from search_spaces import load

    own = []
    if operation is not None and ":" in operation:
        with usage_errors():
            own = [load(operation)]
    stored = chosen(operation, hardware, everything=everything, most=most)
    now = datetime.datetime.now(datetime.UTC)
    versions = {"tile-scheduler": __version__, "jax": importlib.metadata.version("jax")}
    origin = page.Origin(list(stored.stores), versions, f"{now:%Y-%m-%dT%H:%M:%SZ}", stored.left_out_texts())
    rows = [(where, record, stored.stores[where].last_trials(record.key)) for where, record in stored.records]
    with shown_count("explaining records", len(rows)) as count:
        records = list(count(gather.gather(rows, own)))
    if pictures == "none":
        drawn = draw.none(records, "This was written without pictures (--pictures none).")
    elif not plots.available():
        drawn = draw.none(records, "Pictures need matplotlib: pip install 'tile-scheduler[plots]', and write it again.")
    else:
        with shown_count("drawing the pictures of records", len(records)) as count:
            drawn = draw.drawn(records, count, every=pictures == "all")
    text = page.page(records, stored.unfinished, origin, drawn)
    with file_errors(out):
        replace_text(out, text)
    say(f"wrote {len(rows)} record{'' if len(rows) == 1 else 's'} to {out} ({out.stat().st_size / 1e6:.1f} MB)")
    for left in stored.left_out_texts():
        say(left)
