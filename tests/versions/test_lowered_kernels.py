"""A kernel of a GPU is lowered once in a process."""

import jax
import jax.numpy as jnp

import scheduler
from scheduler.dispatch import lowered_kernels

HOW = {"on_miss": "model", "backends": "mosaic_gpu"}


def lowered(fn, *platforms):
    operand = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    with scheduler.target("NVIDIA H200"):
        return jax.jit(fn).trace(operand, operand).lower(lowering_platforms=platforms or ("cuda",)).as_text()


def test_a_kernel_in_two_programs_is_lowered_once(monkeypatch):
    lowerings, export = [], lowered_kernels._exported
    monkeypatch.setattr(lowered_kernels, "_exported", lambda *args: lowerings.append(args) or export(*args))
    monkeypatch.setattr(lowered_kernels, "_lowered", {})
    first = lowered(lambda a, b: scheduler.tuned_matmul(a, b, **HOW))
    assert first.count("@mosaic_gpu") == 1
    assert lowered(lambda a, b: scheduler.tuned_matmul(a, b, **HOW)) == first
    two = lowered(lambda a, b: scheduler.tuned_matmul(scheduler.tuned_matmul(a, b, **HOW) * 2, b, **HOW))
    assert two.count("@mosaic_gpu") in (1, 2)
    assert len(lowerings) == 1


def test_the_most_recently_lowered_kernels_are_kept(monkeypatch):
    monkeypatch.setattr(lowered_kernels, "_lowered", {})
    monkeypatch.setattr(lowered_kernels, "_MOST_KERNELS", 1)
    for n in (256, 512, 256):
        lowered(lambda a, b, n=n: scheduler.tuned_matmul(a[:n], b, **HOW))
    assert len(lowered_kernels._lowered) == 1


def test_a_program_for_several_platforms_has_the_kernel_of_one():
    text = lowered(lambda a, b: scheduler.tuned_matmul(a, b, on_miss="model"), "cpu", "cuda")
    assert text.count("@mosaic_gpu") == 1
    assert "stablehlo.dot_general" in text
