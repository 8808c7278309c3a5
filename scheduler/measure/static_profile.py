"""Reports on-chip memory and estimated cycles of a program, from the chip's compiler on a host without the chip.

The TPU compiler is a library, libtpu (the extra `tpu`). It compiles for a topology that JAX names. Besides the program,
it writes the VMEM that each operation takes, and the number of cycles of its instruction schedule. libtpu reads its
settings once when it is loaded, so a process that compiles must be started with those of `environment`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from scheduler.core.errors import SchedulerError
from scheduler.core.hardware import Hardware

# The variable with the path of the reports; `environment` sets it.
REPORTS = "TILE_SCHEDULER_STATIC_REPORTS"

_CYCLES = re.compile(r"estimated_cycles: (\d+)")
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = r"([\d.]+)([KMG]?)"
# libtpu rejects a program that exceeds VMEM in three places, with different messages.
_TOO_MUCH = tuple(
    re.compile(text)
    for text in (
        rf"Scoped allocation with size {_SIZE}",
        rf"Ran out of memory in memory space vmem\. Used {_SIZE}",
        rf"Allocation \(size={_SIZE}\) would exceed memory",
    )
)


@dataclasses.dataclass(frozen=True)
class Profile:
    """The compiler's report on one program.

    Attributes:
      onchip_bytes: the maximum on-chip memory of one operation, including spills.
      spill_bytes: the bytes of these that spilled registers take.
      cycles: the total of all operations, run one after another, in the compiler's static schedule; None if the
        compiler has no latency model of the chip (`Hardware.static_cycles`).
    """

    onchip_bytes: int
    spill_bytes: int
    cycles: int | None


class OutOfOnchipMemory(Exception):
    """The compiler rejected a program that needs too much on-chip memory.

    Attributes:
      asked: the bytes in the compiler's message: the total, or the bytes allocated before the compiler gave up.
    """

    def __init__(self, message: str, asked: int) -> None:
        super().__init__(message)
        self.asked = asked


def missing(hardware: Hardware) -> str | None:
    """Returns why this host cannot compile for `hardware`; None if it can."""
    if not hardware.topology:
        return f"no compiler for {hardware.kind} runs on a host without one"
    if importlib.util.find_spec("libtpu") is None:
        return f"the compiler for {hardware.kind} is not installed: pip install 'tile-scheduler[tpu]'"
    return None


def environment(reports: Path, hardware: Hardware) -> dict[str, str]:
    """Returns the environment of a process that compiles for `hardware` and writes to its own folder `reports`.

    Cycles are requested only if the compiler models the latencies of the chip; otherwise it would abort the process.
    """
    flags: dict[str, object] = {
        "xla_jf_dump_to": reports,
        "xla_jf_dump_llo_text": "true",
        "xla_jf_dump_llo_pass_label_regex": "none_of_them",  # else it writes about three hundred files
    }
    if hardware.static_cycles:
        flags["xla_jf_dump_static_llo_profile_to"] = reports
    return {
        REPORTS: str(reports),
        "JAX_PLATFORMS": "cpu",
        # Do not query a metadata server; any host name works.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": " ".join(f"--{name}={value}" for name, value in flags.items()),
    }


def profile(run: Callable[..., Any], operands: Iterable[jax.ShapeDtypeStruct], hardware: Hardware) -> Profile:
    """Compiles `run` for `hardware`, in a process started with `environment`.

    Raises:
      OutOfOnchipMemory: the compiler rejected the program.
      SchedulerError: this process was not started with `environment`, or has no such compiler.
      Exception: any exception of lowering or compiling.
    """
    return compiled(traced(run, operands, hardware).lower())


def traced(run: Callable[..., Any], operands: Iterable[jax.ShapeDtypeStruct], hardware: Hardware) -> jax.stages.Traced:
    """Traces `run` with operands on `hardware`, so that it is lowered for that chip.

    Raises:
      SchedulerError: this process has no compiler for the chip.
      Exception: any exception of tracing.
    """
    if (reason := missing(hardware)) is not None:
        raise SchedulerError(reason)
    device = topologies.get_topology_desc(platform=hardware.platform, topology_name=hardware.topology).devices[0]
    placed = jax.sharding.SingleDeviceSharding(device)
    return jax.jit(run).trace(*(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for x in operands))


def compiled(lowered: jax.stages.Lowered) -> Profile:
    """Compiles a program that was lowered for its chip, and returns the report; raises as `profile` does."""
    if REPORTS not in os.environ:
        raise SchedulerError(f"{REPORTS} is not set: start the process that compiles with static_profile.environment")
    reports = Path(os.environ[REPORTS])
    for file in reports.iterdir():
        file.unlink()
    try:
        lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if (refused := _asked(str(error))) is None:
            raise
        raise OutOfOnchipMemory(*refused) from error
    return _read(reports)


def _asked(message: str) -> tuple[str, int] | None:
    """Returns the message of a rejection and its bytes; None if the error does not concern on-chip memory."""
    for pattern in _TOO_MUCH:
        if (hit := pattern.search(message)) is not None:
            said, _, _ = message[hit.start() :].partition("\n")
            return said[:300].strip(), round(float(hit[1]) * _SIZES[hit[2]])
    return None


def _read(reports: Path) -> Profile:
    """Reads the reports of one program. Its on-chip memory is 0 if no operation uses any."""
    onchip, spilled = 0, 0
    for file in reports.glob("*vmem_report.html"):
        text = file.read_text()
        start = text.index("const DATA =") + len("const DATA =")
        data, _ = json.JSONDecoder().raw_decode(text[start:].lstrip())
        for operation in data["hlo_breakdowns"].values():
            blocks = [block for block in operation["blocks"] if block["block_type"] == "SCOPED"]
            total = sum(block["block_size"] for block in blocks)
            if total > onchip:
                allocations = (each for block in blocks for each in block["allocations"])
                onchip, spilled = total, sum(each["size"] for each in allocations if each["tag"] == "SPILL")
    found = [file.read_text() for file in reports.glob("*_static_llo_profile.textproto")]
    cycles = sum(int(estimate) for text in found for estimate in _CYCLES.findall(text))
    return Profile(onchip, spilled, cycles if found else None)
