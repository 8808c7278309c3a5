"""The chip that a kernel is compiled for, or interpreted on."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Target:
    """The chip that a kernel is compiled for: the properties that decide which code can run, not how much of it fits.

    Attributes:
      platform: JAX's name of the backend: "cpu", "cuda", "tpu".
      kind: the device's own name, such as "NVIDIA H200".
      architecture: the machine code that it runs: "sm_90", "cpu".
      cores: streaming multiprocessors or tensor cores: the number of blocks that a persistent grid starts.
    """

    platform: str
    kind: str
    architecture: str
    cores: int


def not_interpreted(target: Target) -> str | None:
    """Returns why Pallas's interpreter does not run on `target`, or None."""
    return None if target.platform == "cpu" else f"runs in Pallas's interpreter on a CPU, not on {target.kind}"
