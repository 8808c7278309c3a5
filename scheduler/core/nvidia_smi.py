"""What NVIDIA's driver says of its GPUs, asked without JAX and without touching a GPU."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess


def visible() -> list[str] | None:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them; None where it does not, for all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = [name.strip() for name in visible.split(",")]
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # as CUDA reads it


def told(what: str, index: str | None = None) -> list[list[str]]:
    """What the driver says of the GPU of this name, or of each, a row each; none where it says nothing."""
    if (smi := shutil.which("nvidia-smi")) is None:
        return []
    which = [] if index is None else [f"--id={index}"]
    command = [smi, *which, f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode and index is not None:
        return []
    rows = [[part.strip() for part in line.split(",")] for line in asked.stdout.splitlines()]
    return [row for row in rows if len(row) == len(what.split(","))]  # the rest is an error, of a GPU that fell off
