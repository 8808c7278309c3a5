"""Chips: what each supplies, in SI units with sources, and which one is here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import jax

from scheduler.core.errors import SchedulerError, UnknownChip
from scheduler.core.records import Clock, Sweep
from search_spaces.kernel import Target

KIB = 1024
GIB = 1024**3
MB = 10**6


@dataclasses.dataclass(frozen=True)
class Abilities:
    """What a kind of device offers those who measure on it.

    Attributes:
      clock: by what its times are taken.
      repetitions: of a candidate, and of one in each round of a final comparison: times settle soon on a device's own
        clock.
      cold: operands can be made to come from its memory, by rotating through more of them than its caches hold.
      host_memory: its memory is that of the host.
      interpreted: Pallas kernels are interpreted there, which only rehearses: a search may take hours, a final
        comparison as few rounds as can be, and shares of the peaks tell nothing.
    """

    clock: Clock
    repetitions: tuple[int, int]
    cold: bool = True
    host_memory: bool = False
    interpreted: bool = False


_GPU = Abilities("cupti", repetitions=(10, 10))


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One chip.

    Attributes:
      kind: the name its driver gives.
      platform, architecture, cores: as in `Target`.
      memory_bytes: device memory.
      flops_per_s: dense peak by arithmetic: dtype names, "tf32", "bf16_3x".
      hbm_bytes_per_s: device memory bandwidth, reads plus writes.
      l2_bytes_per_s, l2_bytes: bandwidth and capacity of the last-level cache.
      sector_bytes: of the least part of a line that this cache delivers.
      onchip_bytes: the most on-chip memory that one block may ask for.
      onchip_bytes_per_core: what the resident blocks of a core share, `onchip_reserved_bytes` of it lost per block.
      onchip_bytes_per_clock: read bandwidth of one core's on-chip memory.
      registers_per_thread, registers_per_core, threads_per_core, blocks_per_core: limits.
      clock_hz: the highest.
      boost: that over the clock which `flops_per_s` assumes: while few cores are busy, they compute so much faster.
      special_per_clock, lanes_per_core: exponentials per clock and float32 lanes of one core.
      memory_latency_s, l2_latency_s: of a loaded machine.
      launch_s: an empty launch, as a kernel's own duration shows it.
      borrowed: the figures are those of another chip of its architecture: good for ranking, no bound on anything.
      abilities: what measuring on it can count on.
    """

    kind: str
    platform: str
    architecture: str
    cores: int
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    hbm_bytes_per_s: float
    l2_bytes_per_s: float
    l2_bytes: int
    onchip_bytes: int
    onchip_bytes_per_core: int
    onchip_reserved_bytes: int
    onchip_bytes_per_clock: float
    registers_per_thread: int
    registers_per_core: int
    threads_per_core: int
    blocks_per_core: int
    clock_hz: float
    special_per_clock: float
    lanes_per_core: int
    memory_latency_s: float
    l2_latency_s: float
    launch_s: float
    sector_bytes: int = 32
    boost: float = 1.0
    borrowed: bool = False
    abilities: Abilities = _GPU

    @property
    def id(self) -> str:
        """Kind, cores and memory: slices and variants of one chip are different machines to a tuner."""
        return f"{self.kind} ({self.cores} cores, {round(self.memory_bytes / GIB)} GiB)"

    @property
    def target(self) -> Target:
        return Target(self.platform, self.kind, self.architecture, self.cores)

    def peak(self, arithmetic: str) -> float:
        """Dense peak in FLOP/s; an arithmetic the table lacks runs at the float32 rate."""
        return self.flops_per_s.get(arithmetic, self.flops_per_s["float32"])

    def ridge(self, arithmetic: str) -> float:
        """Arithmetic intensity in FLOP/B at which the memory stops being the bound (roofline model)."""
        return self.peak(arithmetic) / self.hbm_bytes_per_s


def _peaks(half: float, tf32: float, fp32: float, int8: float = 0.0, fp8: float = 0.0) -> Mapping[str, float]:
    peaks = {"bfloat16": half, "float16": half, "tf32": tf32, "bf16_3x": half / 3, "float32": fp32}
    narrow = {"int8": int8, "float8_e4m3fn": fp8, "float8_e5m2": fp8}
    return MappingProxyType(peaks | {name: rate for name, rate in narrow.items() if rate})


# NVIDIA H100 Tensor Core GPU Architecture (whitepaper, 2022), tables of the SXM5: rates, registers, threads, memory.
# Block limit 227 KiB and 1 KiB reserved per block: CUDA C Programming Guide, compute capability 9.0. The L2 rate is the
# 64 bytes that each core takes per clock (matmuls on an H200 come within 5 % of it, counting what cores ask for);
# latencies are priors; 60 MB of L2 is what an H200's driver reports, 1.98 GHz its highest clock, and 1.83 GHz follows
# from 4,096 bfloat16 operations per core and clock and the peak.
_H100 = Hardware(
    kind="NVIDIA H100 80GB HBM3",
    platform="cuda",
    architecture="sm_90",
    cores=132,
    memory_bytes=80 * GIB,
    flops_per_s=_peaks(half=989.4e12, tf32=494.7e12, fp32=66.9e12, int8=1978.9e12, fp8=1978.9e12),
    hbm_bytes_per_s=3.35e12,
    l2_bytes_per_s=16.7e12,
    l2_bytes=50 * MB,
    onchip_bytes=227 * KIB,
    onchip_bytes_per_core=228 * KIB,
    onchip_reserved_bytes=1 * KIB,
    onchip_bytes_per_clock=128,
    registers_per_thread=255,
    registers_per_core=65536,
    threads_per_core=2048,
    blocks_per_core=32,
    clock_hz=1.98e9,
    special_per_clock=16,
    lanes_per_core=128,
    memory_latency_s=0.7e-6,
    l2_latency_s=0.3e-6,
    launch_s=2e-6,
    boost=1.98 / 1.83,
)

TABLE: tuple[Hardware, ...] = (
    # NVIDIA H200 datasheet: the H100's processor with 141 GB at 4.8 TB/s.
    dataclasses.replace(_H100, kind="NVIDIA H200", memory_bytes=140 * GIB, hbm_bytes_per_s=4.8e12, l2_bytes=60 * MB),
    _H100,
    # NVIDIA A100 Tensor Core GPU Architecture (whitepaper, 2020), SXM4 80 GB; 163 KiB per block: CUDA C Programming
    # Guide.
    Hardware(
        kind="NVIDIA A100-SXM4-80GB",
        platform="cuda",
        architecture="sm_80",
        cores=108,
        memory_bytes=80 * GIB,
        flops_per_s=_peaks(half=312e12, tf32=156e12, fp32=19.5e12, int8=624e12),
        hbm_bytes_per_s=2.039e12,
        l2_bytes_per_s=5e12,
        l2_bytes=40 * MB,
        onchip_bytes=163 * KIB,
        onchip_bytes_per_core=164 * KIB,
        onchip_reserved_bytes=1 * KIB,
        onchip_bytes_per_clock=128,
        registers_per_thread=255,
        registers_per_core=65536,
        threads_per_core=2048,
        blocks_per_core=32,
        clock_hz=1.41e9,
        special_per_clock=16,
        lanes_per_core=64,
        memory_latency_s=0.6e-6,
        l2_latency_s=0.25e-6,
        launch_s=2e-6,
    ),
)

# One constant row for every CPU: the interpreter only rehearses there. The rates are those of a large server, so that a
# lower bound is one everywhere; what an interpreted grid step costs is the cost model's matter.
CPU = Hardware(
    kind="cpu",
    platform="cpu",
    architecture="cpu",
    cores=1,
    memory_bytes=16 * GIB,
    flops_per_s=_peaks(half=16e12, tf32=8e12, fp32=8e12),
    hbm_bytes_per_s=500e9,
    l2_bytes_per_s=5e12,
    l2_bytes=1 * MB,
    onchip_bytes=32 * MB,
    onchip_bytes_per_core=32 * MB,
    onchip_reserved_bytes=0,
    onchip_bytes_per_clock=64,
    registers_per_thread=10**9,
    registers_per_core=10**9,
    threads_per_core=10**9,
    blocks_per_core=1,
    clock_hz=2e9,
    special_per_clock=1,
    lanes_per_core=8,
    memory_latency_s=1e-7,
    l2_latency_s=2e-8,
    launch_s=1e-3,
    abilities=Abilities("wall", repetitions=(3, 2), cold=False, host_memory=True, interpreted=True),
)

CHIPS = (*TABLE, CPU)


def find(kind: str) -> Hardware:
    """The row of a chip by its driver's name or a part of it, in any case: "NVIDIA H200", "h200".

    Raises:
      ValueError: no such row, or several; the message names those there are.
    """
    rows = {row.kind: row for row in CHIPS}
    found = [kind] if kind in rows else named(kind, rows)
    if len(found) == 1:
        return rows[found[0]]
    if found:
        raise ValueError(f"hardware {kind!r} is several: {', '.join(found)}")
    raise ValueError(f"no hardware {kind!r} (known: {', '.join(rows)})")


def identified(identity: str) -> Hardware | None:
    """The row whose `id` this is, as keys of records have it; None where the table has no such chip."""
    return next((row for row in CHIPS if row.id == identity), None)


def named(text: str, kinds: Iterable[str]) -> list[str]:
    """Those of `kinds` that a person means by `text`: a part of the name, in any case."""
    return [kind for kind in kinds if text.lower() in kind.lower()]


def describe(target: Target) -> Hardware:
    """The row for a chip as its driver describes it.

    A chip without a row of its own borrows the figures of one of its architecture, scaled to its cores, under its own
    name: predictions are then rough, while measurements and keys are its own.

    Raises:
      UnknownChip: no row is of its architecture. Capacities of another one would be wrong in kind.
    """
    if target.platform == CPU.platform:
        return CPU
    kin = [row for row in TABLE if (row.platform, row.architecture) == (target.platform, target.architecture)]
    if not kin:
        raise UnknownChip(
            f"{target.kind} ({target.architecture}) is not in the table of chips, nor is another of its architecture: "
            "what it can hold and how fast it is are not known, so no Pallas kernel is chosen or tuned for it"
        )
    row = next((row for row in kin if row.kind == target.kind), kin[0])
    share = target.cores / row.cores
    peaks = MappingProxyType({name: rate * share for name, rate in row.flops_per_s.items()})
    return dataclasses.replace(
        row, kind=target.kind, cores=target.cores, flops_per_s=peaks, borrowed=row.kind != target.kind
    )


def detect(device: jax.Device | None = None) -> Hardware:
    """The chip of `device`, by default the one JAX would use.

    Raises:
      SchedulerError: JAX finds no device at all; an `UnknownChip` where the table tells nothing of the one it finds.
    """
    return describe(target_of(device or _first_device()))


def swept(sweep: Sweep) -> Hardware:
    """The chip of a recording; raises as `describe` does."""
    return describe(Target(sweep.platform, sweep.kind, sweep.architecture, sweep.cores))


def target_of(device: jax.Device) -> Target:
    """The chip of `device` as its driver describes it."""
    if device.platform == CPU.platform:
        return CPU.target
    platform = "cuda" if "NVIDIA" in device.device_kind else device.platform
    capability = str(getattr(device, "compute_capability", ""))
    architecture = f"sm_{capability.replace('.', '')}" if platform == "cuda" else device.device_kind
    return Target(platform, device.device_kind, architecture, int(getattr(device, "core_count", None) or 1))


def _first_device() -> jax.Device:
    try:
        return jax.devices()[0]
    except (RuntimeError, AssertionError) as error:  # an assertion of its own, where it is asked a second time
        wanted = os.environ.get("JAX_PLATFORMS")
        cause = f"of JAX_PLATFORMS={wanted}" if wanted else "at all"
        reason = str(error).partition("\n")[0].partition(" (you may need")[0]
        raise SchedulerError(
            f"JAX finds no device {cause}{f' ({reason})' if reason else ''}; unset JAX_PLATFORMS, or set "
            "JAX_PLATFORMS=cpu to rehearse"
        ) from error
