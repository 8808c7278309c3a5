"""Kernels that are declared by name: what a call on a CPU imports, and that every name and its declaration is right."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

from failures import failures
from jax.experimental.pallas import mosaic_gpu

from scheduler.core.hardware import table
from scheduler.store import text_files
from search_spaces import OPERATIONS, fingerprint, load, value_of
from search_spaces.jax_compat import plgpu
from search_spaces.kernel import Kernel
from search_spaces.operation import KernelName

ROOT = Path(__file__).parents[2]
# The modules of this package that the import of a public function loads. Each worker loads them, too.
MOST_MODULES = 80
PROBLEMS = {r.key.operation: r.key.problem for r in text_files.read_records(ROOT / "records")}


def test_a_call_on_a_cpu_imports_no_back_end_of_another_platform():
    code = f"""
import os, sys
import jax.extend  # imports parts of Pallas for all platforms
before = set(sys.modules)
import scheduler
scheduler.tuned_matmul
ours = [name for name in sys.modules if name.partition(".")[0] in ("scheduler", "search_spaces")]
assert len(ours) <= {MOST_MODULES}, ours
import jax.numpy as jnp
jax.grad(lambda x: scheduler.tuned_matmul(x, x).sum())(jnp.ones((16, 16)))
scheduler.tuned_flash_attention(*[jnp.ones((1, 16, 2, 16))] * 3)
scheduler.tuned_softmax(jnp.ones((16, 16)))
scheduler.tuned_ragged_dot(jnp.ones((16, 16)), jnp.ones((1, 16, 16)), jnp.array([16]))
scheduler.tuned_gated_matmul(jnp.ones((16, 16)), jnp.ones((16, 32)))
names = [name for name in sys.modules if name not in before]
found = [name for name in names if "mosaic" in name or "contrib" in name or name.endswith((".hopper", ".mma"))]
assert not found, found
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_every_kernel_is_imported_by_its_name_and_is_as_declared():
    tried = []

    def check(name):
        operation = load(name)
        for named in getattr(operation.kernels, "declared", ()):
            if isinstance(named, KernelName):
                kernel = operation.kernel(named.backend)
                tried.append(kernel)
                assert isinstance(kernel, Kernel)
                assert kernel.backend == named.backend
                assert kernel.version
                assert not kernel.library
                for chip in table() if name in PROBLEMS else ():
                    problem = operation.problem.from_canonical(PROBLEMS[name])
                    if chip.target.platform != named.platform:
                        assert kernel.supports(problem, chip.target), f"{named} supports {chip.kind}"

    assert failures(check, OPERATIONS) == []
    assert len(tried) > len(OPERATIONS)


def test_what_the_shelf_is_asked_for_is_there():
    packages = [file.read_text() for name in ("scheduler", "search_spaces") for file in (ROOT / name).rglob("*.py")]
    named = {
        name for text in packages for name in re.findall(r'"((?:scheduler|search_spaces)\.contrib\.[\w.:]+)"', text)
    }
    assert failures(lambda name: value_of(name) if ":" in name else importlib.import_module(name), sorted(named)) == []
    assert "scheduler.contrib.tpu.chips:TPUS" in named


def test_kernels_of_a_platform_are_those_without_a_name_and_those_of_the_platform():
    matmul = load("matmul")
    assert [kernel.backend for kernel in matmul.kernels_on("cpu")] == ["interpret", "xla"]
    assert [kernel.backend for kernel in matmul.kernels_on("tpu")] == ["mosaic_tpu", "xla"]
    assert [kernel.backend for kernel in matmul.kernels] == list(matmul.backends)
    assert matmul.kernels[0] is matmul.kernel("mosaic_gpu") is matmul.kernels_on("cuda")[0]


def test_a_kernel_that_uses_mosaic_gpu_has_the_fingerprint_that_it_had():
    assert plgpu.inline_mgpu is mosaic_gpu.inline_mgpu
    assert fingerprint.digest(plgpu) == fingerprint.digest(mosaic_gpu)
