"""Kernels as machine code without a GPU: compiled for a chip that is not here, an H200 as a rule, and what ptxas says.

A test names a program, itself as a rule, which compiles one kernel by `compile_for_h200` or `compile_changed`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from absent_gpu import lowered_for, machine, tool

PTXAS = tool("ptxas")
MISSING = [
    what
    for what, there in (
        ("jax-cuda13-plugin", importlib.util.find_spec("jax_cuda13_plugin")),
        ("ptxas (nvidia-cuda-nvcc)", PTXAS),
    )
    if not there
]


def needed(*others: str) -> pytest.MarkDecorator:
    """Skips where what compiles is not installed, nor these."""
    missing = [*MISSING, *others]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def compiled(program: str, folder: Path, *arguments: str, architecture: str = "sm_90") -> tuple[str, Path, Path]:
    """Of the one kernel that `program` compiles, given `arguments`: what ptxas says, its PTX and its cubin."""
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    tests = Path(__file__).parent
    environment |= {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests), environment.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(str(PTXAS)).parent), environment["PATH"]]),
    }
    built = subprocess.run([sys.executable, program, *arguments], env=environment, capture_output=True, text=True)
    (ptx,) = list(folder.glob("*.ptx")) or pytest.fail(built.stdout + built.stderr)
    cubin = folder / "kernel.cubin"
    command = [str(PTXAS), f"-arch={machine(architecture)}", "-O3", "-v", str(ptx), "-o", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return said.stdout + said.stderr, ptx, cubin


def sound(said: str) -> bool:
    """Whether ptxas spilled nothing, and had no product wait for the one before."""
    spilled_nothing = "0 bytes spill stores, 0 bytes spill loads" in said
    return spilled_nothing and "serialized" not in said and "insufficient registers" not in said


def compile_changed(kernel: Any, problem: Any, changed: Mapping[str, Any], chip: Any = None) -> None:
    """Of a legal schedule: the model's first choice, but for some fields; for an H200, or another chip."""
    from scheduler.core import hardware
    from scheduler.model.cost import CostModel
    from scheduler.model.pruning import prune

    chip = chip or hardware.find("NVIDIA H200")
    space = kernel.space(problem, chip.target)
    one = space.decode(prune(kernel, problem, chip, CostModel(chip)).candidates()[0].schedule | changed)
    assert not space.broken(one)
    lowered_for(lambda *args: kernel.run(problem, one, chip.target, *args), problem.operands(), chip).compile()


def compile_for_h200(run: Callable[..., Any], operands: Any) -> None:
    """Of `run` on a device that is not here; Mosaic GPU leaves the PTX where `compiled` looks for it."""
    from scheduler.core import hardware

    lowered_for(run, operands, hardware.find("NVIDIA H200")).compile()
