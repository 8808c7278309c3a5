"""What follows a product's sums: the formula, the problems that ask for it, and the kernels that compute it."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from scheduler.core.hardware import find
from scheduler.measure.verification import mismatch
from search_spaces import Columns, Library, Target
from search_spaces.jax_compat import HAS_GPU_INTERPRETER, gpu_interpreter, plgpu
from search_spaces.matmul import MATMUL, MatmulProblem, epilogue
from search_spaces.matmul.interpret import InterpretSchedule

pytestmark = pytest.mark.slow_but_first

CPU = Target("cpu", "cpu", "cpu", 1)
INTERPRET = MATMUL.kernel("interpret")
THEIRS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "silu": jax.nn.silu}
NAMES = ["", *epilogue.ACTIVATIONS]


def normal(seed: int, *shape: int, dtype="float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)).astype(dtype)


def drawn(p: MatmulProblem) -> list[jax.Array]:
    """Operands of sums of about 1, as `inputs` draws them."""
    a, *others = (normal(i, *s.shape) for i, s in enumerate(p.operands()))
    return [x.astype(s.dtype) for x, s in zip((a * p.k**-0.5, *others), p.operands(), strict=True)]


# The formula


@pytest.mark.parametrize("name", epilogue.ACTIVATIONS)
def test_an_activation_and_its_slope_are_those_of_jax(name):
    x = jnp.concatenate([jnp.linspace(-30, 30, 2001), jnp.array([0.0, -0.0, 1e4, -1e4, jnp.inf])])
    ours, theirs = (jax.jvp(f, (x,), (jnp.ones_like(x),)) for f in (epilogue.ACTIVATIONS[name], THEIRS[name]))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)  # 1 + tanh cancels below -3, where theirs is 0
    assert jnp.isnan(epilogue.ACTIVATIONS[name](jnp.nan))


def test_the_bias_comes_before_the_activation_and_the_residual_after_it():
    sums, bias, residual = normal(0, 4, 6), normal(1, 1, 6), normal(2, 4, 6)
    finished = epilogue.apply(sums, bias=bias, activation="relu", residual=residual)
    np.testing.assert_array_equal(finished, jax.nn.relu(sums + bias) + residual)


def test_the_names_that_a_call_takes_are_those_of_the_formula():
    assert typing.get_args(epilogue.Activation) == tuple(epilogue.ACTIVATIONS)
    assert set(epilogue.EXPONENTIALS) == {"", *epilogue.ACTIVATIONS}


def gpu_kernel(name: str):
    """``finish`` of one tile, in the layout that wgmma leaves sums in, by a warpgroup of a GPU."""
    shape, layout = (64, 64), plgpu.Layout.WGMMA

    def on_chip(shape, dtype):
        dtype = jnp.dtype(dtype)
        transforms = (plgpu.TilingTransform((8, 128 // dtype.itemsize)), plgpu.SwizzleTransform(128))
        return plgpu.SMEM(shape, dtype, transforms=transforms if len(shape) == 2 else ())

    def body(sums, bias, residual, out, *scratch):
        *loaded, finished, barrier = scratch
        for array, copy in zip((sums, bias, residual), loaded, strict=True):
            plgpu.copy_gmem_to_smem(array, copy, barrier.at[0])
        plgpu.barrier_wait(barrier.at[0])
        tile, row, more = (
            plgpu.layout_cast(copy[...], layout if len(copy.shape) == 2 else layout.reduce(0)) for copy in loaded
        )
        rows = plgpu.layout_cast(lax.broadcast_in_dim(row, shape, (1,)), layout)
        finished[...] = epilogue.apply(tile, bias=rows, activation=name, residual=more).astype(out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(finished, out)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.dtype("bfloat16")),
        grid=(1,),
        grid_names=("block",),
        scratch_types=[
            on_chip(shape, "float32"),
            on_chip(shape[1:], "bfloat16"),
            on_chip(shape, "bfloat16"),
            on_chip(shape, "bfloat16"),
            plgpu.Barrier(num_arrivals=3, num_barriers=1),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_kernel_finishes_its_tile_by_the_same_formula(name):
    sums, bias, residual = normal(0, 64, 64), normal(1, 64, dtype="bfloat16"), normal(2, 64, 64, dtype="bfloat16")
    kernel = gpu_kernel(name)
    text = jax.jit(kernel).trace(sums, bias, residual).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    if HAS_GPU_INTERPRETER:
        with gpu_interpreter():
            actual = jax.jit(kernel)(sums, bias, residual)
        expected = epilogue.apply(sums, bias=bias[None], activation=name, residual=residual)
        np.testing.assert_allclose(actual.astype(jnp.float32), expected, rtol=2**-8, atol=1e-5)


# Its problems


def test_a_product_without_epilogue_has_the_key_that_it_always_had():
    records = Path(__file__).parents[2] / "records"
    lines = [line for file in records.rglob("matmul.jsonl") for line in file.read_text().splitlines()]
    keys = [json.loads(line)["problem"] for line in lines]
    assert len(keys) > 10
    for key in keys:
        text = key if isinstance(key, str) else json.dumps(key, sort_keys=True, separators=(",", ":"))
        assert MatmulProblem.from_canonical(text).canonical() == text
        assert MatmulProblem.from_canonical(text).fused == bool(
            {"bias", "activation", "residual"} & set(json.loads(text))
        )


def test_an_epilogue_is_part_of_the_problem_and_is_spelt_on_a_command_line():
    texts = {"m": "4", "n": "5", "k": "6", "activation": "silu", "bias": "bfloat16", "residual": "float32"}
    p = MatmulProblem.parse(texts)
    assert str(p) == "m=4 n=5 k=6 dtype=bfloat16 bias=bfloat16 activation=silu residual=float32"
    assert MatmulProblem.from_canonical(p.canonical()) == p
    assert (
        len({p, p.plain, *(dataclasses.replace(p, **{name: ""}) for name in ("bias", "activation", "residual"))}) == 5
    )
    assert not p.plain.fused
    with pytest.raises(ValueError, match="activation='tanh' is not one of relu, gelu, silu"):
        MatmulProblem.parse(texts | {"activation": "tanh"})
    with pytest.raises(ValueError, match="bias='int32' is not one of bfloat16, float16, float32"):
        MatmulProblem.parse(texts | {"bias": "int32"})


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("bias", ["", "float32"])
@pytest.mark.parametrize("residual", ["", "float16"])
def test_a_problem_is_found_again_in_the_operands_that_it_describes(batch, bias, residual):
    p = MatmulProblem(4, 5, 6, batch=batch, transpose_b=True, bias=bias, activation="gelu", residual=residual)
    operands = p.operands()
    assert MatmulProblem.of(*operands, transpose_b=True, activation="gelu") == p
    elements = batch * np.array([4 * 6, 6 * 5, 4 * 5, 5 * bool(bias), 4 * 5 * bool(residual)])
    assert p.bytes_moved == elements @ [2, 2, 2, 4, 2]


def test_what_follows_two_operands_must_be_a_bias_or_a_residual():
    a, b, bias, residual = MatmulProblem(4, 5, 6, bias="float32", residual="float32").operands()
    for wrong in [(a,), (residual, bias), (bias, bias), (bias, residual, residual)]:
        with pytest.raises(ValueError, match=r"may follow a bias \(5,\), then a residual \(4, 5\), and not"):
            MatmulProblem.of(a, b, *wrong)


def test_the_neighbour_has_the_same_epilogue():
    p = MatmulProblem(64, 64, 64, bias="bfloat16", activation="gelu", residual="float32")
    assert p.neighbour() == dataclasses.replace(p, m=63, n=61, k=59)


FULL = MatmulProblem(16, 24, 2**14, bias="bfloat16", activation="gelu", residual="bfloat16")


def test_inputs_make_sums_of_a_size_at_which_epilogues_differ():
    a, b, bias, residual = FULL.inputs(0)
    assert [(x.shape, x.dtype) for x in (a, b, bias, residual)] == [(s.shape, s.dtype) for s in FULL.operands()]
    sums = a.astype(jnp.float32) @ b.astype(jnp.float32)
    for x in (sums, bias.astype(jnp.float32), residual.astype(jnp.float32)):
        assert 0.5 < jnp.std(x) < 1.5


WRONG = {
    "no activation": lambda p, *args: (dataclasses.replace(p, activation=""), args),
    "another activation": lambda p, *args: (dataclasses.replace(p, activation="silu"), args),
    "no bias": lambda p, a, b, bias, residual: (p, (a, b, 0 * bias, residual)),
    "no residual": lambda p, a, b, bias, residual: (p, (a, b, bias, 0 * residual)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_the_tolerance_tells_an_epilogue_from_a_wrong_one(wrong):
    other, args = wrong(FULL, *drawn(FULL))
    assert mismatch(other.reference(*args), FULL.reference(*drawn(FULL)), FULL.tolerance()) is not None


# Its kernels


PROBLEMS = [
    MatmulProblem(40, 50, 60, "float32", bias="float32"),
    MatmulProblem(33, 17, 60, "bfloat16", residual="float32", transpose_a=True),
    MatmulProblem(40, 50, 20, "bfloat16", bias="bfloat16", activation="gelu", residual="bfloat16"),
    MatmulProblem(40, 50, 60, "float16", batch=3, bias="float32", activation="silu", transpose_b=True),
    MatmulProblem(40, 1, 60, "bfloat16", batch=2, out_dtype="float32", bias="float16", residual="float16"),
]


@pytest.mark.parametrize(("p", "minor"), list(zip(PROBLEMS, "mnmnm", strict=True)), ids=str)
def test_the_library_and_the_interpret_kernel_agree_with_the_reference(p, minor):
    args = drawn(p)

    @jax.jit
    def answers(*args):
        tiles = InterpretSchedule(16, min(p.n, 32), 16, minor)
        return MATMUL.library.run(p, Library(), CPU, *args), INTERPRET.run(p, tiles, CPU, *args), p.reference(*args)

    *actual, expected = (np.asarray(x) for x in answers(*args))
    allowed = p.tolerance()
    for one in actual:
        assert (one.shape, one.dtype) == (p.result().shape, p.result().dtype)
        np.testing.assert_allclose(one.astype(np.float32), expected, rtol=allowed.relative, atol=allowed.absolute)


def test_the_sums_are_not_rounded_before_what_follows_them():
    """A sum of 257 has no bfloat16: rounded to 256 first, it would leave nothing where 256 is taken away."""
    p = MatmulProblem(16, 16, 257, "bfloat16", bias="float32")
    args = jnp.ones((16, 257), "bfloat16"), jnp.ones((257, 16), "bfloat16"), jnp.full(16, -256.0)
    for kernel, schedule in ((MATMUL.library, Library()), (INTERPRET, InterpretSchedule(16, 16, 64, "m"))):
        np.testing.assert_array_equal(kernel.run(p, schedule, CPU, *args), jnp.ones((16, 16), "bfloat16"))


def test_an_interpret_footprint_counts_what_an_epilogue_reads():
    whole = Columns.of([InterpretSchedule(40, 50, 10, "m")])
    p = dataclasses.replace(PROBLEMS[2], k=20)
    f = INTERPRET.footprint(p, whole, CPU)
    loaded = f.steps * sum(load.bytes for load in f.mean_step.loads)
    np.testing.assert_allclose(loaded + f.tile.bytes_written, p.bytes_moved)
    bare = INTERPRET.footprint(p.plain, whole, CPU)
    assert f.onchip_bytes - bare.onchip_bytes == 2 * (50 + 40 * 50)
    assert f.tile.mufu_ops == 40 * 50
    assert bare.tile.mufu_ops == 0


def test_the_gpu_kernel_takes_part_whatever_follows_the_product():
    gpu = MATMUL.kernel("mosaic_gpu")
    target = find("NVIDIA H200").target
    for fields in ({"bias": "float32"}, {"activation": "relu"}, {"residual": "bfloat16"}):
        assert gpu.supports(MatmulProblem(64, 64, 64, **fields), target) is None
