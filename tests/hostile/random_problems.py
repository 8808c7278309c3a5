"""Random problems of every operation by every backend that a CPU has, against float64.

Eager, jitted, vmapped, differentiated, with 64-bit types allowed; rows of minus infinity, NaN, and arrays of no size.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import formulas
import jax
import jax.numpy as jnp
import numpy as np
import random_rows
from attack import Tried, seeded
from random_calls import Call, a_flash_attention_backward, drawn

from scheduler import tuned
from scheduler.core.hardware import CPU
from search_spaces import load
from search_spaces.operation import BoundCall
from search_spaces.problem import Tolerance, as_tuple

WAYS = ("eager", "jit", "schedule", "schedule", "schedule", "vmap", "gradient", "x64")


def tries(maker: Callable[..., Call], seed: int, count: int) -> Tried:
    tried = Tried()
    for number, draw in seeded(seed, count):
        if number % 50 == 49:
            jax.clear_caches()
        way = draw.choice(WAYS)
        values = draw.choice(("normal", "normal", "hostile", "empty" if way in ("eager", "jit") else "normal"))
        backward = maker is a_flash_attention_backward
        if way == "gradient" or backward:
            way, values = ("schedule" if way in ("gradient", "x64") and backward else way), "normal"
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            call = maker(draw, values)
            tried.run(f"{call.operation} {number}, {way}, {values}", functools.partial(wrong, call, way, draw))
    return tried


def row_gradients(seed: int, count: int) -> Tried:
    tried = Tried()
    for number in range(seed, seed + count):
        tried.run(str(number), functools.partial(random_rows.wrong_gradients, number))
    return tried


def row_programs(kernels: bool, seed: int, count: int) -> Tried:
    tried = Tried()
    for number, reason in random_rows.in_batches(seed, count, kernels):
        tried.expect(reason is None, f"{number}: {reason}")
        if number % 500 == 499:
            jax.clear_caches()
    return tried


def wrong(call: Call, way: str, draw: random.Random) -> str | None:
    """What is wrong with the answer to a call that is made this way; None where it is right."""
    match way:
        case "vmap":
            return _wrong_mapped(call, draw)
        case "gradient":
            return _wrong_gradient(call, draw)
        case "x64":
            with jax.enable_x64(True):
                return _wrong_wide(call, draw)
    f = functools.partial(tuned(load(call.operation)), **call.options)
    arrays, named = call.made(call.dtypes), _named(call)
    bound = load(call.operation).bind(*arrays, **named, **call.options)
    if not isinstance(bound, BoundCall):
        actual = as_tuple((jax.jit(f) if way == "jit" else f)(*arrays, **named))
        return _differs(actual, _right(call), [_loose(x.dtype) for x in actual])
    operation, problem = load(call.operation), bound.problem
    kernels = [k for k in operation.kernels if k.supports(problem, CPU.target) is None]
    kernel, how = operation.library, {}
    point = kernel.space(problem, CPU.target).decode({})
    if way == "schedule":
        kernel = draw.choice(kernels)
        points, _ = kernel.space(problem, CPU.target).legal()
        fields = points.row(draw.randrange(len(points)))
        point, how = kernel.space(problem, CPU.target).decode(fields), {"schedule": fields, "backends": kernel.backend}
    made = functools.partial(f, **how, **named)
    actual = as_tuple((jax.jit(made) if way == "jit" else made)(*arrays))
    reason = _differs(actual, _right(call), _allowed(kernel, problem, point))
    return reason and f"{kernel.backend} {point}: {problem}: {reason}"


def _allowed(kernel: Any, problem: Any, point: Any) -> Any:
    within = kernel.tolerance(problem, point)
    # A product as users write it rounds at each step: a search verifies it like any other, and drops it where it is
    # off by more than others; whoever asks for it gets it.
    if kernel.library and point.program == "plain" and isinstance(within, Tolerance):
        rounded = 4 * float(jnp.finfo(problem.operands()[0].dtype).eps)
        return Tolerance(8 * within.absolute + rounded, 8 * within.relative)
    return within


def _named(call: Call) -> dict[str, Any]:
    return {n: jnp.asarray(x, None if x.dtype == np.int32 else call.dtypes[0]) for n, x in call.named.items()}


def _right(call: Call) -> tuple[Any, ...]:
    return as_tuple(call.right(np, *call.arrays, **call.named))


def _loose(dtype: Any) -> Tolerance:
    """Of what is no problem, so that nobody says how far off it may be."""
    eps = float(jnp.finfo(dtype).eps)
    return Tolerance(absolute=64 * eps, relative=64 * eps)


def _differs(actual: Sequence[jax.Array], right: Sequence[Any], allowed: Any) -> str | None:
    within = allowed if isinstance(allowed, tuple | list) else (allowed,) * len(right)
    for got, wanted, tolerance in zip(actual, right, within, strict=True):
        if got.shape != wanted.shape:
            return f"the shape is {got.shape} instead of {wanted.shape}"
        got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
        if not np.array_equal(np.isnan(got), np.isnan(wanted)):
            return f"{np.isnan(got).sum()} of {got.size} elements are NaN, and {np.isnan(wanted).sum()} should be"
        off = np.abs(got - wanted) - tolerance.absolute - tolerance.relative * np.abs(wanted)
        off = np.where(np.isnan(wanted) | (got == wanted), -1.0, off)
        if got.size and not off.max() <= 0:
            return f"{got.flat[off.argmax()]} instead of {wanted.flat[off.argmax()]}, {(off > 0).sum()} elements"
    return None


def _backends(call: Call, draw: random.Random) -> dict[str, Any]:
    return draw.choice(({}, {"backends": "interpret"}, {"backends": "xla"}))


def _wrong_mapped(call: Call, draw: random.Random) -> str | None:
    """Two problems in one call: as drawn, and with its sequences in reverse, or its numbers halved."""
    whole = call.operation.startswith("flash")  # arrays, lengths among them, belong together
    over = tuple(0 if whole or can else None for can in call.batched)
    second = [x[::-1] if whole else x / 2 if axis == 0 else x for x, axis in zip(call.arrays, over, strict=True)]
    lengths = {name: np.stack([x, x[::-1]]) if whole else x for name, x in call.named.items()}
    names = list(lengths)
    f = tuned(load(call.operation))
    how = _backends(call, draw)

    def one(*args: Any) -> Any:
        arrays, named = args[: len(over)], dict(zip(names, args[len(over) :], strict=True))
        return f(*arrays, **named, **call.options, **how)

    arrays = [
        jnp.asarray(np.stack([x, y]) if axis == 0 else x, dtype)
        for x, y, axis, dtype in zip(call.arrays, second, over, call.dtypes, strict=True)
    ]
    named = [jnp.asarray(x, None if x.dtype == np.int32 else call.dtypes[0]) for x in lengths.values()]
    actual = as_tuple(jax.vmap(one, in_axes=(*over, *[0 if whole else None] * len(names)))(*arrays, *named))
    first = _right(call)
    other = [x[::-1] for x in first] if whole else as_tuple(call.right(np, *second, **call.named))
    bound = load(call.operation).bind(*call.made(call.dtypes), **_named(call), **call.options)
    allowed = bound.problem.tolerance() if isinstance(bound, BoundCall) else [_loose(x.dtype) for x in actual]
    return _differs(actual, [np.stack(pair) for pair in zip(first, other, strict=True)], allowed)


def _wrong_gradient(call: Call, draw: random.Random) -> str | None:
    """Of a weighted sum of the results, in the arrays."""
    f, how = tuned(load(call.operation)), _backends(call, draw)
    weights = [drawn(draw, np.shape(x), "float32") for x in _right(call)]
    weights = [np.where(np.isfinite(x), w, 0.0) for w, x in zip(weights, _right(call), strict=True)]

    def loss(run: Callable[..., Any], weights: Sequence[Any]) -> Callable[..., Any]:
        def sum_of(*arrays: Any, **named: Any) -> Any:
            results = as_tuple(run(*arrays, **named))
            zeros = [jnp.where(w == 0, 0.0, x.astype(w.dtype)) for x, w in zip(results, weights, strict=True)]
            return sum(jnp.sum(x * w) for x, w in zip(zeros, weights, strict=True))

        return sum_of

    places = tuple(place for place, dtype in enumerate(call.dtypes) if not dtype.startswith("int"))
    given = loss(functools.partial(f, **call.options, **how), [jnp.asarray(w, "float32") for w in weights])
    actual = jax.grad(given, places)(*call.made(call.dtypes), **_named(call))
    if call.operation == "flash_attention":
        right = _attention_gradients(call, weights)
    else:
        with jax.enable_x64(True):
            own = loss(functools.partial(call.right, jnp), [jnp.asarray(w) for w in weights])
            named = {name: jnp.asarray(x) for name, x in call.named.items()}
            right = [np.asarray(x) for x in jax.grad(own, places)(*map(jnp.asarray, call.arrays), **named)]
    allowed = []
    for got, wanted in zip(actual, right, strict=True):
        size, eps = (
            float(np.abs(wanted).max(initial=0.0)),
            max(float(jnp.finfo(call.dtypes[place]).eps) for place in places),
        )
        allowed.append(Tolerance(absolute=16 * eps * (1 + size), relative=16 * float(jnp.finfo(got.dtype).eps)))
    reason = _differs(actual, right, allowed)
    return reason and f"{how}: {reason}"


def _attention_gradients(call: Call, weights: Sequence[Any]) -> tuple[Any, ...]:
    q, k, v = call.arrays
    options = call.options
    window = options.get("window", (None, None))
    visible = formulas.seen(q.shape[1], k.shape[1], causal=options["causal"], window=window, **call.named)
    scale = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    d_lse = weights[1] if options["return_lse"] else None
    return formulas.attention_gradients(
        q, k, v, visible, weights[0], d_lse, scale=scale, softcap=options["softcap"]
    )  # fmt: skip


def _wrong_wide(call: Call, draw: random.Random) -> str | None:
    """Where 64-bit types are allowed: float64 arrays keep their precision, and narrow ones are what they were."""
    wide = draw.random() < 0.5
    dtypes = ["float64" if wide and not dtype.startswith("int") else dtype for dtype in call.dtypes]
    named = {
        name: jnp.asarray(x, x.dtype if x.dtype == np.int32 else "float64" if wide else call.dtypes[0])
        for name, x in call.named.items()
    }
    options = {name: x for name, x in call.options.items() if name != "precision"}
    arrays = call.made(dtypes)
    actual = as_tuple(tuned(load(call.operation))(*arrays, **named, **options))
    bound = load(call.operation).bind(*arrays, **named, **options)
    allowed = bound.problem.tolerance() if isinstance(bound, BoundCall) else [_loose(x.dtype) for x in actual]
    return _differs(actual, _right(call), allowed)
