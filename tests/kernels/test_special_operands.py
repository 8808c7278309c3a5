"""Operands that typical ones leave out: what they are, which are promised, and kernels that are right for them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import DoubleProblem

import scheduler
from scheduler.contrib.tpu.estimate import interpreted
from scheduler.core.hardware import CPU, find
from scheduler.measure import buffers
from scheduler.measure.bench import Bench, calls_to_confirm
from scheduler.measure.verification import mismatch, mismatches
from scheduler.model.cost import CostModel
from scheduler.model.pruning import prune
from search_spaces import checking, load_known
from search_spaces.flash_attention import FlashAttentionProblem
from search_spaces.flash_attention_backward import FlashAttentionBackwardProblem
from search_spaces.gated_matmul import GatedMatmulProblem
from search_spaces.matmul import MatmulProblem
from search_spaces.problem import DOWN, PROPORTIONAL, Tolerance, as_tuple
from search_spaces.scaled_matmul import ScaledMatmulProblem
from search_spaces.space import DeclarationError

pytestmark = pytest.mark.slow

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def drawn(dtype, kind, shape=(16, 32)):
    x = jax.random.normal(jax.random.key(0), shape, jnp.float32).astype(dtype)
    (made,) = checking.with_special_values((x,), kind)
    assert (made.shape, made.dtype) == (x.shape, x.dtype)
    return np.asarray(made.astype(jnp.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_and_tiny_numbers_are_finite_and_have_zeros_of_both_signs(dtype):
    for kind in checking.FINITE:
        values = drawn(dtype, kind)
        assert np.isfinite(values).all()
        zeros = values[values == 0]
        assert {bool(sign) for sign in np.signbit(zeros)} == {False, True}
    large, tiny = np.abs(drawn(dtype, "large")), np.abs(drawn(dtype, "tiny"))
    assert large.max() > (1e5 if dtype in ("float32", "bfloat16") else 20)
    assert tiny.max() < (1e-8 if dtype in ("float32", "bfloat16") else 0.3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_halves_are_halves_and_some_rows_are_of_equal_elements(dtype):
    values = drawn(dtype, "halves")
    assert np.array_equal(2 * values, np.round(2 * values))
    assert {-2.5, -1.5, -0.5, 0.5, 1.5, 2.5} <= set(values.ravel())
    assert (values[5] == 0).all()
    assert set(values[3]) <= {0.0, 1.5}


@pytest.mark.parametrize("dtype", DTYPES)
def test_offset_numbers_have_a_large_mean_and_a_small_deviation(dtype):
    values = drawn(dtype, "offset", (64, 128)).astype(np.float64)
    assert np.isfinite(values).all()
    assert min(len(set(row)) for row in values) >= 3
    assert values.std() < values.mean() / 4
    assert (10 if dtype == "float8_e4m3fn" else 1000) < values.mean() < 10_000
    if dtype == "float32":
        assert 0.09 < values.std() < 0.11


def test_the_operands_of_the_first_shape_have_one_offset_and_no_integers():
    x, w, i = jnp.ones((16, 32)), jnp.ones((32, 40)), jnp.ones((64, 64), jnp.int32)
    first, other, integers, second = checking.with_special_values((x, w, i, x), "offset")
    assert min(float(first.min()), float(second.min())) > 1000
    assert other is w
    assert integers is i
    assert abs(float(first.mean() - second.mean())) < 1, "so that a difference cancels"


def test_operands_of_one_call_have_different_special_values():
    x = jax.random.normal(jax.random.key(0), (16, 32))
    one, two = checking.with_special_values((x, x), "halves")
    assert float((one == two).mean()) < 0.5


def test_special_numbers_are_in_some_rows_and_leave_the_others():
    nan, inf, least = (drawn("float32", kind) for kind in ("nan", "inf", "-inf"))
    for values, special in ((nan, np.isnan), (inf, np.isposinf), (least, np.isneginf)):
        rows = special(values).sum(axis=1)
        assert rows[0] == 1
        assert (rows == 0).sum() >= 8
    assert np.isposinf(inf[4]).all()
    assert np.isneginf(least[4]).all()
    assert np.isnan(nan).any(axis=1).sum() == 4
    x = jnp.ones((16, 32))
    *_, second = checking.with_special_values((x, x), "nan")
    assert int(jnp.isnan(second).sum()) == 1, "or no number is left in a product"


def test_integers_take_their_extremes_unless_they_are_indices():
    for dtype in ("int8", "uint8", "int32", "uint16"):
        info = jnp.iinfo(dtype)
        x = jnp.full((16, 32), 5, dtype)
        (large,) = checking.with_special_values((x,), "large")
        assert {int(info.min), int(info.max), 0, 1, 5} <= set(np.asarray(large).ravel().tolist())
        assert checking.with_special_values((x,), "large", integers=False)[0] is x
        assert jnp.array_equal(checking.with_special_values((x,), "nan")[0], x)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 4), (1, 1, 1), (3, 5, 2)])
def test_arrays_of_any_shape_have_special_values(shape):
    for kind in checking.VALUE_KINDS:
        x = jnp.ones(shape, jnp.float32)
        (made,) = checking.with_special_values((x,), kind)
        assert made.shape == shape


def test_every_bit_of_an_integer_and_each_part_of_a_complex_number_is_drawn():
    class Drawn(DoubleProblem):
        def operands(self):
            shape = (256,)
            return tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype in ("int32", "uint32", "complex64"))

    signed, unsigned, pair = map(np.asarray, Drawn(8).inputs(0))
    for bit in range(31):
        assert 0.2 < np.mean(signed >> bit & 1) < 0.8
        assert np.mean(unsigned >> np.uint32(bit) & np.uint32(1)) > 0.02
    assert 0.2 < signed.std() / 2**31 < 0.3
    assert 0.8 < pair.imag.std() < 1.2


@dataclasses.dataclass(frozen=True)
class OwnInputs(DoubleProblem):
    def inputs(self, seed):
        return super().inputs(seed)


def test_what_draws_its_own_operands_promises_no_others():
    assert DoubleProblem(8).special() == checking.VALUE_KINDS
    assert OwnInputs(8).special() == ()

    names = itertools.count()

    def own(**told):
        @scheduler.autotune(tile=(8,), reference=lambda x, i: x[i], name=f"take_{next(names)}", **told)
        def take(x, i, *, tile, target):
            return x[i]

        return take.problem(jnp.ones(8), jnp.arange(4, dtype=jnp.int32))

    def inputs(rng, x, i):
        return jax.random.normal(rng, x.shape), jnp.arange(4, dtype=jnp.int32) + 3

    assert own().special() == checking.VALUE_KINDS
    assert own(inputs=inputs).special() == own(special=False).special() == ()
    assert own(special=("nan", "tiny")).special() == ("tiny", "nan")
    both = own(inputs=inputs, special=True)
    assert both.special() == checking.VALUE_KINDS
    x, i = both.special_inputs("large", 0)
    assert float(jnp.abs(x).max()) > 10
    assert i.tolist() == [3, 4, 5, 6]
    for wrong in ("huge", ("large", "huge"), 3):
        with pytest.raises(DeclarationError, match=r"special=.* is no kind of special operands; write True, False, or"):
            own(special=wrong)


def test_each_tolerance_says_how_it_scales():
    (default,) = as_tuple(DoubleProblem(8).tolerance())
    assert default.scale == DOWN
    (special,) = DoubleProblem(8).special_tolerance("large")
    assert (special.scale, special.absolute) == (PROPORTIONAL, default.absolute)
    tiny = jnp.full(16, 1e-30)
    assert mismatch(jnp.zeros(16), tiny, default) is not None
    assert mismatch(tiny * (1 + 4e-7), tiny, default) is None
    assert mismatch(jnp.zeros(16), tiny, Tolerance(1e-6, 1e-6)) is None, "as it was said"
    assert mismatch(tiny.at[0].set(1).at[1].set(0), tiny.at[0].set(1), default) is None, "beside 1"
    assert mismatch(jnp.zeros(16), jnp.full(16, 1e-39), default) is None, "which a chip may flush"


def test_poison_is_of_two_kinds_and_neither_passes_for_nan_that_is_right():
    poison = buffers.poisoning(DoubleProblem(64))
    (first,), (second,) = poison(), poison(other=True)
    assert bool(jnp.isnan(first).all())
    assert bool(jnp.isfinite(second).all())
    right = jnp.full(64, jnp.nan)
    assert mismatch(first, right, Tolerance(0, 0)) is None
    assert "instead of nan" in mismatch(second, right, Tolerance(0, 0))


def test_norms_of_rows_with_a_large_mean_are_right_in_the_interpreter_of_tpu_kernels():
    hardware = find("TPU v5 lite")
    for name in ("layer_norm", "layer_norm_backward"):
        operation = load_known(name)
        problem = operation.problem(16, 256, "float32")
        assert "offset" in problem.special()
        (kernel,) = (k for k in operation.kernels if not k.library and k.supports(problem, hardware.target) is None)
        first = prune(kernel, problem, hardware, CostModel(hardware)).candidates()[0]
        assert interpreted(operation, problem, hardware, kernel.backend, first.schedule) is None, name


ROWS = ("softmax", "rms_norm", "add_rms_norm", "silu_and_mul", "silu_and_mul_backward", "softmax_with_lse")
CASES = [
    *[
        ("matmul", problem)
        for problem in (
            MatmulProblem(33, 40, 24),
            MatmulProblem(33, 40, 24, dtype="float16", bias="float16", activation="gelu"),
            MatmulProblem(16, 24, 40, dtype="float32", transpose_b=True),
            MatmulProblem(16, 24, 40, dtype="int8", out_dtype="int32"),
            MatmulProblem(16, 24, 40, dtype="float8_e5m2", out_dtype="bfloat16"),
            MatmulProblem(16, 24, 40, split_sizes="16+8"),
        )
    ],
    *[("gated_matmul", GatedMatmulProblem(33, 24, 40, activation=name)) for name in ("silu", "gelu")],
    ("scaled_matmul", ScaledMatmulProblem(33, 24, 136)),
    *[(name, load_known(name).problem(33, 40, dtype)) for name in ROWS for dtype in ("bfloat16", "float32")],
    *[(name, load_known(name).problem(9, 64, "float16")) for name in ("softmax", "rms_norm", "silu_and_mul")],
    ("flash_attention", FlashAttentionProblem(2, 33, 40, 4, 2, 16, causal=True, return_lse=True)),
    ("flash_attention", FlashAttentionProblem(2, 33, 40, 2, 1, 16, kv_lengths=True, softcap=True, dtype="float32")),
    ("flash_attention_backward", FlashAttentionBackwardProblem(2, 33, 40, 4, 2, 16, causal=True)),
    ("flash_attention_backward", FlashAttentionBackwardProblem(1, 33, 40, 2, 1, 16, kv_lengths=True, dtype="float32")),
]


@pytest.mark.parametrize(("name", "problem"), CASES, ids=str)
def test_kernels_that_run_here_are_right_for_what_is_promised(name, problem):
    operation = load_known(name)
    for kernel in operation.kernels:
        if not kernel.library and kernel.supports(problem, CPU.target) is None:
            space = kernel.space(problem, CPU.target)
            schedule = dataclasses.asdict(next(space.schedules(space.legal()[0])))
            assert Bench(operation, problem, CPU).confirm(kernel.backend, schedule) is None
    # XLA's own programs are not asked, and right all the same.
    library = operation.library
    point = library.space(problem, CPU.target).decode({})
    run = jax.jit(lambda *args: library.results(problem, point, CPU.target, *args))
    for kind in problem.special():
        args = problem.special_inputs(kind, 1)
        wanted, got = as_tuple(problem.reference(*args)), run(*args)
        assert mismatches(problem, got, wanted, problem.special_tolerance(kind)) is None, kind


def test_integers_stay_exact_in_float32():
    for kind in MatmulProblem(64, 64, 8192, dtype="int8", out_dtype="int32").special():
        problem = MatmulProblem(64, 64, 8192, dtype="int8", out_dtype="int32")
        a, b = (np.asarray(x, np.int64) for x in problem.special_inputs(kind, 0))
        assert np.abs(a).max() == {"large": 128, "tiny": 1, "halves": 8}[kind]
        assert np.array_equal(a @ b, problem.reference(*(jnp.asarray(x, jnp.int8) for x in (a, b))))


def test_a_search_knows_how_often_it_calls_its_finalists():
    small, large = DoubleProblem(8), DoubleProblem(2**23)
    assert calls_to_confirm(small) == 10 + len(checking.VALUE_KINDS) + 1
    assert calls_to_confirm(large) == 5 + len(checking.VALUE_KINDS) + 1


def test_a_kernel_that_allows_itself_more_is_allowed_more_of_special_operands():
    usual = Tolerance(1e-3, 1e-5)
    assert usual.times(usual) == Tolerance(0, 0).times(usual) == usual.times(Tolerance(0, 0)) == 1
    assert usual.wider(8).times(usual) == pytest.approx(8)
    assert Tolerance(1e-3, 4e-5).times(usual) == pytest.approx(4)
