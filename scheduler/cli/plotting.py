"""The command `plot`: plots of records, trials and recorded sweeps."""

from __future__ import annotations

import collections
import math
import string
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from scheduler.cli import arguments
from scheduler.cli.terminal import output, say
from scheduler.core.arguments import MOST
from scheduler.core.errors import NothingToDraw
from scheduler.core.files import replace_bytes, replace_text
from scheduler.core.text import seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from scheduler.core.records import Record
    from scheduler.inspect.case import Case
    from scheduler.inspect.landscape import Cell, Landscape
    from search_spaces.space import Choice


MANY, ONE = "roofline", ("best-so-far", "landscape", "block-sizes", "tiles", "time-breakdown")
WHAT = (MANY, *ONE)

Plot = Annotated[str, typer.Argument(help=f"{MANY}; of one problem: {', '.join(ONE)}.")]


def plot(
    what: Plot,
    operation: arguments.OptionalOperation = None,
    fields: arguments.OptionalFields = None,
    hardware: arguments.HardwareName = None,
    recording: Annotated[
        list[Path] | None, typer.Option(help="A recorded sweep instead of stored records. Repeatable.")
    ] = None,
    over: Annotated[
        str | None, typer.Option(help="Schedule fields to plot over: tile_m,tile_n for landscape, one for block-sizes.")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="Backend of the schedules; default: the best searched one.")
    ] = None,
    budget: Annotated[
        int, typer.Option(min=1, max=MOST, help="Trials of a search over a recording (best-so-far).")
    ] = 64,
    dark: Annotated[bool, typer.Option("--dark", help="Draw on a dark background.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="A file, .svg or .png.  [default: named after the picture]"),
    ] = None,
) -> None:
    """Plot stored records or recorded sweeps. No device is needed."""
    from scheduler.inspect import plots
    from scheduler.inspect.plots import style

    style.require()
    if what not in WHAT:
        from search_spaces.space import unknown

        raise typer.BadParameter(f"no picture {unknown(what, WHAT)}")
    recordings = recording or []
    place = out or Path(f"{what}.svg")
    if place.suffix not in (".svg", ".png"):
        raise typer.BadParameter(f"--out must end in .svg or .png, found {place}")
    with arguments.usage_errors():
        words = {} if not over else {"over": tuple(over.split(",")) if what == "landscape" else over}
        if what == "landscape" and over and over.count(",") != 1:
            raise ValueError(f"--over of a landscape must name two fields, as in --over tile_m,tile_n, found {over}")
        if backend is not None:
            words["backend"] = backend
        made = _figure(what, operation, fields or [], hardware, recordings, budget, {"dark": dark, **words})
    with arguments.file_errors(place):
        if place.suffix == ".png":
            replace_bytes(place, plots.png(made))
        else:
            replace_text(place, plots.svg(made))
    output(str(place))


def _figure(
    what: str, operation: str | None, fields: Sequence[str], hardware: str | None, recordings: Sequence[Path],
    budget: int, options: dict[str, Any],
) -> Figure:  # fmt: skip
    from scheduler.inspect import case, plots

    if what == MANY:
        found = [case.of_record(record) for record in _records(operation, fields, hardware)]
        return plots.roofline([one for one in found if one is not None], **options)
    if len(recordings) > 1:
        raise ValueError(f"{what} plots one problem: give one recording, found {len(recordings)}")
    if recordings:
        one = (
            case.of_replay(recordings[0], budget=budget) if what == "best-so-far" else case.of_recording(recordings[0])
        )
    else:
        one = _case(what, operation, fields, hardware)
    draw: Callable[..., Figure] = getattr(plots, what.replace("-", "_"))
    return draw(one, **options)


def _records(operation: str | None, fields: Sequence[str], hardware: str | None) -> list[Record]:
    """Returns the records of one chip that calls read. The user's own override shipped records of the same key.

    If records of several chips match, the chip with the most records is selected.
    """
    kept = [record for _, records in arguments.ask_stores(lambda store: list(store.records())) for record in records]
    wanted = arguments.wanted_by([record.key for record in kept], operation, hardware)
    found: dict[Any, Record] = {}
    for record in kept:
        if wanted(record.key) and arguments.has_fields(record, None, arguments.field_texts(fields)):
            found.setdefault(record.key, record)
    if not found:
        raise NothingToDraw("no such record is stored or shipped; tile-scheduler list shows all")
    chips = collections.Counter(key.hardware for key in found)
    (most, _), *others = chips.most_common()
    if others:
        rest = ", ".join(chip for chip, _ in others)
        say(f"a picture shows one chip: {most}, which has the most records; --hardware selects another ({rest})")
    return [record for record in found.values() if record.key.hardware == most]


def _case(what: str, operation: str | None, fields: Sequence[str], hardware: str | None) -> Case:
    """Returns a problem with its stored record and trials."""
    from scheduler.core import hardware as chips
    from scheduler.core.records import key_of
    from scheduler.inspect.case import Case

    if operation is None or not fields:
        raise ValueError(f"{what} plots one problem: give it (matmul m=4096 n=4096 k=4096), or a recorded sweep")
    op, problem = arguments.problem_of(operation, fields)
    canonical = problem.canonical()
    chip = chips.find(hardware) if hardware is not None else None
    if chip is None:
        stores = arguments.ask_stores(
            lambda store: [head.key.hardware for head in store.heads(operation=op.name, problem=canonical)]
        )
        known = [arguments.chip_of(identity) for _, identities in stores for identity in identities]
        chip = next((one for one in known if one is not None), None) or arguments.hardware_here(0)
    key = key_of(op, problem, chip)
    for _, (record, trials) in arguments.ask_stores(lambda store: (store.get(key), store.last_trials(key))):
        if record is not None or trials:
            return Case(op, problem, chip, record, tuple(trials))
    return Case(op, problem, chip)


# ------------------------------------------------------------------------------
# The landscape of a record as text of 80 columns.

_WIDTH = 80
_CELL = 7
# Background shades by the ratio to the best time, with one shade per step in the logarithm of the ratio.
_STEP, _SHADES = 0.05, ("on green4", "on dark_green", "on grey30", "on grey23", "on grey15", "")


def landscape_lines(land: Landscape) -> Iterator[Text | str]:
    """Yields the grid of times relative to the best time.

    Brackets mark the winner's pair. Letters refer to the reasons why pairs were pruned.
    """
    transposed = len(land.xs) > len(land.ys)
    x, y, xs, ys = (land.y, land.x, land.ys, land.xs) if transposed else (land.x, land.y, land.xs, land.ys)
    label = max(len(y), *(len(str(value)) for value in ys))
    shown = min(len(xs), (_WIDTH - label) // _CELL)
    source = f"{land.took}, {land.measured} schedules" if land.measured else "by the model"
    title = f"{land.backend} over {x} and {y}: minimum time of each pair, {source}, relative to the best, "
    title += seconds_text(land.best_s)
    yield from textwrap.wrap(title, _WIDTH)
    yield f"{'':{label}}  {x}" + (f", {shown} of {len(xs)} values" if shown < len(xs) else "")
    yield f"{y:>{label}}" + "".join(f"{value!s:>{_CELL}}" for value in xs[:shown])
    letters = dict(zip(land.reasons, string.ascii_letters, strict=False))
    place = land.place(land.best.schedule)
    for j, value in reversed(list(enumerate(ys))):
        yield _row(value, label, [_cell(land, transposed, i, j, letters, place) for i in range(shown)])
    for reason, letter in letters.items():
        yield Text(textwrap.fill(f"  {letter}  {reason}", _WIDTH, subsequent_indent="     "))
    if any(cell.legal and cell.best_s is None for row in land.cells for cell in row):
        yield "  ?  legal, not tried"


def _cell(
    land: Landscape, transposed: bool, i: int, j: int, letters: dict[str, str], place: tuple[int, int] | None
) -> tuple[str, str]:
    """Returns the text and the background style of a cell."""
    column, row = (j, i) if transposed else (i, j)
    cell: Cell = land.cells[row][column]
    if cell.best_s is None:
        return ("?" if cell.legal else letters[cell.reason]), ""
    ratio = cell.best_s / land.best_s
    text = f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"
    shade = _SHADES[min(int(math.log(ratio) / _STEP), len(_SHADES) - 1)]
    return (f"[{text}]" if place == (column, row) else text), shade


def _row(value: Choice, label: int, cells: list[tuple[str, str]]) -> Text:
    made = Text(f"{value!s:>{label}}")
    for text, shade in cells:
        made.append(" ")
        made.append(f"{text:>{_CELL - 1}}", style=shade)
    return made
