"""Random functions of one row, and what their row programs compute otherwise than `jax.jit` of the function.

A function is a list of steps on a pool of vectors and scalars. Values are extreme: NaN, infinities, both zeros, numbers
near overflow and underflow, and integers that wrap. The function as the user wrote it, under `jax.jit` and in its own
dtypes, decides NaN, infinities, signs, integers and truth values exactly. Its error in comparison with float64 is the
tolerance of finite floats. Steps that round to integers, compare, or cast to 8 bits read only values whose every bit is
defined, that is, no sums and no transcendental functions.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import scheduler
from search_spaces.problem import as_tuple
from search_spaces.rows.builder import NoProgram
from search_spaces.rows.derivative import differentiate
from search_spaces.rows.problem import ProgramProblem, RowProblem
from search_spaces.rows.program import evaluate
from search_spaces.rows.reader import trace

ROWS = 3
FLOATS, INTEGERS = ("float32", "bfloat16", "float16"), ("int8", "uint8", "int16", "uint16", "int32")


def through(dtype: str) -> Any:
    return lambda x: x.astype(dtype).astype(x.dtype)


# Steps on floats that have the same bits however they are compiled, and others.
EXACT = {
    "neg": lambda x: -x,
    "abs": jnp.abs,
    "times 0": lambda x: x * 0.0,
    "0 minus": lambda x: 0.0 - x,
    "plus 0": lambda x: x + 0.0,
    "minus 0": lambda x: x - 0.0,
    "twice": lambda x: x * 2,
    "eighth": lambda x: x / 8,
    "third": lambda x: x / 3,
    "times -1": lambda x: x * -1.0,
    "sign": jnp.sign,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "round": jnp.round,
    "square": lambda x: x * x,
    "cube": lambda x: x**3,
    "relu": lambda x: jnp.maximum(x, 0.0),
    "clip": lambda x: jnp.clip(x, -448, 448),
    "finite": lambda x: jnp.where(jnp.isfinite(x), x, 1.0),
    "positive": lambda x: jnp.where(x > 0, x, -x),
    "none": lambda x: x - x,
    "huge": lambda x: x * 1e30,
    "tiny": lambda x: x * 1e-30,
    "bfloat16": through("bfloat16"),
    "float16": through("float16"),
    "float8_e4m3fn": through("float8_e4m3fn"),
    "float8_e5m2": through("float8_e5m2"),
    "int8": through("int8"),
    "uint8": through("uint8"),
    "int16": through("int16"),
    "int32": through("int32"),
    "bool": through("bool"),
    "precision": lambda x: lax.reduce_precision(x, 5, 10),
    "at least 1": lambda x: (x >= 1).astype(x.dtype),
    "max -inf": lambda x: jnp.maximum(x, -jnp.inf),
    "half": lambda x: jnp.where(jnp.arange(x.shape[-1]) % 2 == 0, x, -x) if x.ndim else x,
}
ROUGH = {
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "log": jnp.log,
    "sqrt": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "logistic": jax.nn.sigmoid,
    "expm1": jnp.expm1,
    "log1p": jnp.log1p,
    "fourth": lambda x: x**4,
    "inverse square": lambda x: x**-2,
}
JOINED = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "max": jnp.maximum,
    "min": jnp.minimum,
}
REDUCED = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "norm": lambda x: jnp.max(jnp.abs(x)) * jnp.sqrt(jnp.sum((x / jnp.max(jnp.abs(x))) ** 2)),
    "logsumexp": jax.nn.logsumexp,
    "centred": lambda x: jnp.sum(x - jnp.mean(x)),
    "variance": jnp.var,
    "weighted": lambda x: jnp.sum(x * jnp.max(x)),
    "scaled": lambda x: jnp.mean((x / 1e20) * (x / 1e20)),
    "negative": lambda x: jnp.sum(-x),
    "zeros": lambda x: jnp.sum(x * 0.0),
    "exponentials": lambda x: jnp.sum(jnp.exp(x - jnp.max(x))),
}
EXTREME = {
    "max": jnp.max,
    "min": jnp.min,
    "largest": lambda x: jnp.max(jnp.abs(x)),
    "argmax": lambda x: jnp.argmax(x).astype(x.dtype),
}
INTEGER = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "xor": jnp.bitwise_xor,
    "left": lax.shift_left,
    "right": lax.shift_right_arithmetic,
    "logical": lax.shift_right_logical,
    "div": lambda x, y: lax.div(x, y | 1),  # XLA makes 1 of x / x, and another number of 0 / 0
    "rem": lambda x, y: lax.rem(x, y | 1),
    "where": lambda x, y: jnp.where(x > y, x - y, y),
    "neg": lambda x, _: -x,
    "cube": lambda x, _: x**3,
    "clip": lambda x, _: jnp.clip(x, 3, 77),
}


@dataclasses.dataclass(frozen=True)
class RandomRow:
    """A random function of two rows, a vector that rows share, and an element per row.

    Attributes:
      dtype: of the operands.
      columns: elements of a row.
      steps: each a table, a name, and the places in the pool of what it reads.
      results: places of the results, and their dtype; "" for that of the pool.
      seed: of the operands.
    """

    dtype: str
    columns: int
    steps: tuple[tuple[str, str, tuple[int, ...]], ...]
    results: tuple[tuple[int, str], ...]
    seed: int

    def __call__(self, x: Any, y: Any, weight: Any, scalar: Any) -> list[Any]:
        """Computes in float32, or in float64 if operands are; integers are of the operands' dtype."""
        floating = self.dtype in FLOATS
        pool = [x, y, weight, scalar]
        if floating and x.dtype != jnp.float64:
            pool = [a.astype(jnp.float32) for a in pool]
        for table, name, places in self.steps:
            args = [pool[place] for place in places]
            if table == "cast":
                pool.append(args[0].astype(name))
            elif table == "float":
                pool.append(args[0].astype(jnp.promote_types(jnp.float32, x.dtype) if floating else jnp.float32))
            else:
                pool.append(TABLES[table][name](*args))
        return [
            pool[place].astype(dtype) if dtype and pool[place].dtype != jnp.float64 else pool[place]
            for place, dtype in self.results
        ]

    def operands(self) -> list[Any]:
        draw = np.random.default_rng(self.seed)
        shapes = (ROWS, self.columns), (ROWS, self.columns), (self.columns,), (ROWS,)
        if self.dtype in INTEGERS:
            info = jnp.iinfo(self.dtype)
            edges = np.array([info.min, info.max, 0, 1, info.max - 1, 7], np.int64)
            made = [
                np.where(draw.random(s) < 0.5, draw.choice(edges, s), draw.integers(info.min, info.max, s))
                for s in shapes
            ]
            return [jnp.asarray(x.astype(self.dtype)) for x in made]
        special = np.array(
            [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 8e37, 2e-38, 65504, 449]
        )  # XLA flushes 1 / x of larger x
        scale = draw.choice([1.0, 1.0, 1e20, 1e-20, 1e30, 300.0])
        rate = draw.choice([0.0, 0.1, 0.5])
        made = [np.where(draw.random(s) < rate, draw.choice(special, s), scale * draw.normal(size=s)) for s in shapes]
        with np.errstate(over="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [jnp.asarray(x.astype(np.float32)).astype(self.dtype) for x in made]


TABLES: dict[str, Any] = {
    "exact": EXACT,
    "rough": ROUGH,
    "joined": JOINED,
    "reduced": REDUCED,
    "extreme": EXTREME,
    "integer": INTEGER,
}


def drawn(seed: int) -> RandomRow:
    """Returns the random function of this seed."""
    draw = random.Random(seed)
    dtype = draw.choice(("float32", "float32", "float32", *FLOATS, *INTEGERS))
    # For each value of the pool: whether it is a vector, whether all of its bits are defined, and its integer dtype.
    of_integers = dtype if dtype in INTEGERS else ""
    pool = [(True, True, of_integers)] * 3 + [(False, True, of_integers)]
    steps: list[tuple[str, str, tuple[int, ...]]] = []

    def some(fits: Any, count: int = 1) -> tuple[int, ...]:
        found = [place for place, value in enumerate(pool) if fits(*value)]
        return tuple(draw.choice([*found, *found[-3:]]) for _ in range(count)) if found else ()

    for _ in range(draw.randint(3, 12)):
        table = draw.choice(
            (
                "exact",
                "exact",
                "rough",
                "joined",
                "joined",
                "reduced",
                "reduced",
                "extreme",
                "integer",
                "integer",
                "cast",
                "float",
            )
        )
        floats = lambda _, __, integers: not integers  # noqa: E731
        match table:
            case "exact":
                places = some(lambda _, exact, integers: exact and not integers)
            case "rough":
                places = some(floats)
            case "joined":
                places = some(floats, 2)
            case "reduced":  # XLA may compute a power twice, which an exponential of the difference magnifies
                name = draw.choice(sorted(REDUCED))
                magnifies = name in ("logsumexp", "exponentials")
                places = some(lambda vector, exact, integers, m=magnifies: vector and not integers and (exact or not m))
            case "extreme":
                places = some(lambda vector, exact, integers: vector and exact and not integers)
            case "integer":
                places = some(lambda *value: bool(value[2]))
                same = pool[places[0]][2] if places else ""
                places += some(lambda *value, same=same: bool(same) and value[2] == same)
            case _:
                places = some(lambda *value: bool(value[2]))
        if not places:
            continue
        if table != "reduced":
            name = draw.choice(INTEGERS) if table == "cast" else draw.choice(sorted(TABLES.get(table, ("float",))))
        # XLA makes a / (b * c) of (a / b) / c, and a * c / b of a / (b / c), which may overflow.
        if name == "div" and table == "joined" and any(p > 3 and steps[p - 4][1] == "div" for p in places):
            continue
        steps.append((table, name, places))
        vector = table not in ("reduced", "extreme") and any(pool[place][0] for place in places)
        exact = table not in ("rough", "reduced") and all(pool[place][1] for place in places)
        # XLA makes a product with the reciprocal of x / scalar, and a quotient of such a product, as it fuses them.
        exact = exact and (table, name, pool[places[-1]][0]) != ("joined", "div", False)
        pool.append((vector, exact, name if table == "cast" else pool[places[0]][2] if table == "integer" else ""))
    found = range(min(max(4, len(pool) - 6), len(pool) - 1), len(pool))
    results = [(place, "" if pool[place][2] else draw.choice(("", "bfloat16", "float16"))) for place in found]
    return RandomRow(dtype, draw.choice((1, 2, 8, 40)), tuple(steps), tuple(results), seed)


def over_rows(one: RandomRow) -> Any:
    return jax.vmap(one, in_axes=(0, 0, None, 0))


def wrong(seeds: Sequence[int], kernels: bool = False) -> Iterator[tuple[int, str | None]]:
    """Yields what is wrong with the row program of each seed; None if nothing is.

    Args:
      kernels: compute the programs by interpreted kernels, else by XLA.
    """
    rows = [drawn(seed) for seed in seeds]
    args = [one.operands() for one in rows]
    kinds = ["row", "row", "shared", "scalar"]
    programs: list[Any] = []
    for one, arrays in zip(rows, args, strict=True):
        try:
            programs.append(trace(lambda *a, one=one: one(*a), _shapes(arrays, kinds), kinds)[0])
        except NoProgram as error:
            programs.append(str(error))

    def computed(args: Any) -> Any:
        return [
            [] if isinstance(p, str) else _of_program(p, one, a) for p, one, a in zip(programs, rows, args, strict=True)
        ]

    def user(args: Any) -> Any:
        return [over_rows(one)(*a) for one, a in zip(rows, args, strict=True)]

    plain = jax.jit(user)(args)
    if kernels:
        found = [
            [] if isinstance(p, str) else _by_kernel(one, a) for p, one, a in zip(programs, rows, args, strict=True)
        ]
    else:
        found = jax.jit(computed)(args)
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = [
            over_rows(one)(*([np.asarray(x, np.float64) for x in a] if one.dtype in FLOATS else map(np.asarray, a)))
            for one, a in zip(rows, args, strict=True)
        ]
    for one, program, *results in zip(rows, programs, found, plain, wide, strict=True):
        if isinstance(program, str):
            yield one.seed, None
        else:
            reasons = filter(None, (differs(*each, one.dtype in FLOATS[1:]) for each in zip(*results, strict=True)))
            yield one.seed, next((f"{reason}: {one}" for reason in reasons), None)


def _of_program(program: Any, one: RandomRow, arrays: Any) -> Any:
    shapes = [x.shape for x in jax.eval_shape(over_rows(one), *arrays)]
    problem = ProgramProblem(rows=ROWS, text=program.text())
    # Not `problem.by_xla`, which computes the user's function where it is known.
    found = zip(as_tuple(RowProblem.by_xla(problem, *arrays)), problem.results(), shapes, strict=True)
    return [x.astype(of.dtype).reshape(shape) for x, of, shape in found]


def _by_kernel(one: RandomRow, arrays: Any) -> Any:
    def function(x: Any, y: Any, weight: Any, scalar: Any) -> Any:
        return one(x, y, weight, scalar)

    return scheduler.rows(function, scalars=("scalar",))(*arrays, backends="interpret")


def differs(found: Any, plain: Any, wide: Any, narrow: bool = False) -> str | None:
    if found.dtype != plain.dtype or found.shape != plain.shape:
        return f"{found.dtype}{found.shape} instead of {plain.dtype}{plain.shape}"
    got, right, exact = (np.asarray(x).astype(np.float64) for x in (found, plain, wide))
    if not jnp.issubdtype(plain.dtype, jnp.floating):
        return None if np.array_equal(got, right) else f"{got.tolist()} instead of {right.tolist()}"
    finite = np.isfinite(right) & np.isfinite(got)
    least, eps = float(np.finfo(np.float32).tiny), float(jnp.finfo(plain.dtype).eps)
    with np.errstate(all="ignore"):
        # Sums that cancel have the error of their largest terms: that of the row counts.
        error = np.where(finite & np.isfinite(exact), np.abs(right - exact), 0.0)
        allowed = 8 * error.max(initial=0.0, axis=-1, keepdims=True) + (2 * eps + 2.0**-17) * np.abs(right) + 2 * least
        same = np.where(finite, np.abs(got - right) <= allowed, np.array_equal(got, right) | (got == right))
        same |= np.isnan(got) & np.isnan(right)
        # Arithmetic on 16 bits may stay in float32. XLA makes x of x + 0, and either zero of a maximum of 0 and -0.
        same |= narrow & np.isfinite(got) & (np.abs(got - exact) <= (2 * eps + 2.0**-17) * np.abs(exact) + 2 * least)
        signs = np.signbit(right), np.signbit(exact)
        signed = (
            (got != 0) | (right != 0) | (np.signbit(got) == signs[0]) | ((np.signbit(got) == signs[1]) & (exact == 0))
        )
    if (same & signed).all():
        return None
    place = tuple(int(i) for i in np.argwhere(~(same & signed))[0])
    return f"{got[place]} instead of {right[place]} ({exact[place]} in float64) at {place}"


def gradients_of(derivative: Any, *arrays: Any) -> list[Any]:
    """Returns the gradient of each moved operand at these arrays, for cotangents of ones."""
    results = evaluate(derivative.forward, *arrays)
    saved = [(arrays if x.kind == "operand" else results)[x.index] for x in derivative.saved]
    found = evaluate(derivative.backward, *saved, *(jnp.ones_like(results[i]) for i in derivative.moving))
    return [found[place] for _, place in derivative.moved]


def wrong_gradients(seed: int) -> str | None:
    """Returns what is wrong with the gradients of the first seed from here on that has floats."""
    one = next(one for one in map(drawn, range(seed, seed + 100)) if one.dtype in FLOATS)
    args, kinds = one.operands(), ["row", "row", "shared", "scalar"]

    def gradients(*args: Any) -> Any:
        def floats(*args: Any) -> Any:
            return [x for x in over_rows(one)(*args) if jnp.issubdtype(x.dtype, jnp.floating)]

        results, back = jax.vjp(floats, *args)
        return back([jnp.ones_like(x) for x in results])

    derivative = differentiate(lambda *row: one(*row), _shapes(args, kinds), kinds)
    found, plain = jax.jit(functools.partial(gradients_of, derivative))(*args), jax.jit(gradients)(*args)
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = gradients(*(jnp.asarray(np.asarray(x, np.float64)) for x in args))
    for got, right, exact, kind in zip(found, plain, wide, kinds, strict=True):
        # Rows are summed last. JAX sums them before a step of the shared vector alone: before it multiplies 0 by an
        # infinite derivative, and before it rounds.
        rounds = any("float" in name or name == "precision" for table, name, _ in one.steps if table == "exact")
        if kind == "shared" and (rounds or not np.isfinite(np.asarray(right, np.float32)).all()):
            continue
        if (reason := differs(got.astype(right.dtype), right, exact)) is not None:
            return f"gradient: {reason}: {one}"
    return None


def _shapes(arrays: Sequence[Any], kinds: Sequence[str]) -> list[jax.ShapeDtypeStruct]:
    """Returns the arrays of one row."""
    pairs = zip(arrays, kinds, strict=True)
    return [jax.ShapeDtypeStruct(x.shape[kind in ("row", "scalar") :], x.dtype) for x, kind in pairs]


def in_batches(seed: int, count: int, kernels: bool = False, size: int = 20) -> Iterator[tuple[int, str | None]]:
    """Yields what is wrong with each of `count` seeds, compiled `size` at a time."""
    for first in range(seed, seed + count, size):
        yield from wrong(range(first, min(first + size, seed + count)), kernels)
