"""The order of instructions that decides how fast flash attention is, read from machine code, without a GPU.

A kernel that computes the same values a tenth slower looks alike everywhere but here (search_spaces/flash_attention/
hopper/consumer.py says why). This file as a program writes the PTX of one schedule.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: 233472  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000  l2_cache_size: 62914560  clock_rate_ghz: 1.98  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 28 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""
BASE = {
    "consumers": 2,
    "block_kv": 128,
    "stages": 2,
    "ping_pong": True,
    "persistent": False,
    "order": "plain",
    "section": 1,
    "epi_tile_n": 128,
}
PERSISTENT = {"persistent": True}
CAUSAL = {"causal": True}
CASES = {  # name: head_dim, fields of the problem, fields of the schedule
    "head size 128": (128, {}, {}),
    "head size 128, persistent": (128, {}, PERSISTENT),
    "head size 128, 176 keys": (128, {}, {"block_kv": 176}),
    "head size 128, causal": (128, CAUSAL, {"order": "longest_first"}),
    "head size 128, causal, persistent": (128, CAUSAL, PERSISTENT | {"order": "snake"}),
    "head size 64": (64, {}, PERSISTENT | {"consumers": 3, "epi_tile_n": 64}),
    "head size 256": (256, {}, {"block_kv": 80, "epi_tile_n": 256}),
    "head size 256, persistent": (256, {}, PERSISTENT | {"block_kv": 64, "epi_tile_n": 64, "ping_pong": False}),
}


def _tool(name):
    wheels = importlib.util.find_spec("nvidia")
    places = [Path(root) for root in wheels.submodule_search_locations] if wheels else []
    return next((str(path) for place in places for path in place.glob(f"*/bin/{name}")), None) or shutil.which(name)


PTXAS, NVDISASM = _tool("ptxas"), _tool("nvdisasm")
MISSING = [
    what
    for what, there in (
        ("jax-cuda13-plugin", importlib.util.find_spec("jax_cuda13_plugin")),
        ("ptxas (nvidia-cuda-nvcc)", PTXAS),
        ("nvdisasm (nvidia-cuda-nvdisasm)", NVDISASM),
    )
    if not there
]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory):
    """Of a case by name: what ptxas says, and its instructions."""
    compiled = {}

    def of(name):
        if name not in compiled:
            compiled[name] = _compile(CASES[name], tmp_path_factory.mktemp("sass"))
        return compiled[name]

    return of


def _compile(case, folder):
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    environment |= {
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_TO": str(folder),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), environment.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(PTXAS).parent), environment["PATH"]]),
    }
    built = subprocess.run(
        [sys.executable, __file__, json.dumps(case)], env=environment, capture_output=True, text=True
    )
    (ptx,) = folder.glob("*.ptx") or pytest.fail(built.stdout + built.stderr)
    cubin = folder / "kernel.cubin"
    said = subprocess.run(
        [PTXAS, "-arch=sm_90a", "-O3", "-v", ptx, "-o", cubin], capture_output=True, text=True, check=True
    )
    sass = subprocess.run([NVDISASM, "-c", cubin], capture_output=True, text=True, check=True).stdout
    return said.stdout + said.stderr, sass


def _steady_loops(sass):
    """Opcodes of each innermost loop that multiplies and exponentiates."""
    opcodes, labels, branches = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(opcodes)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*);", line):
            if target := re.search(r"`\((\.L_x_\d+)\)", found[2]):
                branches.append((target[1], len(opcodes)))
            opcodes.append(found[1])
    loops = [(labels[label], end) for label, end in branches if labels.get(label, end) < end]
    work = [(a, b) for a, b in loops if sum(code.startswith("MUFU.EX2") for code in opcodes[a:b]) >= 16]
    work = [(a, b) for a, b in work if any(code.startswith("HGMMA") for code in opcodes[a:b])]
    # That over tiles stores results.
    work = [(a, b) for a, b in work if not any(code.startswith("UTMASTG") for code in opcodes[a:b])]
    # Loops that hold another's end are outer ones, or go round by way of waits that ptxas has put behind all else.
    innermost: list[tuple[int, int]] = []
    for start, end in sorted(work, key=lambda loop: loop[1]):
        if not any(start <= other <= end for _, other in innermost):
            innermost.append((start, end))
    return [opcodes[start : end + 1] for start, end in innermost]


@pytest.mark.parametrize("name", CASES)
def test_exponentials_run_beside_the_product_of_values(name, machine_code):
    loops = _steady_loops(machine_code(name)[1])
    assert loops
    for loop in loops:
        waits = [at for at, code in enumerate(loop) if code.startswith("WARPGROUP.DEPBAR")]
        exponentials = [at for at, code in enumerate(loop) if code.startswith("MUFU.EX2")]
        assert len(waits) == 2
        assert waits[0] < exponentials[0]
        assert exponentials[-1] < waits[-1]


@pytest.mark.parametrize("name", CASES)
def test_no_register_of_the_steady_loop_is_spilled(name, machine_code):
    for loop in _steady_loops(machine_code(name)[1]):
        assert not [code for code in loop if code.startswith(("LDL", "STL"))]


@pytest.mark.parametrize("name", CASES)
def test_no_product_waits_for_the_one_before(name, machine_code):
    said = machine_code(name)[0]
    assert "serialized" not in said
    assert "insufficient registers" not in said


def test_large_results_are_rescaled_between_both_products(machine_code):
    name = "head size 256"
    head_dim = CASES[name][0]
    for loop in _steady_loops(machine_code(name)[1]):
        products = [at for at, code in enumerate(loop) if code.startswith("HGMMA")]
        scaled = sum(code == "FMUL" for code in loop[products[0] : products[-1]])
        assert scaled >= 0.9 * head_dim / 2


def main(case: str) -> None:
    import jax
    from jax.experimental import topologies

    from search_spaces.flash_attention.hopper import FlashAttentionSchedule, MosaicGpuFlashAttention
    from search_spaces.flash_attention.problem import FlashAttentionProblem
    from search_spaces.kernel import Target

    head_dim, fields, schedule = json.loads(case)
    problem = FlashAttentionProblem(
        1, 3072, 2112 if schedule.get("block_kv") == 176 else 3840, 16, 16, head_dim, **fields
    )
    one = FlashAttentionSchedule(**BASE | schedule)
    target = Target("cuda", "NVIDIA H200", "sm_90", 132)
    device = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in problem.operands()]
    mesh = jax.sharding.AbstractMesh(
        (1,),
        ("x",),
        abstract_device=jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda"),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(lambda *args: MosaicGpuFlashAttention().run(problem, one, target, *args)).lower(*operands)
        lowered.compile()


if __name__ == "__main__":
    main(sys.argv[1])
