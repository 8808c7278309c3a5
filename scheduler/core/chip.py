"""Hardware description of a chip in SI units, and its measurement capabilities: the columns of the hardware table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from scheduler.core.records import Clock
from search_spaces.kernel import Target

KIB = 1024
MIB = 1024**2
GIB = 1024**3
MB = 10**6


@dataclasses.dataclass(frozen=True)
class Abilities:
    """Measurement capabilities of a kind of device.

    Attributes:
      clock: the clock that measures times.
      repetitions: the number of repetitions for a candidate, and for each round of a final comparison. Times on the
        device's own clock converge quickly, so few suffice. 0 for the latter: times are deterministic, so one
        measurement decides.
      cold: whether operands can be made to come from device memory, by rotating through buffers larger than the caches.
      host_memory: whether device memory is host memory.
      interpreted: whether Pallas kernels run in the interpreter. Such runs are rehearsals: a search may take hours, the
        final comparison uses the fewest rounds possible, and fractions of the peaks are meaningless.
    """

    clock: Clock
    repetitions: tuple[int, int]
    cold: bool = True
    host_memory: bool = False
    interpreted: bool = False

    @property
    def estimates(self) -> bool:
        """Whether times are compiler estimates instead of measurements."""
        return self.clock == "static"


GPU = Abilities("cupti", repetitions=(10, 10))
# A chip that is not present: its compiler estimates times.
NOT_HERE = Abilities("static", repetitions=(1, 0))


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Description of one chip.

    Attributes:
      kind: the name that its driver reports.
      platform, architecture, cores: as in `Target`.
      memory_bytes: device memory.
      flops_per_s: dense peak by arithmetic: dtype names, "tf32", "bf16_3x".
      hbm_bytes_per_s: device memory bandwidth, reads plus writes.
      l2_bytes_per_s, l2_bytes: bandwidth and capacity of the last-level cache. If there is none (0 bytes), the
        bandwidth is that of copies into on-chip memory.
      sector_bytes: size of a sector, the smallest part of a cache line that the last-level cache transfers.
      onchip_bytes: maximum on-chip memory per block.
      onchip_default_bytes: on-chip memory of a block that requests no limit (`Footprint.onchip_limit_bytes`); 0 if that
        is the maximum.
      onchip_bytes_per_core: on-chip memory shared by the resident blocks of a core; each block reserves
        `onchip_reserved_bytes` of it.
      onchip_bytes_per_clock: read bandwidth of one core's on-chip memory.
      registers_per_thread, registers_per_core, threads_per_core, blocks_per_core: limits.
      clock_hz: the maximum clock rate.
      boost: `clock_hz` over the clock that `flops_per_s` assumes; the speedup per core while few cores are busy.
      special_per_clock, lanes_per_core: exponentials per clock and float32 lanes of one core.
      memory_latency_s, l2_latency_s: latencies under load.
      launch_s: duration of an empty launch, as measured for the kernel itself.
      sequential_grid: a core runs the tiles of a launch in one loop. A step's copies start at the beginning of an
        earlier step, each step waits for its own copies, and a block that the previous step had is not copied again
        (pipelining on TPUs: docs.jax.dev/en/latest/pallas/pipelining.html).
      names: common names of the chip in addition to its driver's name.
      topology: JAX's topology name of machines with this chip, for ahead-of-time compilation on any host
        (`jax.experimental.topologies`); "" if there is no such compiler.
      static_cycles: whether that compiler estimates the cycles of a program.
      borrowed: the figures are valid for ranking but not as bounds, because they come from another chip of the
        architecture, or because times are estimates by a compiler that does not respect them.
      abilities: the measurement capabilities.
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
    sequential_grid: bool = False
    sector_bytes: int = 32
    boost: float = 1.0
    names: tuple[str, ...] = ()
    topology: str = ""
    static_cycles: bool = False
    onchip_default_bytes: int = 0
    borrowed: bool = False
    abilities: Abilities = GPU

    @property
    def id(self) -> str:
        """Kind, cores and memory, because slices and variants of one chip have different best schedules."""
        return f"{self.kind} ({self.cores} cores, {round(self.memory_bytes / GIB)} GiB)"

    @property
    def target(self) -> Target:
        return Target(self.platform, self.kind, self.architecture, self.cores)

    def peak(self, arithmetic: str) -> float:
        """Returns the dense peak in FLOP/s; an arithmetic that is not in the table has the float32 rate."""
        return self.flops_per_s.get(arithmetic, self.flops_per_s["float32"])

    def ridge(self, arithmetic: str) -> float:
        """Returns the ridge point of the roofline in FLOP/B; below it, memory bandwidth is the bound."""
        return self.peak(arithmetic) / self.hbm_bytes_per_s


def peaks(half: float, tf32: float, fp32: float, int8: float = 0.0, fp8: float = 0.0) -> Mapping[str, float]:
    rates = {"bfloat16": half, "float16": half, "tf32": tf32, "bf16_3x": half / 3, "float32": fp32}
    narrow = {"int8": int8, "float8_e4m3fn": fp8, "float8_e5m2": fp8}
    return MappingProxyType(rates | {name: rate for name, rate in narrow.items() if rate})
