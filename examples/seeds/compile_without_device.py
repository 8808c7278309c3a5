"""What the compiler says of a teaching kernel for a chip that is not here, or why it cannot be asked.

As a program it compiles, without a device: JAX's CUDA plugin gets a description of the chip, made of its row of the
table of chips. It is a process of its own because platforms are chosen when JAX starts.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from scheduler.core import hardware
from scheduler.core.hardware import Hardware
from search_spaces import Kernel, Operation, Problem, load, locate

COMPILES = "compiles"
# Of a chip on which a block may have so little, the compiler refuses every kernel, and says how much that one wanted.
NEXT_TO_NOTHING = 16
DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: {threads}
  shared_memory_per_block: {onchip}  shared_memory_per_block_optin: {onchip}  shared_memory_per_core: {onchip_of_core}
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


def verdicts(
    chip: Hardware,
    operation: Operation[Any],
    problem: Problem,
    schedules: Sequence[Any],
    *,
    onchip_bytes: int | None = None,
) -> list[str]:
    """Of each schedule of the operation's first kernel, `COMPILES` or the first line of what the compiler says.

    Args:
      onchip_bytes: that a block of the chip has; None is as the table has it.

    Raises:
      RuntimeError: the compiler cannot be asked; what its process said last.
    """
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    # Without the packages of a machine with a GPU (CUPTI) the plugin would not start.
    environment |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    asked = {
        "operation": locate(operation),
        "problem": problem.canonical(),
        "chip": chip.kind,
        "onchip_bytes": onchip_bytes or chip.onchip_bytes,
        "schedules": [dataclasses.asdict(schedule) for schedule in schedules],
    }
    command = [sys.executable, str(Path(__file__).resolve()), json.dumps(asked)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if ran.returncode:
        last = (ran.stderr.strip() or f"status {ran.returncode}").splitlines()[-1]
        raise RuntimeError(f"the compiler for {chip.kind} cannot be asked: {last}")
    found: list[str] = json.loads(ran.stdout.splitlines()[-1])
    return found


def requests(chip: Hardware, operation: Operation[Any], problem: Problem, schedules: Sequence[Any]) -> list[int | None]:
    """On-chip bytes that the compiler wants for each schedule, whether the chip has them or not."""
    said = verdicts(chip, operation, problem, schedules, onchip_bytes=NEXT_TO_NOTHING)
    return [requested_bytes(one) for one in said]


def requested_bytes(said: str) -> int | None:
    """What a compiler's refusal says was asked for; None where it is no such refusal."""
    found = re.search(r"requested (\d+)|smem_bytes=(\d+)", said)
    return int(found[1] or found[2]) if found else None


def said_of(kernel: Kernel[Any, Any], problem: Problem, schedule: Any, chip: Hardware, operands: Sequence[Any]) -> str:
    """What this process's compiler says of one schedule, for the chip that `operands` lie on."""
    try:
        jax.jit(lambda *args: kernel.run(problem, schedule, chip.target, *args)).lower(*operands).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return COMPILES


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


def main(text: str) -> None:
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

    asked = json.loads(text)
    operation = load(asked["operation"])
    problem, kernel = operation.problem.from_canonical(asked["problem"]), operation.kernels[0]
    chip = dataclasses.replace(hardware.find(asked["chip"]), onchip_bytes=asked["onchip_bytes"])
    schedule = kernel.space(problem, chip.target).schedule
    topology = topologies.get_topology_desc(platform="cuda", target_config=described(chip), topology="1x1x1")
    sharding = SingleDeviceSharding(topology.devices[0])
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in problem.operands()]
    device = AbstractDevice(device_kind=chip.kind, num_cores=chip.cores, platform="cuda")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        found = [said_of(kernel, problem, schedule(**one), chip, operands) for one in asked["schedules"]]
    print(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("This is a process of memory_limits.py, which asks a GPU's compiler where no GPU is: run that one.")
    main(sys.argv[1])
