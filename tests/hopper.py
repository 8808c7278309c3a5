"""Mosaic GPU kernels without a GPU: lowered for CUDA, asked for their on-chip memory, interpreted."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import core as mosaic_gpu_core

from scheduler.core import hardware
from search_spaces import Kernel, Problem
from search_spaces.jax_compat import gpu_interpreter

H200 = hardware.find("NVIDIA H200")


def lowering(kernel: Kernel[Any, Any], problem: Problem, schedule: Any) -> Callable[[], Any]:
    """Traces a kernel for an H200; what is returned lowers it, each time anew."""

    def run(*args: jax.Array) -> jax.Array:
        return kernel.run(problem, schedule, H200.target, *args)

    return functools.partial(jax.jit(run).trace(*problem.operands()).lower, lowering_platforms=("cuda",))


def lower(kernel: Kernel[Any, Any], problem: Problem, schedule: Any) -> Any:
    """The whole Python side of building a kernel for an H200; raises where a schedule is illegal."""
    return lowering(kernel, problem, schedule)()


def onchip_bytes_asked(lower: Callable[[], Any]) -> int:
    """What Mosaic GPU asks for: with a limit of 0 it refuses every kernel, and says how much that one wanted."""
    try:
        with mosaic_gpu_core.artificial_shared_memory_limit(0):
            lower()
    except ValueError as error:
        if found := re.search(r"smem_bytes=(\d+) > max_smem_bytes=0", str(error)):
            return int(found[1])
        raise
    return 0


def check_onchip_bytes(kernel: Kernel[Any, Any], problem: Problem, schedule: Any, predicted: int) -> None:
    """Fails unless lowering asks for `predicted` bytes, and succeeds just where an H200 has so many."""
    traced = lowering(kernel, problem, schedule)
    asked = onchip_bytes_asked(traced)
    assert asked == predicted, f"{schedule}: {asked} bytes asked for, {predicted} predicted"
    if predicted <= H200.onchip_bytes:
        traced()
    else:
        with pytest.raises(ValueError, match="exceeds available shared memory"):
            traced()


def interpret(
    kernel: Kernel[Any, Any], problem: Problem, schedule: Any, *, cores: int, detect_races: bool = False
) -> tuple[Any, Any]:
    """What the kernel computes on a chip of so few cores, interpreted on the CPU, and the right answer.

    Each is a float32 array, or a tuple of them where the problem has several results.
    """
    target = dataclasses.replace(H200.target, cores=cores)
    args = problem.inputs(seed=0)
    with gpu_interpreter(detect_races=detect_races):
        actual = jax.jit(lambda *args: kernel.run(problem, schedule, target, *args))(*args)
    return jax.tree.map(lambda x: np.asarray(x, np.float32), (actual, problem.reference(*args)))


def check_gradients(kernel: Kernel[Any, Any], problem: Problem, schedule: Any) -> None:
    """Asserts that all results of a kernel, interpreted, agree with the reference within the problem's tolerance."""
    assert kernel.supports(problem, H200.target) is None
    actual, wanted = interpret(kernel, problem, schedule, cores=H200.target.cores)
    for found, right, tolerance in zip(actual, wanted, problem.tolerance(), strict=True):
        assert found.shape == right.shape
        np.testing.assert_allclose(found, right, atol=tolerance.absolute, rtol=tolerance.relative)
