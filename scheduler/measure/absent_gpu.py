"""Describes a GPU that is absent from this process, so that XLA and Pallas can compile for it.

JAX's CUDA plugin compiles for a GPU from a textual description. It needs no driver and no CUDA context. Mosaic GPU
takes the target architecture from one global setting, so each process compiles for one architecture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental import topologies

from scheduler.core.hardware import Hardware
from search_spaces.lowering_compat import assume_architecture

# The text format of `stream_executor::GpuTargetConfigProto` in XLA.
DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: {core_bytes}  threads_per_core_limit: {threads}  core_count: {cores}  fpus_per_core: {lanes}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}  l2_cache_size: {l2_bytes}  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory_bytes}
  shared_memory_per_block_optin: {block_bytes}  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{kind}"
"""
# The first call may fail with "Unable to initialize backend 'cuda'".
ATTEMPTS = 2


def device(hardware: Hardware) -> jax.Device:
    """Returns a device of this kind to compile for.

    Raises:
      Exception: JAX's CUDA plugin is not installed, or does not know the device.
    """
    major, minor = _capability(hardware)
    description = DESCRIPTION.format(
        core_bytes=hardware.onchip_bytes_per_core,
        block_bytes=hardware.onchip_bytes,
        threads=hardware.threads_per_core,
        cores=hardware.cores,
        lanes=hardware.lanes_per_core,
        bandwidth=int(hardware.hbm_bytes_per_s),
        l2_bytes=hardware.l2_bytes,
        clock_ghz=hardware.clock_hz / 1e9,
        memory_bytes=hardware.memory_bytes,
        major=major,
        minor=minor,
        kind=hardware.kind,
    )
    for attempt in range(ATTEMPTS):
        try:
            found = topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1")
            break
        except Exception:
            if attempt + 1 == ATTEMPTS:
                raise
    return found.devices[0]


@contextlib.contextmanager
def compiling_for(hardware: Hardware) -> Iterator[None]:
    """Context manager in which kernels are traced and lowered for the GPU."""
    assume_architecture(*_capability(hardware))
    described = jax.sharding.AbstractDevice(device_kind=hardware.kind, num_cores=hardware.cores, platform="cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=described)
    with jax.sharding.use_abstract_mesh(mesh):
        yield


def _capability(hardware: Hardware) -> tuple[int, int]:
    return divmod(int(hardware.architecture.removeprefix("sm_")), 10)
