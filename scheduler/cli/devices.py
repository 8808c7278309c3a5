"""Selection of the devices of this host for a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from scheduler.cli.arguments import usage_errors

if TYPE_CHECKING:
    from scheduler.measure.runner import RunnerOptions
    from scheduler.search import places
    from search_spaces.operation import Operation

Devices = Annotated[
    str | None,
    typer.Option(help="GPUs of one kind that share a job: all, or indices among the visible ones: 0,2,3."),
]


def chosen(text: str, operation: Operation[Any], options: RunnerOptions) -> list[places.Device]:
    """The devices that `text` names, as places where problems are tuned; without a GPU "all" is this CPU.

    Raises:
      BadParameter: `text` is malformed, names a device that is absent, names one twice, or names GPUs of several kinds.
    """
    from scheduler.measure.gpu import Gpu
    from scheduler.search import places

    chips = Gpu.chips()
    if text == "all" and not chips:
        return [places.Device.for_(operation, options, "the CPU")]
    with usage_errors():
        return places.gpus(operation, _indices(text, chips), options)


def _indices(text: str, chips: dict[int, str]) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if text != "all" and not all(word.isdecimal() and word.isascii() for word in words):
        raise ValueError(f"--devices is all, or indices with commas between them, as in 0,2,3, not {text!r}")
    indices = list(chips) if text == "all" else [int(word) for word in words]
    if len(set(indices)) < len(indices):
        raise ValueError(f"--devices {text} names a GPU twice")
    if missing := [index for index in indices if index not in chips]:
        there = f"those visible are {', '.join(map(str, chips))}" if chips else "there is none"
        raise ValueError(f"no GPU {', '.join(map(str, missing))} is visible ({there})")
    kinds: dict[str, list[str]] = {}
    for index in indices:
        kinds.setdefault(chips[index], []).append(str(index))
    if len(kinds) > 1:
        found = "; ".join(f"{kind}: --devices {','.join(those)}" for kind, those in kinds.items())
        raise ValueError(f"what is best differs from one kind of chip to another: tune the job once for each ({found})")
    return indices
