"""Selection of the cluster for a job."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from scheduler.measure.runner import RunnerOptions
    from scheduler.search.places import Place

Engine = Annotated[str | None, typer.Option(help="What takes the problems of a job to the GPUs of several hosts: ray.")]


Address = Annotated[
    str | None,
    typer.Option(help="Of the cluster: HOST:PORT, auto, or local, which starts one on this host.  [default: auto]"),
]


def fleet(
    engine: str, address: str | None, hardware: str | None, options: RunnerOptions
) -> contextlib.AbstractContextManager[Sequence[Place]]:
    """Returns a context with the executors of a cluster, which are released at its end.

    Raises:
      BadParameter: the engine is unknown.
    """
    if engine != "ray":
        raise typer.BadParameter(f"--engine is ray, not {engine}")
    from scheduler.fleet import ray_cluster

    return ray_cluster.places(address or "auto", options, hardware=hardware)
