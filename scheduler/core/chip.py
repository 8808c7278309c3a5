"""What a chip supplies, in SI units, and what it offers those who measure on it: the columns of the table of chips."""

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
    """What a kind of device offers those who measure on it.

    Attributes:
      clock: by what its times are taken.
      repetitions: of a candidate, and of one in each round of a final comparison: times settle soon on a device's own
        clock. 0 of the latter: each time is the same as the last, and one decides.
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

    @property
    def estimates(self) -> bool:
        """Whether its times are not taken, but told by a compiler."""
        return self.clock == "static"


GPU = Abilities("cupti", repetitions=(10, 10))
# Of a chip that is not here, of which its compiler tells.
NOT_HERE = Abilities("static", repetitions=(1, 0))


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One chip.

    Attributes:
      kind: the name its driver gives.
      platform, architecture, cores: as in `Target`.
      memory_bytes: device memory.
      flops_per_s: dense peak by arithmetic: dtype names, "tf32", "bf16_3x".
      hbm_bytes_per_s: device memory bandwidth, reads plus writes.
      l2_bytes_per_s, l2_bytes: bandwidth and capacity of the last-level cache; where there is none (0 bytes), the
        bandwidth of copies into on-chip memory.
      sector_bytes: of the least part of a line that this cache delivers.
      onchip_bytes: the most on-chip memory that one block may ask for.
      onchip_default_bytes: what it has where it asks for no limit of its own (`Footprint.onchip_limit_bytes`); 0 where
        that is all of them.
      onchip_bytes_per_core: what the resident blocks of a core share, `onchip_reserved_bytes` of it lost per block.
      onchip_bytes_per_clock: read bandwidth of one core's on-chip memory.
      registers_per_thread, registers_per_core, threads_per_core, blocks_per_core: limits.
      clock_hz: the highest.
      boost: that over the clock which `flops_per_s` assumes: while few cores are busy, they compute so much faster.
      special_per_clock, lanes_per_core: exponentials per clock and float32 lanes of one core.
      memory_latency_s, l2_latency_s: of a loaded machine.
      launch_s: an empty launch, as a kernel's own duration shows it.
      sequential_grid: a core takes the tiles of a launch in one loop, which starts a step's copies at the beginning of
        an earlier step, waits for its own, and copies no block again that the step before had (Pallas' pipelining on
        TPUs: docs.jax.dev/en/latest/pallas/pipelining.html).
      names: what people call it beside its driver's name.
      topology: JAX's name of machines with such chips, for which its compiler compiles on any host
        (`jax.experimental.topologies`); "" where there is no such compiler.
      static_cycles: that compiler estimates how many cycles a program takes.
      borrowed: the figures are good for ranking, and bound nothing: they are another chip's of its architecture, or
        times are told by a compiler that does not keep to them.
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


def peaks(half: float, tf32: float, fp32: float, int8: float = 0.0, fp8: float = 0.0) -> Mapping[str, float]:
    rates = {"bfloat16": half, "float16": half, "tf32": tf32, "bf16_3x": half / 3, "float32": fp32}
    narrow = {"int8": int8, "float8_e4m3fn": fp8, "float8_e5m2": fp8}
    return MappingProxyType(rates | {name: rate for name, rate in narrow.items() if rate})
