"""Row programs: random functions of one row against float64, the program of a function, and what has none."""

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import scheduler
from scheduler import NoCandidate
from search_spaces.rows import formulas
from search_spaces.rows.builder import NoProgram, online
from search_spaces.rows.derivative import differentiate
from search_spaces.rows.elementwise import REDUCTIONS
from search_spaces.rows.program import Number, evaluate, parse
from search_spaces.rows.reader import trace
from search_spaces.rows.stages import Stage

pytestmark = pytest.mark.slow_but_first

ROWS, COLUMNS, SEGMENTS = 5, 40, 3
WIDE = {"float32": 2.0**-13, "bfloat16": 2.0**-5, "float16": 2.0**-8}


@pytest.fixture(autouse=True)
def _no_answers(_own_cache):
    scheduler.reload()


# ------------------------------------------------------------------------------
# Random functions: a list of steps on a pool of vectors and of scalars. Each step keeps magnitudes near 1.

UNARY = {
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "erf": lambda x: jax.scipy.special.erf(x),
    "softplus": jax.nn.softplus,
    "exp": lambda x: jnp.exp(0.5 * jnp.tanh(x)),
    "exp2": lambda x: jnp.exp2(jnp.clip(x, -2, 1)),
    "expm1": lambda x: jnp.expm1(0.3 * x),
    "log1p": lambda x: jnp.log1p(x * x),
    "log": lambda x: jnp.log(0.5 + jnp.abs(x)),
    "square": lambda x: 0.3 * x * x,
    "cube": lambda x: 0.1 * x**3,
    "root": lambda x: jnp.sqrt(1 + x * x),
    "inverse root": lambda x: jax.lax.rsqrt(0.5 + x * x),
    "relu": jax.nn.relu,
    "mask": lambda x: jnp.where(jnp.arange(x.shape[-1]) % 3 == 1, -x, 0.5),
    "softmax": lambda x: x.shape[-1] * jax.nn.softmax(x, axis=-1),
    "centred": lambda x: x - jnp.mean(x, axis=-1, keepdims=True),
}
BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": lambda x, y: x * jnp.tanh(y),
    "div": lambda x, y: x / (1 + y * y),
    "max": jnp.maximum,
    "min": jnp.minimum,
    "where": lambda x, y: jnp.where(x > y, 0.5 * x, y),
}
REDUCED = {
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "lse": lambda x, **along: jax.nn.logsumexp(x, **along) / 4,
    "squares": lambda x, **along: jnp.sqrt(jnp.mean(x * x, **along) + 0.1),
    "std": lambda x, **along: jnp.std(x + jnp.arange(x.shape[-1]) / 8, **along),
    "argmax": lambda x, **along: jnp.argmax(x, **along).astype(x.dtype) / x.shape[-1],
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A random function of one row.

    Attributes:
      dtypes: of two rows, of a vector that rows share, and of an element per row; of two results.
      segments: whether a row is segments, which steps reduce.
      steps: each a kind, a name, and two numbers that choose operands.
    """

    dtypes: tuple[str, ...]
    segments: bool
    steps: tuple[tuple[str, str, int, int], ...]

    def __call__(self, x, y, weight, scalar, label, *, rounded=True):
        """Computes in float32, or in float64 if operands are, and then without rounding."""
        x, y, weight, scalar = (a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in (x, y, weight, scalar))
        if self.segments:
            vectors, scalars = [x.reshape(SEGMENTS, COLUMNS), weight * y.reshape(SEGMENTS, COLUMNS)], []
        else:
            vectors, scalars = [*jnp.split(x, 2), y, weight], [scalar, x[label]]
        for kind, name, first, second in self.steps:
            a, b = (vectors[-1 - i % min(4, len(vectors))] for i in (first, second))
            if kind == "unary":
                vectors.append(UNARY[name](a))
            elif kind == "binary":
                vectors.append(BINARY[name](a, b))
            elif kind == "reduced":
                scalars.append(REDUCED[name](a, axis=-1, keepdims=self.segments))
            elif scalars:  # "joined"
                vectors.append(BINARY[name](a, scalars[first % len(scalars)]))
        rows = vectors[-1].reshape(-1) if self.segments else jnp.concatenate(vectors[-2:])
        found = [rows, *(scalars[-1].reshape(-1) if self.segments else scalars[-1] for _ in scalars[-1:])]
        return [a.astype(dtype) if rounded else a for a, dtype in zip(found, self.dtypes[4:], strict=False)]

    def operands(self):
        keys = jax.random.split(jax.random.key(len(self.steps)), 5)
        length = SEGMENTS * COLUMNS if self.segments else 2 * COLUMNS
        shapes = (ROWS, length), (ROWS, length if self.segments else COLUMNS), (COLUMNS,), (ROWS,)
        floats = [jax.random.normal(k, s).astype(d) for k, s, d in zip(keys, shapes, self.dtypes, strict=False)]
        return *floats, jax.random.randint(keys[4], (ROWS,), 0, 2 * COLUMNS)


def drawn(seed):
    choice = random.Random(seed)
    own = choice.choice(["float32", "float32", "bfloat16", "float16"])
    dtypes = (own, own, choice.choice([own, "float32"]), "float32", own, "float32")
    tables = {"unary": UNARY, "binary": BINARY, "reduced": REDUCED, "joined": BINARY}
    steps = []
    for kind in choice.choices(["unary", "binary", "reduced", "joined"], [3, 2, 2, 3], k=choice.randint(3, 10)):
        steps.append((kind, choice.choice(sorted(tables[kind])), choice.randrange(4), choice.randrange(4)))
    return Drawn(dtypes, choice.random() < 0.25, tuple(steps))


def over_rows(function):
    return jax.vmap(function, in_axes=(0, 0, None, 0, 0))


@functools.partial(pytest.mark.parametrize, "seed")(range(50))
def test_results_and_gradients_of_random_functions_are_those_in_float64(seed):
    one = drawn(seed)
    operands = one.operands()
    if one.segments:  # an element per row is none per segment
        name, function = ("weight",), lambda x, y, weight: one(x, y, weight, jnp.float32(0), 0)
        floats = operands[:3]
    else:
        name, function = ("label", "scalar"), lambda x, y, weight, scalar, label: one(x, y, weight, scalar, label)
        floats = operands[:4]
    kernel = scheduler.rows(function, scalars=() if name == ("weight",) else ("scalar", "label"))
    rest = operands[len(floats) :] if not one.segments else ()

    def tuned(*floats):
        return kernel(*floats, *rest, backends="interpret")

    found, back = jax.vjp(tuned, *floats)
    cotangents = [jax.random.normal(jax.random.key(i), x.shape).astype(x.dtype) for i, x in enumerate(found)]
    gradients = back(cotangents)
    assert "backward" in str(jax.make_jaxpr(lambda *floats: jax.vjp(tuned, *floats)[1](cotangents))(*floats))
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in operands[:4]]
        exact = over_rows(functools.partial(one, rounded=False))
        wanted, back = jax.vjp(lambda *floats: exact(*floats, operands[4]), *wide)
        wanted_gradients = back([np.asarray(x, np.float64) for x in cotangents])
    for actual, expected in zip([*found, *gradients], [*wanted, *wanted_gradients[: len(floats)]], strict=True):
        error = WIDE[one.dtypes[0]] * max(1.0, float(np.max(np.abs(expected))))
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=error, err_msg=str(one))


# ------------------------------------------------------------------------------
# What a program is.

X, VECTOR = jax.ShapeDtypeStruct((64,), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.float32)


def program(function, *shapes, kinds=None):
    shapes = shapes or (X,)
    return trace(function, shapes, kinds or ["row"] * len(shapes))[0]


def names(found):
    return [equation.name for equation in found.equations]


def backward_of(function, *shapes, kinds=None):
    shapes = shapes or (X,)
    return differentiate(function, shapes, kinds or ["row"] * len(shapes))


def test_a_stage_is_what_reductions_wait_for():
    assert program(jnp.tanh).stages == ()
    assert [len(s) for s in program(lambda x: x * (jnp.max(x) + jnp.sum(x))).stages] == [2]
    assert [len(s) for s in program(jax.nn.softmax).stages] == [1, 1]
    assert [len(s) for s in program(lambda x: jnp.var(x)).stages] == [1, 1]


def test_a_sum_of_exponentials_joins_the_stage_of_the_maximum():
    for function in (jax.nn.softmax, jax.nn.log_softmax, jax.nn.logsumexp, formulas.softmax_with_lse):
        whole = program(function)
        joined = online(whole)
        assert (len(whole.stages), len(joined.stages)) == (2, 1)
        x = jnp.stack([jnp.linspace(-3, 90, 64), jnp.linspace(0, 1, 64)])
        for a, b in zip(evaluate(joined, x), evaluate(whole, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_equal_steps_are_one_and_numbers_are_folded():
    found = program(lambda x: (jnp.exp(x) + jnp.nan) * (jnp.exp(x) + jnp.nan) * (2.0 * 3.0) / 4.0)
    assert sorted(names(found)) == ["add", "exp", "mul", "mul", "mul"]
    assert Number(float("nan")) == Number(float("nan"))
    assert Number(0.0) != Number(-0.0)


def test_scalars_leave_the_sums_of_bounded_formulas_so_that_backward_passes_have_one_stage():
    rms = backward_of(formulas.rms_norm, X, VECTOR, kinds=["row", "shared"])
    shapes, kinds = (X, VECTOR, VECTOR), ["row", "shared", "shared"]
    layer = differentiate(formulas.layer_norm, shapes, kinds, bounded=True)
    assert [len(found.backward.stages) for found in (rms, layer)] == [1, 1]
    assert len(differentiate(formulas.layer_norm, shapes, kinds).backward.stages) == 2, "as jax.grad has it"
    assert [result.kind for result in layer.backward.results] == ["row", "row sum", "row sum"]


def test_a_backward_pass_saves_the_fewest_bytes():
    softmax = backward_of(formulas.softmax)
    assert [(saved.kind, saved.index) for saved in softmax.saved] == [("result", 0)]
    assert len(softmax.forward.results) == 1
    loss = backward_of(formulas.cross_entropy, X, jax.ShapeDtypeStruct((), jnp.int32), kinds=["row", "scalar"])
    assert loss.backward.stages == ()
    assert [x.kind for x in loss.backward.operands].count("row") == 1
    tanh = backward_of(jnp.tanh)
    assert [saved.kind for saved in tanh.saved] == ["result"]


def test_segments_of_a_row_are_rows():
    def normed(x):
        y = x.reshape(8, 32)
        return (y / jnp.sum(y, axis=1, keepdims=True)).reshape(-1)

    row = jax.ShapeDtypeStruct((256,), jnp.float32)
    found, segments = trace(normed, [row], ["row"])
    assert (segments, found.columns, found.operands[0].parts) == (8, 32, 1)
    problem = scheduler.rows(normed).problem(jax.ShapeDtypeStruct((4, 256), jnp.float32))
    assert (problem.rows, problem.program.columns) == (32, 32)


def test_parts_of_a_row_are_vectors():
    found, segments = trace(formulas.silu_and_mul, [jax.ShapeDtypeStruct((96,), jnp.bfloat16)], ["row"])
    assert (segments, found.columns, found.operands[0].parts) == (1, 48, 2)
    assert names(found).count("round") == 1


@pytest.mark.parametrize("number", range(3))
def test_a_program_is_its_text(number):
    of = jax.ShapeDtypeStruct((64,), jnp.bfloat16)
    found = (
        program(formulas.softmax_with_lse, of),
        program(formulas.cross_entropy, of, jax.ShapeDtypeStruct((), jnp.int32), kinds=["row", "scalar"]),
        backward_of(formulas.rms_norm, of, VECTOR, kinds=["row", "shared"]).backward,
    )[number]
    assert parse(found.text()) == found
    assert "\n" not in found.text()


def test_damaged_text_is_refused():
    text = program(jax.nn.softmax).text()
    damaged = {
        "is no row program": (text[:-1], "[]", "{}", text.replace('"columns":64', '"columns":null')),
        "one column or more": (text.replace('"columns":64', '"columns":0'), text.replace('["row",', '["tow",', 1)),
        "unknown equation": (text.replace('"exp"', '"__import__"'),),
        "not computed before": (text.replace('"sub",[0,1]', '"sub",[0,9]'),),
        "operand 3, which there is not": (text.replace('"inputs":[[0,0]]', '"inputs":[[3,0]]'),),
        "part 2, which there is not": (text.replace('"inputs":[[0,0]]', '"inputs":[[0,2]]'),),
    }
    for said, texts in damaged.items():
        for each in texts:
            assert each != text
            with pytest.raises(ValueError, match=said):
                parse(each)


CAPTURED = np.arange(64, dtype=np.float32)
UNSUPPORTED = {
    "cumsum": (lambda x: jnp.cumsum(x), "uses cumsum"),
    "sort": (lambda x: jnp.sort(x), "uses sort"),
    "top_k": (lambda x: jax.lax.top_k(x, 2)[0], "uses top_k"),
    "sum of integers": (lambda x: jnp.sum(x.astype(jnp.int32)), "reduces int32: convert to float32 first"),
    "random bits": (lambda x: x * jax.random.uniform(jax.random.key(0), x.shape), "random|threefry|uint32"),
    "captured": (lambda x: x + CAPTURED, r"captures an array of shape \(64,\): pass the array as an argument"),
    "short parts": (lambda x: jnp.sum(x.reshape(4, 4, 4), (1, 2)), "divides a row of 64 elements into vectors of 4"),
    "float64": (lambda x: jnp.asarray(x, jnp.float64) + jnp.float64(0.1), "float64"),
    "uint32": (lambda x: x.view(jnp.uint32), "uint32|bitcast"),
    "matmul": (lambda x: x @ x.reshape(64, 1), "dot_general|reshape"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_has_no_program_is_computed_by_xla_with_a_reason(name):
    function, reason = UNSUPPORTED[name]
    with jax.enable_x64(name == "float64"):
        x = jnp.linspace(-2, 3, 128, dtype=jnp.float32).reshape(2, 64)
        with pytest.raises(NoProgram, match=reason):
            trace(function, [X], ["row"])
        kernel = scheduler.rows(function)
        with pytest.raises(ValueError, match=reason):
            kernel.problem(x)
        with pytest.raises(NoCandidate, match=reason):
            kernel(x, backends="pallas")
        np.testing.assert_array_equal(kernel(x), jax.vmap(function)(x))


class Elements:
    """A reducer of the last axis."""

    def reduce(self, name, parts):
        return REDUCTIONS[name].along(parts, axis=-1, keepdims=True)

    def broadcast(self, reduced):
        return reduced


SPREADS = {
    "far from zero": 3000 + np.sin(np.arange(1024)),
    "an outlier first": np.where(np.arange(1024) == 0, 1e4, np.cos(np.arange(1024))),
    "zeros first": np.where(np.arange(1024) < 300, 0, 100 + np.cos(np.arange(1024))),
    "growing": np.linspace(-5, 1000, 1024) ** 2,
}


def one_pass(x, counts):
    """Returns the sum, and the sum of squares about the mean: 16 threads, chunks of 16 elements each, two warps."""
    both = lambda x: (jnp.sum(x), jnp.sum(jnp.square(x - jnp.mean(x))))  # noqa: E731
    joined = online(program(both, jax.ShapeDtypeStruct((1024,), "float32")))
    (stage,) = [Stage(joined, number) for number in range(len(joined.stages))]
    parts, masks = (jnp.asarray(a).reshape(4, 16, 16) for a in (x, counts))
    found = stage.init(lambda value: jnp.full((2, 8), value))
    for chunk, mask in zip(parts, masks, strict=True):
        each = zip(chunk.reshape(16, 2, 8), mask.reshape(16, 2, 8), strict=True)
        found = stage.update(found, [(lambda atom, v=v: v, None if counts.all() else m) for v, m in each])
    of_warps = stage.reduce(found, Elements())
    whole = stage.combine(tuple(a[0] for a in of_warps), tuple(a[1] for a in of_warps))
    scalars = stage.finish(whole, {})
    return [float(scalars[result.values[0]][0]) for result in joined.results]


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("masked", [False, True])
def test_a_variance_in_one_pass_loses_no_digits(spread, masked):
    x = np.asarray(SPREADS[spread], np.float32)
    counts = np.arange(1024) % 7 != 3 if masked else np.ones(1024, bool)
    right = x.astype(np.float64)[counts]
    np.testing.assert_allclose(one_pass(x, counts), [right.sum(), np.square(right - right.mean()).sum()], rtol=2e-5)


@pytest.mark.parametrize("place", [0, 5, 300, 1023])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_variance_in_one_pass_has_the_mean_of_infinite_elements(place, value):
    x = np.arange(1024, dtype=np.float32)
    x[place] = value
    np.testing.assert_equal(one_pass(x, np.ones(1024, bool)), [value, np.nan])


def test_a_variance_in_one_pass_overflows_as_the_squares_do():
    x = np.float32(1e25) * np.cos(np.arange(1024, dtype=np.float32))
    total, squares = one_pass(x, np.ones(1024, bool))
    assert np.isfinite(total)
    assert squares == np.inf
