"""Hopper kernels as machine code without a GPU: compiled for an H200 that is not here, and what ptxas says of them.

A test names a program, itself as a rule, which compiles one kernel by `compile_for_h200`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: 233472  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  clock_rate_ghz: 1.98  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def tool(name: str) -> str | None:
    """Where a program of the CUDA toolkit is: in NVIDIA's wheels, or on PATH."""
    wheels = importlib.util.find_spec("nvidia")
    places = [Path(root) for root in wheels.submodule_search_locations] if wheels else []
    return next((str(path) for place in places for path in place.glob(f"*/bin/{name}")), None) or shutil.which(name)


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


def compiled(program: str, folder: Path, *arguments: str) -> tuple[str, Path, Path]:
    """Of the one kernel that `program` compiles, given `arguments`: what ptxas says, its PTX and its cubin."""
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environment |= {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(str(PTXAS)).parent), environment["PATH"]]),
    }
    built = subprocess.run([sys.executable, program, *arguments], env=environment, capture_output=True, text=True)
    (ptx,) = folder.glob("*.ptx") or pytest.fail(built.stdout + built.stderr)
    cubin = folder / "kernel.cubin"
    command = [str(PTXAS), "-arch=sm_90a", "-O3", "-v", str(ptx), "-o", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return said.stdout + said.stderr, ptx, cubin


def compile_for_h200(run: Callable[..., Any], operands: Any) -> None:
    """Of `run` on a device that is not here; Mosaic GPU leaves the PTX where `compiled` looks for it."""
    import jax
    from jax.experimental import topologies

    device = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in operands]
    mesh = jax.sharding.AbstractMesh(
        (1,),
        ("x",),
        abstract_device=jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda"),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        jax.jit(run).lower(*placed).compile()
