"""The command that writes a cache as a page for a browser: report."""

from __future__ import annotations

import datetime
import importlib.metadata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scheduler.cli.arguments import Chips, file_errors, require_writable, usage_errors, wanted_by
from scheduler.cli.stores import ask_stores
from scheduler.cli.terminal import say
from scheduler.core.files import replace_text
from tile_scheduler import __version__

if TYPE_CHECKING:
    from scheduler.core.records import Key, Record, Trial
    from scheduler.store.store import Store


def report(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    operation: Annotated[
        str | None, typer.Option(help="Only this operation; one of your own as package.module:NAME or file.py:NAME.")
    ] = None,
    hardware: Chips = None,
    pictures: Annotated[
        str, typer.Option(help="Of each record: few, all or none; they take most of the time.")
    ] = "few",
) -> None:
    """Write the stored schedules as one HTML file: each with its explanation, how sure it is, and its trials."""
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

    def ask(store: Store) -> tuple[list[tuple[Record, list[Trial]]], Mapping[Key, Sequence[Trial]]]:
        return [(record, store.last_trials(record.key)) for record in store.records()], store.unfinished()

    kept = list(ask_stores(ask))
    keys = [key for _, (found, cut) in kept for key in (*(record.key for record, _ in found), *cut)]
    wanted = wanted_by(keys, operation, hardware)
    rows = [(where, record, trials) for where, (found, _) in kept for record, trials in found if wanted(record.key)]
    cut_short = [(where, key, trials) for where, (_, cut) in kept for key, trials in cut.items() if wanted(key)]
    now = datetime.datetime.now(datetime.UTC)
    versions = {"tile-scheduler": __version__, "jax": importlib.metadata.version("jax")}
    origin = page.Origin([where for where, *_ in kept], versions, f"{now:%Y-%m-%dT%H:%M:%SZ}")
    records = page.ordered(gather.gather(rows, own))
    if pictures == "none":
        drawn = draw.none(records, "This was written without pictures (--pictures none).")
    elif not plots.available():
        drawn = draw.none(records, "Pictures need matplotlib: pip install 'tile-scheduler[plots]', and write it again.")
    else:
        drawn = draw.drawn(records, every=pictures == "all")
    text = page.page(records, cut_short, origin, drawn)
    with file_errors(out):
        replace_text(out, text)
    say(f"wrote {len(rows)} record{'' if len(rows) == 1 else 's'} to {out} ({out.stat().st_size / 1e6:.1f} MB)")
