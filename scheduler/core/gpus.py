"""NVIDIA GPUs: one row per kind, with sources. A derived row inherits the values that it does not set."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from scheduler.core.chip import GIB, KIB, MB, Hardware, peaks

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

GPUS: tuple[Hardware, ...] = (
    # NVIDIA H200 datasheet: the H100's processor with 141 GB at 4.8 TB/s.
    dataclasses.replace(_H100, kind="NVIDIA H200", memory_bytes=140 * GIB, hbm_bytes_per_s=4.8e12, l2_bytes=60 * MB),
    _H100,
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
