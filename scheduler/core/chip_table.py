"""The hardware table: the description of a chip, and one row per kind of GPU, with sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from search_spaces.target import Target

# ------------------------------------------------------------------------------
# Hardware description of a chip in SI units, and its measurement capabilities: the columns of the hardware table.

# "cupti" is time on the device; "wall" includes the launch; "static" is not measured but estimated in cycles by the
# compiler of the chip.
Clock = Literal["cupti", "wall", "static"]
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
      tmem_bytes: tensor memory of one core (Blackwell), shared by its resident blocks; 0 if there is none.
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
      static_cycles: whether the chip's compiler runs on any host and estimates the cycles of a program.
      extrapolated: the figures are valid for ranking but not as bounds, because they come from another chip of the
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
    static_cycles: bool = False
    onchip_default_bytes: int = 0
    tmem_bytes: int = 0
    extrapolated: bool = False
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


# ------------------------------------------------------------------------------
# NVIDIA GPUs: one row per kind, with sources. A derived row inherits the values that it does not set.

# NVIDIA H100 Tensor Core GPU Architecture (whitepaper, 2022), tables of the SXM5: rates, registers, threads, memory.
# Block limit 227 KiB and 1 KiB reserved per block: CUDA C Programming Guide, compute capability 9.0. The L2 rate is 64
# bytes per core and clock (matmuls on an H200 reach within 5 % of it, counting the requests of cores). Latencies are
# priors. An H200's driver reports 60 MB of L2 and a maximum clock of 1.98 GHz. 1.83 GHz follows from 4,096 bfloat16
# operations per core and clock and the peak.
_H100 = Hardware(
    kind="NVIDIA H100 80GB HBM3",
    platform="cuda",
    architecture="sm_90",
    cores=132,
    memory_bytes=80 * GIB,
    flops_per_s=peaks(half=989.4e12, tf32=494.7e12, fp32=66.9e12, int8=1978.9e12, fp8=1978.9e12),
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

# Values that chips with the same processor share; the other values are in their rows. Compute capability 8.9 has 99 KiB
# per block, 100 KiB per core, 1 KiB reserved per block, 1,536 threads and 24 blocks: CUDA C Programming Guide,
# technical specifications per compute capability; 8.6 differs in having 16 blocks. 128 float32 lanes and 16
# exponentials per clock: the same guide, throughput of native arithmetic instructions. As above, the L2 rate is 64
# bytes per core and clock, which is an upper bound, and latencies are priors.
_AD102 = dataclasses.replace(
    _H100,
    kind="AD102",
    architecture="sm_89",
    cores=144,
    memory_bytes=0,
    flops_per_s=MappingProxyType({}),
    hbm_bytes_per_s=0,
    l2_bytes_per_s=0,
    l2_bytes=0,
    onchip_bytes=99 * KIB,
    onchip_bytes_per_core=100 * KIB,
    threads_per_core=1536,
    blocks_per_core=24,
    clock_hz=2.52e9,
    memory_latency_s=0.6e-6,
    l2_latency_s=0.25e-6,
    boost=1.0,
)
_GA102 = dataclasses.replace(_AD102, kind="GA102", architecture="sm_86", cores=84, l2_bytes=6 * MB, blocks_per_core=16)

# NVIDIA Blackwell datasheet (2025), HGX B200: rates of eight GPUs, with sparsity (halved here) except float32. XLA's
# description of the chip (xla/backends/gpu/target_config/specs/b200.txtpb), as its driver reports it: cores, clock,
# memory, bandwidth (datasheet: 7.7 TB/s), L2. 1.856 GHz follows from 8,192 bfloat16 operations per core and clock.
# Limits of compute capability 10.0: Blackwell Tuning Guide, occupancy. Tensor memory, 512 columns of 128 lanes of 4
# bytes: PTX ISA, tensor memory addressing. The L2 rate, 64 bytes per core and clock as above, is unmeasured; latencies
# are priors.
_B200 = dataclasses.replace(
    _H100,
    kind="NVIDIA B200",
    architecture="sm_100",
    cores=148,
    memory_bytes=178 * GIB,
    flops_per_s=peaks(half=2.25e15, tf32=1.125e15, fp32=75e12, int8=4.5e15, fp8=4.5e15),
    hbm_bytes_per_s=7.67e12,
    l2_bytes_per_s=148 * 64 * 1.965e9,
    l2_bytes=132_644_864,
    tmem_bytes=512 * 128 * 4,
    clock_hz=1.965e9,
    boost=1.965 / 1.856,
)

GPUS: tuple[Hardware, ...] = (
    # NVIDIA H200 datasheet: the H100's processor with 141 GB at 4.8 TB/s.
    dataclasses.replace(
        _H100, kind="NVIDIA H200", memory_bytes=140 * GIB, hbm_bytes_per_s=4.8e12, l2_bytes=60 * MB, names=("H200",)
    ),
    dataclasses.replace(_H100, names=("H100",)),
    # NVIDIA H100 datasheet (2023), PCIe: 114 cores, HBM2e; NVL: one GPU, 94 GB of HBM3. The peaks imply 1.62 and 1.545
    # GHz at 4,096 bfloat16 operations per core and clock. Maximum clocks: NVIDIA's product briefs of both cards. The L2
    # rates are those of the maximum clock.
    dataclasses.replace(
        _H100,
        kind="NVIDIA H100 PCIe",
        cores=114,
        flops_per_s=peaks(half=756.4e12, tf32=378.2e12, fp32=51.2e12, int8=1512.9e12, fp8=1512.9e12),
        hbm_bytes_per_s=2.039e12,
        l2_bytes_per_s=114 * 64 * 1.755e9,
        clock_hz=1.755e9,
        boost=1.755 / 1.62,
    ),
    dataclasses.replace(
        _H100,
        kind="NVIDIA H100 NVL",
        memory_bytes=94 * GIB,
        flops_per_s=peaks(half=835.5e12, tf32=417.7e12, fp32=60e12, int8=1670.5e12, fp8=1670.5e12),
        hbm_bytes_per_s=3.938e12,
        l2_bytes_per_s=132 * 64 * 1.785e9,
        clock_hz=1.785e9,
        boost=1.785 / 1.545,
    ),
    # NVIDIA GH200 Grace Hopper Superchip datasheet (2023): the H100's processor; 96 GB of HBM3 at 4 TB/s, or 144 GB of
    # HBM3e at 4.9 TB/s. Their drivers' names are those of nvidia-smi.
    dataclasses.replace(_H100, kind="NVIDIA GH200 480GB", memory_bytes=96 * GIB, hbm_bytes_per_s=4.0e12),
    dataclasses.replace(_H100, kind="NVIDIA GH200 144G HBM3e", memory_bytes=144 * GIB, hbm_bytes_per_s=4.9e12),
    dataclasses.replace(_B200, names=("B200",)),
    # The same sources: rates of GB200 NVL72 over its 72 GPUs; XLA's gb200.txtpb (datasheet: 8 TB/s).
    dataclasses.replace(
        _B200,
        kind="NVIDIA GB200",
        names=("GB200",),
        cores=152,
        memory_bytes=184 * GIB,
        flops_per_s=peaks(half=2.5e15, tf32=1.25e15, fp32=80e12, int8=5e15, fp8=5e15),
        hbm_bytes_per_s=7.93e12,
        l2_bytes_per_s=152 * 64 * 2.062e9,
        l2_bytes=135_528_448,
        clock_hz=2.062e9,
        boost=2.062 / 2.008,
    ),
    # NVIDIA A100 Tensor Core GPU Architecture (whitepaper, 2020), SXM4 80 GB; 163 KiB per block: CUDA C Programming
    # Guide.
    dataclasses.replace(
        _H100,
        kind="NVIDIA A100-SXM4-80GB",
        architecture="sm_80",
        cores=108,
        flops_per_s=peaks(half=312e12, tf32=156e12, fp32=19.5e12, int8=624e12),
        hbm_bytes_per_s=2.039e12,
        l2_bytes_per_s=5e12,
        l2_bytes=40 * MB,
        onchip_bytes=163 * KIB,
        onchip_bytes_per_core=164 * KIB,
        clock_hz=1.41e9,
        lanes_per_core=64,
        memory_latency_s=0.6e-6,
        l2_latency_s=0.25e-6,
        boost=1.0,
    ),
    # NVIDIA L40S datasheet (2023): rates at 2.49 GHz, with float32 accumulators; its driver reports 45 GiB.
    dataclasses.replace(
        _AD102,
        kind="NVIDIA L40S",
        cores=142,
        memory_bytes=45 * GIB,
        flops_per_s=peaks(half=362.05e12, tf32=183e12, fp32=91.6e12, int8=733e12, fp8=733e12),
        hbm_bytes_per_s=864e9,
        l2_bytes_per_s=142 * 64 * 2.52e9,
        l2_bytes=96 * MB,
        boost=2.52 / 2.49,
    ),
    # NVIDIA Ada GPU Architecture (whitepaper, 2022), table of the RTX 4090: rates with float32 accumulators at 2.52
    # GHz, half of the rates with float16 accumulators. Its driver allows 3.105 GHz.
    dataclasses.replace(
        _AD102,
        kind="NVIDIA GeForce RTX 4090",
        cores=128,
        memory_bytes=24 * GIB,
        flops_per_s=peaks(half=165.2e12, tf32=82.6e12, fp32=82.6e12, int8=660.6e12, fp8=330.3e12),
        hbm_bytes_per_s=1.008e12,
        l2_bytes_per_s=128 * 64 * 3.105e9,
        l2_bytes=72 * MB,
        clock_hz=3.105e9,
        boost=3.105 / 2.52,
    ),
    # NVIDIA A40 datasheet (2021): 10,752 lanes at 1.74 GHz; the driver reports 45 of its 48 GB.
    dataclasses.replace(
        _GA102,
        kind="NVIDIA A40",
        cores=84,
        memory_bytes=45 * GIB,
        flops_per_s=peaks(half=149.7e12, tf32=74.8e12, fp32=37.4e12, int8=299.3e12),
        hbm_bytes_per_s=696e9,
        l2_bytes_per_s=84 * 64 * 1.74e9,
        clock_hz=1.74e9,
    ),
    # NVIDIA Ampere GA102 GPU Architecture (whitepaper, 2020), table of the RTX 3090: rates with float32 accumulators,
    # at 1.695 GHz. Its driver allows 2.1 GHz.
    dataclasses.replace(
        _GA102,
        kind="NVIDIA GeForce RTX 3090",
        cores=82,
        memory_bytes=24 * GIB,
        flops_per_s=peaks(half=71e12, tf32=35.6e12, fp32=35.6e12, int8=284e12),
        hbm_bytes_per_s=936e9,
        l2_bytes_per_s=82 * 64 * 2.1e9,
        clock_hz=2.1e9,
        boost=2.1 / 1.695,
    ),
)

# One constant row for every CPU, because kernels are only interpreted there. The rates are those of a large server, so
# that a lower bound is valid on every CPU. The cost model has the cost of an interpreted grid step.
CPU = Hardware(
    kind="cpu",
    platform="cpu",
    architecture="cpu",
    cores=1,
    memory_bytes=16 * GIB,
    flops_per_s=peaks(half=16e12, tf32=8e12, fp32=8e12),
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
