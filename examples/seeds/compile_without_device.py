"""What the compiler says of the teaching kernel for a chip that is not here, or why it cannot be asked.

    python examples/seeds/compile_without_device.py "NVIDIA H200" "m=1024 n=1024 k=4096 dtype=float32" 16 32 64

As a program it compiles, without a device: JAX's CUDA plugin gets a description of the chip, made of its row of the
table of chips. It is a process of its own because platforms are chosen when JAX starts.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from scheduler.core import hardware
from scheduler.core.hardware import Hardware
from search_spaces.matmul import MatmulProblem

COMPILES = "compiles"
DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: {threads}
  shared_memory_per_block: 49152  shared_memory_per_block_optin: {onchip}  shared_memory_per_core: {onchip_of_core}
  core_count: {cores}  fpus_per_core: {lanes}  clock_rate_ghz: {clock_ghz}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}  l2_cache_size: {l2}  device_memory_size: {memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: {registers}  registers_per_block_limit: {registers}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{kind}"
"""


def missing() -> str | None:
    """Why nothing can be compiled for an NVIDIA GPU here, in words; None where it can."""
    if any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        return None
    return "the compiler for NVIDIA GPUs is not here: pip install 'tile-scheduler[cuda13]'"


def verdicts(chip: Hardware, problem: MatmulProblem, block_ks: Sequence[int]) -> dict[int, str]:
    """For each BK, `COMPILES` or the first line of what the compiler says, of blocks of 128 x 128.

    Raises:
      RuntimeError: the compiler cannot be asked; what its process said last.
    """
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    # Without the packages of a machine with a GPU (CUPTI) the plugin would not start.
    environment |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), chip.kind, str(problem), *map(str, block_ks)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if ran.returncode:
        said = (ran.stderr.strip() or f"status {ran.returncode}").splitlines()[-1]
        raise RuntimeError(f"the compiler for {chip.kind} cannot be asked: {said}")
    return {int(block_k): said for block_k, said in json.loads(ran.stdout.splitlines()[-1]).items()}


def described(chip: Hardware) -> str:
    """The chip as XLA wants a compilation target to be described."""
    capability = chip.architecture.removeprefix("sm_")
    return DESCRIPTION.format(
        kind=chip.kind,
        cores=chip.cores,
        threads=chip.threads_per_core,
        onchip=chip.onchip_bytes,
        onchip_of_core=chip.onchip_bytes_per_core,
        lanes=chip.lanes_per_core,
        clock_ghz=chip.clock_hz / 1e9,
        bandwidth=round(chip.hbm_bytes_per_s),
        l2=chip.l2_bytes,
        memory=chip.memory_bytes,
        registers=chip.registers_per_core,
        major=capability[:-1],
        minor=capability[-1],
    )


def asked(chip: Hardware, problem: MatmulProblem, block_ks: Sequence[int]) -> dict[int, str]:
    """As `verdicts`, in this process."""
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

    topology = topologies.get_topology_desc(platform="cuda", target_config=described(chip), topology="1x1x1")
    sharding = SingleDeviceSharding(topology.devices[0])
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in problem.operands()]
    device = AbstractDevice(device_kind=chip.kind, num_cores=chip.cores, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        return {block_k: said(chip, problem, block_k, operands) for block_k in block_ks}


def said(chip: Hardware, problem: MatmulProblem, block_k: int, operands: Sequence[Any]) -> str:
    """What the compiler says of one BK, of arrays or of their shapes."""
    from teaching_matmul import Blocks, TeachingMatmul

    def run(*args: Any) -> jax.Array:
        return TeachingMatmul().run(problem, Blocks(128, 128, block_k), chip.target, *args)

    try:
        jax.jit(run).lower(*operands).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return COMPILES


if __name__ == "__main__":
    kind, text, *rest = sys.argv[1:]
    problem = MatmulProblem.parse(dict(field.split("=") for field in text.split()))
    print(json.dumps(asked(hardware.find(kind), problem, list(map(int, rest)))))
