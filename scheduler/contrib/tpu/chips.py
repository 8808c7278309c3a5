"""The rows of the hardware table for TPUs: one per kind, with sources.

A row describes a JAX device, which is one core, or the two cores of a v5p.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from scheduler.core.chip_table import GIB, KIB, MIB, Abilities, Hardware

# JAX's names of the topologies for which the compiler compiles on any host (`jax.experimental.topologies`), by kind.
TOPOLOGIES: Mapping[str, str] = MappingProxyType(
    {
        "TPU v4": "v4:2x2x1",
        "TPU v5 lite": "v5e:2x2",
        "TPU v5": "v5p:2x2x1",
        "TPU v6 lite": "v6e:2x2",
        "TPU7x": "tpu7x:2x2x1",
    }
)

# On a TPU, a grid is a loop on one core, and times are those of whole calls.
_TPU = Abilities("wall", repetitions=(10, 10))


def _tpu(
    kind: str,
    name: str,
    *,
    cores: int = 1,
    memory_gib: float,
    bf16: float,
    narrow: dict[str, float],
    hbm_bytes_per_s: float,
    vmem_bytes: int,
    scoped_bytes: int,
    clock_hz: float,
) -> Hardware:
    """Returns the row of one device: rates are totals over all of its cores, VMEM is per core.

    Sources: Google's pages for each version (cloud.google.com/tpu/docs) and JAX's own table
    (`jax.experimental.pallas.tpu.get_tpu_info`) for rates, memory and VMEM. The default and maximum VMEM of a kernel
    are from compiler messages (libtpu 0.0.42 to 0.0.50). Clocks are derived from the peak and the MXUs per core as the
    compiler counts them: four of 128 x 128 up to v5p, and the equivalent of four of 256 x 256 from v6e on.
    """
    return Hardware(
        kind=kind,
        platform="tpu",
        architecture=kind,
        cores=cores,
        memory_bytes=round(memory_gib * GIB),
        # At the highest precision, a float32 product takes six bfloat16 products.
        flops_per_s=MappingProxyType(
            {"bfloat16": bf16, "float16": bf16 / 6, "tf32": bf16 / 3, "bf16_3x": bf16 / 3, "float32": bf16 / 6} | narrow
        ),
        hbm_bytes_per_s=hbm_bytes_per_s,
        l2_bytes_per_s=hbm_bytes_per_s,
        l2_bytes=0,
        onchip_bytes=vmem_bytes,
        onchip_bytes_per_core=vmem_bytes,
        onchip_reserved_bytes=0,
        onchip_default_bytes=scoped_bytes,
        onchip_bytes_per_clock=3 * 8 * 128 * 4,
        registers_per_thread=10**9,
        registers_per_core=10**9,
        threads_per_core=10**9,
        blocks_per_core=1,
        clock_hz=clock_hz,
        special_per_clock=8 * 128,
        lanes_per_core=4 * 8 * 128,
        # Latencies of copies into VMEM, according to the compiler's schedules.
        memory_latency_s=2e-7,
        l2_latency_s=2e-7,
        launch_s=2e-6,
        sequential_grid=True,
        names=(name,),
        static_cycles=kind != "TPU v4",  # libtpu: "Dma latency model is currently only supported on VF/VL/GF/GL"
        abilities=_TPU,
    )


TPUS: tuple[Hardware, ...] = (
    _tpu(
        "TPU v4",
        "TPU v4 (one of two cores)",
        memory_gib=16,
        bf16=137.5e12,
        narrow={},
        hbm_bytes_per_s=614e9,
        vmem_bytes=16 * MIB,
        scoped_bytes=16 * MIB,
        clock_hz=1.05e9,
    ),
    _tpu(
        "TPU v5 lite",
        "TPU v5e",
        memory_gib=16,
        bf16=197e12,
        narrow={"int8": 394e12},
        hbm_bytes_per_s=820e9,
        vmem_bytes=128 * MIB,
        scoped_bytes=16 * MIB,
        clock_hz=1.5e9,
    ),
    _tpu(
        "TPU v5",
        "TPU v5p",
        cores=2,
        memory_gib=95,
        bf16=459e12,
        narrow={"int8": 918e12},
        hbm_bytes_per_s=2.765e12,
        vmem_bytes=64 * MIB - 64 * KIB,
        scoped_bytes=16 * MIB,
        clock_hz=1.75e9,
    ),
    _tpu(
        "TPU v6 lite",
        "TPU v6e",
        memory_gib=32,
        bf16=918e12,
        narrow={"int8": 1836e12},
        hbm_bytes_per_s=1.64e12,
        vmem_bytes=128 * MIB - 64 * KIB,
        scoped_bytes=32 * MIB,
        clock_hz=1.75e9,
    ),
    _tpu(
        "TPU7x",
        "TPU7x (one of two cores)",
        memory_gib=96,
        bf16=1153e12,
        narrow={"float8_e4m3fn": 2307e12, "float8_e5m2": 2307e12},
        hbm_bytes_per_s=3.69e12,
        vmem_bytes=64 * MIB - 64 * KIB,
        scoped_bytes=32 * MIB,
        clock_hz=2.2e9,
    ),
)
