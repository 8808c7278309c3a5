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

CONFIGURATION = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: {core_bytes}  threads_per_core_limit: {threads}  core_count: {cores}  fpus_per_core: {lanes}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}  l2_cache_size: {l2_bytes}  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory_bytes}
  shared_memory_per_block_optin: {block_bytes}  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{kind}"
"""


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

    from scheduler.measure.lowered import asked_onchip_bytes

    lowered, before = lowered_for(run, operands, hardware), set(folder.glob("*.ptx"))
    lowered.compile()
    (ptx,) = set(folder.glob("*.ptx")) - before
    jax.clear_caches()
    return Compiled(ptx, *assembled(ptx, hardware.architecture), asked_onchip_bytes(lowered))


def assembled(ptx: Path, architecture: str) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills, of PTX as ptxas takes it for this architecture.

    PTX for an older one is compiled for a newer one, as a driver would; of the kernels by warp-level MMA it differs
    from that for the newer one in nothing but the line that says so.
    """
    machine = "sm_90a" if architecture == "sm_90" else architecture
    command = [str(tool("ptxas")), f"-arch={machine}", "-O3", "-v", str(ptx), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    text = said.stdout + said.stderr
    spills = sum(int(number) for number in re.findall(r"(\d+) bytes spill", text))
    (registers,) = re.findall(r"Used (\d+) registers", text)
    return int(registers), spills


def lowered_for(run: Callable[..., Any], operands: Sequence[Any], hardware: Any) -> Any:
    """`run` lowered for a chip that is not here."""
    import jax
    from jax.experimental import topologies
    from jax.experimental.mosaic.gpu import utils

    major, minor = divmod(int(hardware.architecture.removeprefix("sm_")), 10)
    configuration = CONFIGURATION.format(
        core_bytes=hardware.onchip_bytes_per_core,
        block_bytes=hardware.onchip_bytes,
        threads=hardware.threads_per_core,
        cores=hardware.cores,
        lanes=hardware.lanes_per_core,
        bandwidth=int(hardware.hbm_bytes_per_s),
        l2_bytes=hardware.l2_bytes,
        clock_ghz=hardware.clock_hz / 1e9,
        memory_bytes=hardware.memory_bytes,
        major=major,
        minor=minor,
        kind=hardware.kind,
    )
    # Of a device that is not here Mosaic GPU assumes Hopper (jax 0.12).
    utils._infer_arch = lambda: (major, minor)
    device = topologies.get_topology_desc(platform="cuda", target_config=configuration, topology="1x1x1").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in operands]
    mesh = jax.sharding.AbstractMesh(
        (1,),
        ("x",),
        abstract_device=jax.sharding.AbstractDevice(
            device_kind=hardware.kind, num_cores=hardware.cores, platform="cuda"
        ),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(run).lower(*placed)
