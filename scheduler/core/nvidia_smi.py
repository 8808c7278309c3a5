"""Queries of NVIDIA's driver about its GPUs, without JAX and without using a GPU."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess


def visible() -> list[str] | None:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES, or None for all GPUs if the variable is not set."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return None
    names = [name.strip() for name in visible.split(",")]
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))  # as CUDA reads it


def query(fields: str, index: str | None = None) -> list[list[str]]:
    """Returns one row of values per GPU, or only for the GPU `index`; empty if the driver does not answer."""
    if (smi := shutil.which("nvidia-smi")) is None:
        return []
    which = [] if index is None else [f"--id={index}"]
    command = [smi, *which, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode and index is not None:
        return []
    rows = [[part.strip() for part in line.split(",")] for line in asked.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields.split(","))]  # other lines are errors, for example a lost GPU
