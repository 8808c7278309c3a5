"""What the commands of these examples share: the chip to ask about, and files to draw to."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from scheduler.core import hardware
from scheduler.core.hardware import Hardware
from scheduler.inspect import plots
from search_spaces import Kernel, Problem

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def arguments(
    description: str | None,
    argv: list[str] | None,
    *,
    plot: bool = True,
    drawings: Mapping[str, str] | None = None,
) -> argparse.Namespace:
    """``--hardware``, as a row of the table, and files to draw to: ``--plot``, and `drawings` by their names.

    What is asked wrongly ends the program in a sentence, before anything is computed.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    here = hardware.detect().kind if on_gpu() else "NVIDIA H200"
    parser.add_argument("--hardware", type=_chip, default=here, help=f"a row of the table of chips (default: {here})")
    if plot:
        for name, what in {"plot": "to this file, .svg or .png", **(drawings or {})}.items():
            parser.add_argument(f"--{name}", type=_picture, metavar="FILE", help=f"draw {what}")
        parser.add_argument("--dark", action="store_true", help="on a dark ground")
    return parser.parse_args(argv)


def on_gpu() -> bool:
    """Whether JAX runs on an NVIDIA GPU here."""
    return bool(jax.default_backend() == "gpu")


def is_here(chip: Hardware) -> bool:
    """Whether it is this chip, so that what is asked about can be tried and timed as well."""
    return on_gpu() and hardware.detect().kind == chip.kind


def require(kernel: Kernel[Any, Any], problem: Problem, chip: Hardware) -> None:
    """Ends the program in a sentence where a shipped kernel is not for that chip."""
    if reason := kernel.supports(problem, chip.target):
        raise SystemExit(f"the shipped kernel {reason}; name a Hopper GPU with --hardware")


def save(figure: Figure, file: Path) -> None:
    """As the file's ending says."""
    file.write_bytes(plots.png(figure) if file.suffix == ".png" else plots.svg(figure).encode())
    print(f"drawn: {file}")


def accelerators() -> list[Hardware]:
    """The chips of the table without the CPU."""
    return [row for row in hardware.table() if row is not hardware.CPU]


def _chip(kind: str) -> Hardware:
    try:
        chip = hardware.find(kind)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if chip is hardware.CPU:
        kinds = ", ".join(row.kind for row in accelerators())
        raise argparse.ArgumentTypeError(f"{chip.kind} is no GPU; name one of {kinds}")
    return chip


def _picture(name: str) -> Path:
    file = Path(name)
    if file.suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"{name} is neither .svg nor .png; name one of these")
    if not plots.available():
        raise argparse.ArgumentTypeError("drawings need matplotlib; run: pip install 'tile-scheduler[plots]'")
    return file
