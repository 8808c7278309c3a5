"""Kernels compiled for a GPU that is not here, down to machine code: what ptxas says of them, and the PTX.

Needs JAX's CUDA plugin and ptxas (the wheel nvidia-cuda-nvcc), no driver. Mosaic GPU takes the architecture of all that
a process compiles from one place, so a process compiles for one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def tool(name: str) -> str | None:
    """Where a program of the CUDA toolkit is: in NVIDIA's wheels, or on PATH."""
    wheels = importlib.util.find_spec("nvidia")
    places = [Path(root) for root in wheels.submodule_search_locations or ()] if wheels else []
    return next((str(path) for place in places for path in place.glob(f"*/bin/{name}")), None) or shutil.which(name)


def prepare(folder: Path) -> None:
    """Before JAX is imported: PTX goes to `folder`, and no driver is asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        os.environ.pop(name, None)
    os.environ |= {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "PATH": os.pathsep.join([str(Path(str(tool("ptxas"))).parent), os.environ["PATH"]]),
    }


@dataclasses.dataclass(frozen=True)
class Compiled:
    """One kernel.

    Attributes:
      ptx: where its PTX is.
      registers: of a thread.
      spilled_bytes: stored to local memory and loaded from there.
      onchip_bytes: that a block asks for.
    """

    ptx: Path
    registers: int
    spilled_bytes: int
    onchip_bytes: int | None


def compiled(run: Callable[..., Any], operands: Sequence[Any], hardware: Any, folder: Path) -> Compiled:
    """The kernel of `run`, the only one that it launches, for a chip of `scheduler.core.hardware`; after `prepare`."""
    import jax

    from scheduler.measure.build import requested_onchip_bytes

    lowered, before = lowered_for(run, operands, hardware), set(folder.glob("*.ptx"))
    lowered.compile()
    (ptx,) = set(folder.glob("*.ptx")) - before
    jax.clear_caches()
    return Compiled(ptx, *assembled(ptx, hardware.architecture), requested_onchip_bytes(lowered))


def machine(architecture: str) -> str:
    """What ptxas calls an architecture with the instructions that no later one has: wgmma, tcgen05."""
    return f"{architecture}a" if architecture in ("sm_90", "sm_100") else architecture


def assembled(ptx: Path, architecture: str) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills, of PTX as ptxas takes it for this architecture.

    PTX for an older one is compiled for a newer one, as a driver would; of the kernels by warp-level MMA it differs
    from that for the newer one in nothing but the line that says so.
    """
    command = [str(tool("ptxas")), f"-arch={machine(architecture)}", "-O3", "-v", str(ptx), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    text = said.stdout + said.stderr
    spills = sum(int(number) for number in re.findall(r"(\d+) bytes spill", text))
    (registers,) = re.findall(r"Used (\d+) registers", text)
    return int(registers), spills


def lowered_for(run: Callable[..., Any], operands: Sequence[Any], hardware: Any) -> Any:
    """`run` lowered for a chip that is not here."""
    import jax

    from scheduler.measure import absent_gpu

    sharding = jax.sharding.SingleDeviceSharding(absent_gpu.device(hardware))
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in operands]
    with absent_gpu.compiling_for(hardware):
        return jax.jit(run).lower(*placed)
