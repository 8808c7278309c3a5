"""Kernels that are wrong where typical operands do not show it are refused, and right ones of many kinds are not."""

import contextlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import scheduler
from scheduler.core.hardware import CPU
from scheduler.core.records import Failure, Measurement
from scheduler.measure.bench import Bench
from scheduler.measure.protocol import Caution
from search_spaces import Tolerance

pytestmark = pytest.mark.slow_but_first

NAMES = itertools.count()
FLOATS = jax.ShapeDtypeStruct((16, 32), jnp.float32)
BFLOATS = jax.ShapeDtypeStruct((16, 32), jnp.bfloat16)
HALVES = jax.ShapeDtypeStruct((16, 32), jnp.float16)
BYTES = jax.ShapeDtypeStruct((16, 32), jnp.int8)
INTEGERS = jax.ShapeDtypeStruct((16, 32), jnp.int32)
COMPLEX = jax.ShapeDtypeStruct((16, 32), jnp.complex64)


@contextlib.contextmanager
def x64():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def verified(reference, kernel, *operands, **told):
    """What becomes of `kernel` when it is measured and confirmed: None where it is right, or the failure."""

    def decorated(x, *, tile, target):
        return kernel(x)

    def of_two(x, y, *, tile, target):
        return kernel(x, y)

    function = decorated if len(operands) == 1 else of_two
    operation = scheduler.autotune(tile=(8,), reference=reference, name=f"own_{next(NAMES)}", **told)(
        function
    ).operation
    bench = Bench(operation, operation.problem.of(*operands), CPU)
    outcome = bench.measure("pallas", {"tile": 8}, 2)
    if isinstance(outcome, Failure):
        return outcome
    assert isinstance(outcome, Measurement)
    return bench.confirm("pallas", {"tile": 8})


def each_fifth_call_is_wrong(x):
    calls = itertools.count(1)
    return jax.pure_callback(
        lambda y: np.asarray(y) * (3 if next(calls) % 5 == 0 else 2), jax.ShapeDtypeStruct(x.shape, x.dtype), x
    )


def another_program_from_the_third_trace_on():
    traces = itertools.count(1)
    return lambda x: x * (3 if next(traces) >= 3 else 2)


def softmax(x):
    e = jnp.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def softmax_without_the_maximum(x):
    e = jnp.exp(x)
    return e / e.sum(axis=-1, keepdims=True)


def half_up(x):
    return jnp.floor(x + 0.5)


def norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def centered(x):
    shifted = x - x.mean(axis=-1, keepdims=True)
    return shifted * lax.rsqrt((shifted * shifted).mean(axis=-1, keepdims=True) + 1e-5)


def variance_in_one_pass(x):
    return (x * x).mean(axis=-1) - x.mean(axis=-1) ** 2


def backward_of_centered(x, y):
    shifted = x - x.mean(axis=-1, keepdims=True)
    scale = lax.rsqrt((shifted * shifted).mean(axis=-1, keepdims=True) + 1e-5)
    unit = shifted * scale
    return scale * (y - y.mean(axis=-1, keepdims=True) - unit * (y * unit).mean(axis=-1, keepdims=True))


def scan(a, x):
    def step(state, each):
        state = each[0] * state + each[1]
        return state, state

    return lax.scan(step, jnp.zeros(x.shape[0]), (a.T, x.T))[1].T


def associative_scan(a, x):
    return lax.associative_scan(lambda one, two: (one[0] * two[0], one[1] * two[0] + two[1]), (a, x), axis=1)[1]


BIG = 1 << 28
TIE = jnp.float32(1e-30)
# What is wrong -> the reference, the kernel, an operand, and what is told of it.
WRONG = {
    "clips beyond 100": (lambda x: 2 * x, lambda x: 2 * jnp.clip(x, -100, 100), FLOATS),
    "softmax without the maximum": (softmax, softmax_without_the_maximum, FLOATS),
    "softmax without the maximum in bfloat16": (
        softmax,
        lambda x: softmax_without_the_maximum(x.astype(jnp.float32)).astype(x.dtype),
        BFLOATS,
    ),
    "exact zeros": (lambda x: 1 / x, lambda x: jnp.where(x == 0, 0.0, 1 / x), FLOATS),
    "rows of zeros": (
        lambda x: x / jnp.abs(x).sum(axis=-1, keepdims=True),
        lambda x: x / jnp.maximum(jnp.abs(x).sum(axis=-1, keepdims=True), 1e-30),
        FLOATS,
    ),
    "int8 saturates": (
        lambda x: x + jnp.int8(1),
        lambda x: jnp.clip(x.astype(jnp.int32) + 1, -128, 127).astype(jnp.int8),
        BYTES,
    ),
    "the least integer": (jnp.abs, lambda x: jnp.where(x < -(2**31) + 1, 2**31 - 1, jnp.abs(x)), INTEGERS),
    "halves are rounded up": (jnp.round, half_up, FLOATS),
    "halves are rounded away": (jnp.round, lambda x: jnp.trunc(x + jnp.copysign(0.5, x)), FLOATS),
    "tiny results are 0": (lambda x: x * TIE, jnp.zeros_like, FLOATS),
    "tiny results are 0 in bfloat16": (lambda x: x * TIE.astype(x.dtype), jnp.zeros_like, BFLOATS),
    "a tiny scalar is 0": (lambda x: x.sum() * TIE, lambda x: jnp.float32(0), FLOATS),
    "tiny operands are 0": (lambda x: 2 * x, lambda x: jnp.where(jnp.abs(x) < 1e-7, 0.0, 2 * x), FLOATS),
    "each fifth call": (lambda x: 2 * x, each_fifth_call_is_wrong, FLOATS),
    "from the third trace on": (lambda x: 2 * x, another_program_from_the_third_trace_on(), FLOATS),
    "the last of equal elements": (
        lambda x: jnp.argmax(x, axis=-1),
        lambda x: (x.shape[-1] - 1 - jnp.argmax(x[:, ::-1], axis=-1)).astype(jnp.int32),
        FLOATS,
    ),
    "a norm in float16": (norm, lambda x: norm(x.astype(jnp.float16)).astype(x.dtype), FLOATS),
    "overflow to the largest": (
        lambda x: x * x,
        lambda x: jnp.clip((x * x).astype(jnp.float32), -65504, 65504).astype(x.dtype),
        HALVES,
    ),
    "int32 off by three": (
        lambda x: (x * 1000).astype(jnp.int32) + BIG,
        lambda x: (x * 1000).astype(jnp.int32) + BIG + 3,
        FLOATS,
    ),
    "the low bits of uint32": (
        lambda x: lax.bitcast_convert_type(x, jnp.uint32),
        lambda x: lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFFFFE),
        FLOATS,
    ),
    "the low bits of int32": (lambda x: x, lambda x: x & ~1, INTEGERS),
    "the imaginary part": (lambda x: x + 1j * x, lambda x: lax.complex(x, 100 * x), FLOATS),
    "the conjugate": (lambda x: x * x, lambda x: jnp.conj(x * x), COMPLEX),
    "a truth value": (lambda x: x > 1, lambda x: x >= 1, FLOATS),
    "a variance in one pass": (lambda x: x.var(axis=-1), variance_in_one_pass, FLOATS, {"tolerance": 1e-4}),
    "a norm by a variance in one pass": (
        centered,
        lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(jnp.maximum(variance_in_one_pass(x), 0)[:, None] + 1e-5),
        FLOATS,
        {"tolerance": 1e-2},
    ),
    "NaN in the rows of a tile": (
        lambda x: 2 * x,
        lambda x: jnp.where(jnp.isnan(x.reshape(2, -1)).any(axis=1).repeat(8)[:, None], jnp.nan, 2 * x),
        FLOATS,
    ),
    "NaN in all sums of a tile": (
        lambda x: x.sum(axis=1),
        lambda x: jnp.where(jnp.isnan(x).any(), jnp.nan, x.sum(axis=1)),
        FLOATS,
        {"tolerance": 1e-5},
    ),
    "the bits of a bfloat16": (
        lambda x: lax.bitcast_convert_type(x, jnp.uint16),
        lambda x: lax.bitcast_convert_type(x, jnp.uint16) ^ jnp.uint16(1),
        BFLOATS,
    ),
}
WRONG_IN_X64 = {
    "float64 in float32": (lambda x: x * 2.0, lambda x: (x.astype(jnp.float32) * 2.0).astype(jnp.float64), "float64"),
    "a sine in float32": (jnp.sin, lambda x: jnp.sin(x.astype(jnp.float32)).astype(jnp.float64), "float64"),
    "int64 off by 1000": (
        lambda x: x.astype(jnp.int64) + (1 << 40),
        lambda x: x.astype(jnp.int64) + (1 << 40) + 1000,
        "float32",
    ),
    "int64 in int32": (lambda x: x >> 1, lambda x: (x >> 1).astype(jnp.int32).astype(jnp.int64), "int64"),
    "int64 in float64": (lambda x: x, lambda x: x.astype(jnp.float64).astype(jnp.int64), "int64"),
    "the lowest bit of uint64": (lambda x: x, lambda x: x ^ jnp.uint64(1), "uint64"),
    "complex128 in complex64": (
        lambda x: x * (1 + 2j),
        lambda x: (x.astype(jnp.complex64) * (1 + 2j)).astype(jnp.complex128),
        "complex128",
    ),
}


def norm_in_one_pass_before_a_product(x, y):
    variance = jnp.maximum(variance_in_one_pass(x), 0)[:, None]
    return jnp.dot((x - x.mean(-1, keepdims=True)) * lax.rsqrt(variance + 1e-5), y, precision="highest")


def distance_by_products(x, y):
    return jnp.sqrt((x * x).sum(-1) + (y * y).sum(-1) - 2 * (x * y).sum(-1))


@pytest.mark.parametrize(
    ("reference", "kernel", "shape"),
    [
        (lambda x, y: jnp.dot(centered(x), y, precision="highest"), norm_in_one_pass_before_a_product, (32, 64)),
        (lambda x, y: jnp.linalg.norm(x - y, axis=-1), distance_by_products, (16, 32)),
    ],
)
def test_kernels_of_two_operands_that_cancel_are_refused(reference, kernel, shape):
    failure = verified(reference, kernel, FLOATS, jax.ShapeDtypeStruct(shape, jnp.float32), tolerance=1e-3)
    assert isinstance(failure, Failure)
    assert 'special operands ("offset")' in failure.detail


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_refused(wrong):
    reference, kernel, x, *told = WRONG[wrong]
    failure = verified(reference, kernel, x, **(told[0] if told else {}))
    assert isinstance(failure, Failure)
    assert failure.stage == "verify"
    assert "elements are off; the worst" in failure.detail
    assert "nothing was written" not in failure.detail


@pytest.mark.parametrize("wrong", WRONG_IN_X64)
def test_what_is_wrong_in_64_bits_is_refused(wrong):
    reference, kernel, dtype = WRONG_IN_X64[wrong]
    with x64():
        failure = verified(reference, kernel, jax.ShapeDtypeStruct((16, 32), dtype))
    assert failure.stage == "verify"
    assert "elements are off; the worst" in failure.detail


def masked_scores(x, y, masked):
    scores = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), jnp.dot(x, y.T, precision="highest"), masked)
    return jax.nn.softmax(scores, axis=-1) @ y


# Wrong for operands for which another order of sums may differ -> the kinds, the reference, the kernel, its operands.
DISPUTED = {
    "attention that masks by -inf": (
        ["-inf"],
        lambda x, y: masked_scores(x, y, -1e30),
        lambda x, y: masked_scores(x, y, -jnp.inf),
        [FLOATS, FLOATS],
    ),
    "NaN to 0": (
        ["nan"],
        lambda x: 2 * x,
        lambda x: jnp.nan_to_num(2 * x, nan=0.0, posinf=jnp.inf, neginf=-jnp.inf),
        [FLOATS],
    ),
    "infinity to 0": (["inf", "-inf"], lambda x: 2 * x, lambda x: jnp.where(jnp.isinf(x), 0.0, 2 * x), [FLOATS]),
    "NaN is no maximum": (
        ["nan"],
        lambda x: x.max(axis=-1),
        lambda x: jnp.where(jnp.isnan(x), -jnp.inf, x).max(axis=-1),
        [FLOATS],
    ),
    "a scan in another order": (["large", "inf", "-inf"], scan, associative_scan, [FLOATS, FLOATS]),
    "a cumulative sum as a product": (
        ["nan", "inf", "-inf"],
        lambda x: jnp.cumsum(x, axis=1),
        lambda x: jnp.dot(x, jnp.triu(jnp.ones((32, 32))), precision="highest"),
        [FLOATS],
    ),
    "a norm's backward pass": (
        ["inf", "-inf"],
        lambda x, y: jax.vjp(centered, x)[1](y)[0],
        backward_of_centered,
        [FLOATS, FLOATS],
    ),
}


@pytest.mark.parametrize("name", DISPUTED)
def test_what_differs_for_disputed_operands_is_used_with_a_caution_and_refused_if_that_is_asked(name):
    kinds, reference, kernel, operands = DISPUTED[name]
    caution = verified(reference, kernel, *operands, tolerance=1e-4)
    assert isinstance(caution, Caution)
    assert re.findall(r'special operands \("(.*?)"\)', caution.detail) == kinds
    assert "nothing was written" not in caution.detail
    assert verified(reference, kernel, *operands, tolerance=1e-4, special=False) is None
    for special in (True, kinds):
        assert verified(reference, kernel, *operands, tolerance=1e-4, special=special).stage == "verify"
    (others,) = re.findall(r"(special=\(.*?\)) checks nothing else", caution.detail)
    assert verified(reference, kernel, *operands, tolerance=1e-4, **eval(f"dict({others})")) is None


def sum_in_blocks(x):
    return x.reshape(x.shape[0], 4, -1).sum(axis=-1).sum(axis=-1)


def without_subnormal_numbers(x):
    return jnp.where(jnp.abs(x) < jnp.finfo(jnp.float32).tiny, 0.0, x)


def variance_in_parts(x):
    parts = jnp.split(x, 4, axis=1)
    means = [part.mean(axis=1) for part in parts]
    mean = sum(means) / 4
    return sum(part.var(axis=1) + (own - mean) ** 2 for part, own in zip(parts, means, strict=True)) / 4


def centered_in_parts(x):
    mean = sum(part.mean(axis=1) for part in jnp.split(x, 4, axis=1)) / 4
    return (x - mean[:, None]) * lax.rsqrt(variance_in_parts(x)[:, None] + 1e-5)


def online_softmax(x):
    most, total = jnp.full((*x.shape[:-1], 1), -jnp.inf), jnp.zeros((*x.shape[:-1], 1))
    for part in jnp.split(x.astype(jnp.float32), 4, axis=-1):
        new = jnp.maximum(most, part.max(axis=-1, keepdims=True))
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        total = total * jnp.exp(most - shift) + jnp.exp(part - shift).sum(axis=-1, keepdims=True)
        most = new
    return (jnp.exp(x - most) / total).astype(x.dtype)


def product_in_parts(a, b):
    parts = zip(jnp.split(a, 4, axis=1), jnp.split(b, 4, axis=0), strict=True)
    return sum(jnp.dot(one.astype(jnp.float32), other.astype(jnp.float32)) for one, other in parts).astype(a.dtype)


# What is right -> the reference, the kernel, its operands, and what is told of it.
RIGHT = {
    "the same": (lambda x: 2 * x, lambda x: x + x, [FLOATS], {}),
    "a sum in another order": (lambda x: x.sum(axis=-1), sum_in_blocks, [FLOATS], {"tolerance": 1e-5}),
    "a mean in another order": (lambda x: x.mean(axis=-1), lambda x: sum_in_blocks(x / 32), [FLOATS], {}),
    "a sum of all": (lambda x: x.sum(), lambda x: x.T.sum(axis=0).sum(), [FLOATS], {"tolerance": 1e-5}),
    "a product in parts": (
        lambda a, b: a @ b,
        product_in_parts,
        [FLOATS, jax.ShapeDtypeStruct((32, 16), jnp.float32)],
        {"tolerance": 1e-5},
    ),
    "a product in bfloat16": (
        lambda a, b: a @ b,
        product_in_parts,
        [BFLOATS, jax.ShapeDtypeStruct((32, 16), jnp.bfloat16)],
        {},
    ),
    "no subnormal numbers": (
        lambda x: x * jnp.float32(1e-38),
        lambda x: without_subnormal_numbers(x * jnp.float32(1e-38)),
        [FLOATS],
        {},
    ),
    "an exponential by base 2": (
        jnp.exp,
        lambda x: jnp.exp2(x * jnp.float32(np.log2(np.e))),
        [FLOATS],
        {"tolerance": 1e-5, "special": ("tiny", "halves", "nan", "inf", "-inf")},
    ),
    "an approximate reciprocal": (lambda x: 1 / x, lambda x: (1 / x) * (1 + 2**-22), [FLOATS], {}),
    "zeros of either sign": (lambda x: x * 0, lambda x: jnp.abs(x * 0), [FLOATS], {}),
    "rounded once": (lambda x: x * x + x, lambda x: (x.astype(jnp.float32) ** 2 + x).astype(x.dtype), [BFLOATS], {}),
    "rounded twice": (lambda x: x * x + x, lambda x: x * x + x, [BFLOATS], {}),
    "an overflow to infinity": (lambda x: x * x, lambda x: x * x, [HALVES], {}),
    "an online softmax": (softmax, online_softmax, [FLOATS], {}),
    "an online softmax in bfloat16": (softmax, online_softmax, [BFLOATS], {}),
    "a variance in one pass over the rest from the first element": (
        lambda x: x.var(axis=-1),
        lambda x: variance_in_one_pass(x - x[:, :1]),
        [FLOATS],
        {"tolerance": 1e-5},
    ),
    "a variance in parts": (lambda x: x.var(axis=-1), variance_in_parts, [FLOATS], {"tolerance": 1e-5}),
    "a norm by means in parts": (centered, centered_in_parts, [FLOATS], {"tolerance": 1e-4}),
    "differences": (lambda x: jnp.diff(x, axis=1), lambda x: x[:, 1:] - x[:, :-1], [FLOATS], {}),
    "a norm": (norm, lambda x: x / jnp.sqrt(sum_in_blocks(x * x)[:, None] / 32 + 1e-6), [FLOATS], {}),
    "a maximum": (lambda x: x.max(axis=-1), lambda x: x[:, ::-1].max(axis=-1), [FLOATS], {}),
    "NaN where it is right": (jnp.log, lambda x: jnp.log(x), [FLOATS], {}),
    "NaN everywhere": (lambda x: x * jnp.nan, lambda x: jnp.full_like(x, jnp.nan), [FLOATS], {}),
    "integers that wrap": (
        lambda x: x + jnp.int8(1),
        lambda x: (x.astype(jnp.int32) + 1).astype(jnp.int8),
        [BYTES],
        {},
    ),
    "integers off by one, as was said": (
        lambda x: (x // 3).astype(jnp.int8),
        lambda x: (x // 3 + jnp.int8(1)).astype(jnp.int8),
        [BYTES],
        {"tolerance": Tolerance(1, 0)},
    ),
    "complex products": (
        lambda x: x * x,
        lambda x: lax.complex(x.real * x.real - x.imag * x.imag, 2 * x.real * x.imag),
        [COMPLEX],
        {},
    ),
    "truth values": (lambda x: x > 0, lambda x: ~(x <= 0) & ~jnp.isnan(x), [FLOATS], {}),
    "clips, as was said": (lambda x: 2 * x, lambda x: 2 * jnp.clip(x, -100, 100), [FLOATS], {"special": False}),
    "clips beyond its inputs": (
        lambda x: 2 * x,
        lambda x: 2 * jnp.clip(x, -1, 1),
        [FLOATS],
        {"inputs": lambda rng, x: jax.random.uniform(rng, x.shape, x.dtype)},
    ),
    "NaN to 0, as was said": (
        lambda x: 2 * x,
        lambda x: jnp.nan_to_num(2 * x, nan=0.0, posinf=jnp.inf, neginf=-jnp.inf),
        [FLOATS],
        {"special": ("large", "tiny", "halves", "inf", "-inf")},
    ),
}


@pytest.mark.parametrize("right", RIGHT)
def test_what_is_right_is_accepted(right):
    reference, kernel, operands, told = RIGHT[right]
    assert verified(reference, kernel, *operands, **told) is None


def test_a_search_keeps_no_entry_that_is_wrong_and_one_whose_right_answer_has_nan():
    def tuned(name, kernel):
        @scheduler.autotune(tile=(8,), reference=jnp.log, name=name)
        def log(x, *, tile, target):
            return kernel(x)

        return scheduler.tune(log, log.problem(jnp.ones((16, 32))), budget=2)

    right = tuned("right_log", lambda x: jnp.log(x) + 0)
    assert {entry.backend for entry in right.entries} == {"pallas", "xla"}
    with pytest.warns(RuntimeWarning, match="1 of 1 schedules of pallas failed: verify: .*instead of nan"):
        wrong = tuned("log_of_magnitudes", lambda x: jnp.log(jnp.abs(x)))
    assert [entry.backend for entry in wrong.entries] == ["xla"]
    with pytest.warns(RuntimeWarning, match=r'log_of_finite.*, pallas tile=8: with special operands \("inf"\)') as told:
        finite = tuned("log_of_finite", lambda x: jnp.minimum(jnp.log(x), 80.0))
    assert {entry.backend for entry in finite.entries} == {"pallas", "xla"}
    assert [str(each.message).endswith(finite.notes[0]) for each in told] == [True]
