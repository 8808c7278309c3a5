"""Random calls of every operation, with what each must come to."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import formulas
import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one operation, and what it must come to.

    Attributes:
      arrays: by place; numbers of a narrow dtype, as float64.
      dtypes: of the arrays.
      named: further arrays, by name.
      options: what is no array.
      right: the results in float64, from the arrays and those by name: ``right(xp, *arrays, **named)``.
      batched: which of the arrays a vmap may map over.
    """

    operation: str
    arrays: tuple[Any, ...]
    dtypes: tuple[str, ...]
    options: dict[str, Any]
    right: Callable[..., Any]
    named: dict[str, Any] = dataclasses.field(default_factory=dict)
    batched: tuple[bool, ...] = ()

    def made(self, dtypes: Sequence[str]) -> list[jax.Array]:
        return [jnp.asarray(np.asarray(x), dtype) for x, dtype in zip(self.arrays, dtypes, strict=True)]


def extents(draw: random.Random, count: int, most: int, values: str) -> list[int]:
    """Small, and mostly no multiple of anything; of an empty array one is 0."""
    found = [draw.choice((1, 2, 3, 8, 16, draw.randint(1, most), draw.randint(1, most))) for _ in range(count)]
    if values == "empty":
        found[draw.randrange(count)] = 0
    return found


def drawn(draw: random.Random, shape: Sequence[int], dtype: str, values: str = "normal") -> Any:
    """Standard normal numbers that `dtype` holds; hostile ones have rows of minus infinity, infinities, or NaN."""
    numbers = np.random.default_rng(draw.randrange(2**32)).standard_normal(tuple(shape))
    if values == "hostile" and numbers.size:
        rows = numbers.reshape(-1, numbers.shape[-1])
        match draw.choice(("a row", "half a row", "nan", "inf")):
            case "a row":
                rows[draw.randrange(len(rows))] = -np.inf
            case "half a row":
                rows[draw.randrange(len(rows)), : rows.shape[1] // 2] = -np.inf
            case "nan":
                rows[draw.randrange(len(rows)), draw.randrange(rows.shape[1])] = np.nan
            case "inf":
                rows[draw.randrange(len(rows)), draw.randrange(rows.shape[1])] = np.inf
    return np.asarray(jnp.asarray(numbers, dtype), np.float64)


def a_matmul(draw: random.Random, values: str) -> Call:
    (m, n, k), dtype = extents(draw, 3, 70, values), draw.choice(FLOATS)
    transpose_a, transpose_b = draw.random() < 0.3, draw.random() < 0.3
    lead = (draw.randint(2, 3),) if draw.random() < 0.2 else ()
    fused = not lead and draw.random() < 0.4
    a = drawn(draw, (*lead, *((k, m) if transpose_a else (m, k))), dtype, values)
    b = drawn(draw, (*lead, *((n, k) if transpose_b else (k, n))), dtype)
    if fused:
        a = np.asarray(jnp.asarray(a * max(k, 1) ** -0.5, dtype), np.float64)
    named = {}
    if fused and draw.random() < 0.7:
        named["bias"] = drawn(draw, (n,), dtype)
    if fused and draw.random() < 0.5:
        named["residual"] = drawn(draw, (m, n), dtype)
    options: dict[str, Any] = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    if fused:
        options["activation"] = draw.choice((None, "relu", "gelu", "silu"))
    if n > 1 and "residual" not in named and draw.random() < 0.3:
        first = draw.randint(1, n - 1)
        options["split_sizes"] = (first, n - first)
    right = functools.partial(formulas.matmul, **options)
    if dtype == "float32":
        options["precision"] = draw.choice((None, "highest"))
    return Call("matmul", (a, b), (dtype, dtype), options, right, named, (True, draw.random() < 0.5))


def a_ragged_dot(draw: random.Random, values: str) -> Call:
    """Groups of any sizes, some of them empty; rows may be left over."""
    (rows, n, k), dtype, groups = extents(draw, 3, 60, values), draw.choice(FLOATS), draw.randint(1, 6)
    edges = sorted(draw.randint(0, rows) for _ in range(groups))
    sizes = np.diff([0, *edges]).astype(np.int32)
    transpose_rhs = draw.random() < 0.5
    rhs = drawn(draw, (groups, *((n, k) if transpose_rhs else (k, n))), dtype)
    options = {"transpose_rhs": transpose_rhs}
    right = functools.partial(formulas.ragged_dot, **options)
    arrays = drawn(draw, (rows, k), dtype, values), rhs, sizes
    return Call("ragged_dot", arrays, (dtype, dtype, "int32"), options, right, {}, (True, draw.random() < 0.5, False))


def some_rows(draw: random.Random, values: str) -> tuple[int, ...]:
    return tuple(extents(draw, draw.choice((1, 1, 2)), 12, values))


def a_softmax(draw: random.Random, values: str) -> Call:
    dtype, (columns,) = draw.choice(FLOATS), extents(draw, 1, 300, "normal")
    x = drawn(draw, (*some_rows(draw, values), columns), dtype, values)
    return Call("softmax", (x,), (dtype,), {}, formulas.softmax, {}, (True,))


def a_softmax_with_lse(draw: random.Random, values: str) -> Call:
    made = a_softmax(draw, values)
    right = lambda xp, x: (formulas.softmax(xp, x), formulas.log_sum_exp(xp, x))  # noqa: E731
    return dataclasses.replace(made, operation="softmax_with_lse", right=right)


def a_rms_norm(draw: random.Random, values: str) -> Call:
    dtype, (columns,) = draw.choice(FLOATS), extents(draw, 1, 300, "normal")
    wide = draw.choice((dtype, "float32"))
    x = drawn(draw, (*some_rows(draw, values), columns), dtype, values)
    options = {"eps": draw.choice((1e-6, 1e-5, 1.0))}
    right = functools.partial(formulas.rms_norm, **options)
    return Call("rms_norm", (x, drawn(draw, (columns,), wide)), (dtype, wide), options, right, {}, (True, False))


def an_add_rms_norm(draw: random.Random, values: str) -> Call:
    alone = a_rms_norm(draw, values)
    (x, weight), (dtype, wide) = alone.arrays, alone.dtypes
    right = functools.partial(formulas.add_rms_norm, **alone.options)
    arrays = (x, drawn(draw, x.shape, dtype), weight)
    return Call("add_rms_norm", arrays, (dtype, dtype, wide), alone.options, right, {}, (True, True, False))


def a_silu_and_mul(draw: random.Random, values: str) -> Call:
    dtype, (columns,) = draw.choice(FLOATS), extents(draw, 1, 150, "normal")
    x = drawn(draw, (*some_rows(draw, values), 2 * columns), dtype, values)
    return Call("silu_and_mul", (x,), (dtype,), {}, formulas.silu_and_mul, {}, (True,))


def _attention(draw: random.Random, values: str) -> tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]:
    """What no shape tells, the lengths, and (batch, q_len, kv_len, heads, kv_heads, head_dim, head_dim_v)."""
    batch, kv_heads, group = draw.randint(1, 2), draw.randint(1, 2), draw.choice((1, 2, 3))
    q_len, kv_len = draw.choice((1, draw.randint(1, 50))), draw.randint(1, 50)
    head_dim = draw.choice((8, 16, draw.randint(1, 40)))
    head_dim_v = head_dim if draw.random() < 0.7 else draw.randint(1, 40)
    how: dict[str, Any] = {"causal": draw.random() < 0.4}
    if draw.random() < 0.4:
        how["window"] = draw.choice((None, draw.randint(0, 12))), draw.choice((None, draw.randint(0, 12)))
    if values == "empty":
        q_len, kv_len = draw.choice(((0, kv_len), (q_len, 0)))
    lengths = {}
    for name, most in (("q_lengths", q_len), ("kv_lengths", kv_len)):
        if draw.random() < 0.3:
            lengths[name] = np.array([draw.randint(0, most) for _ in range(batch)], np.int32)
    return how, lengths, (batch, q_len, kv_len, group * kv_heads, kv_heads, head_dim, head_dim_v)


def a_flash_attention(draw: random.Random, values: str) -> Call:
    how, lengths, (batch, q_len, kv_len, heads, kv_heads, head_dim, head_dim_v) = _attention(draw, values)
    dtype = draw.choice(FLOATS)
    q = drawn(draw, (batch, q_len, heads, head_dim), dtype)
    k, v = (drawn(draw, (batch, kv_len, kv_heads, d), dtype) for d in (head_dim, head_dim_v))
    if values == "hostile":
        q[draw.randrange(batch), draw.randrange(q_len)] = np.nan
    extra: dict[str, Any] = {"return_lse": draw.random() < 0.4, "softcap": draw.choice((None, None, 5.0))}
    scale = draw.choice((None, 0.3))

    def right(xp: Any, q: Any, k: Any, v: Any, **lengths: Any) -> Any:
        visible = formulas.seen(q.shape[1], k.shape[1], **how, **lengths)
        s = q.shape[-1] ** -0.5 if scale is None else scale
        found = formulas.attention(q, k, v, visible, scale=s, softcap=extra["softcap"])
        return (found["out"], found["lse"]) if extra["return_lse"] else found["out"]

    options = how | extra | {"scale": scale}
    return Call("flash_attention", (q, k, v), (dtype,) * 3, options, right, lengths, (True, True, True))


def a_flash_attention_backward(draw: random.Random, values: str) -> Call:
    how, lengths, (batch, q_len, kv_len, heads, kv_heads, head_dim, head_dim_v) = _attention(draw, values)
    dtype, lse_too = draw.choice(FLOATS), draw.random() < 0.4
    q, d_out = (drawn(draw, (batch, q_len, heads, d), dtype) for d in (head_dim, head_dim_v))
    k, v = (drawn(draw, (batch, kv_len, kv_heads, d), dtype) for d in (head_dim, head_dim_v))
    d_lse = drawn(draw, (batch, heads, q_len), "float32") if lse_too else None
    scale = head_dim**-0.5  # a cap is tried by the gradients of the forward pass, which alone can ask for one
    visible = formulas.seen(q_len, kv_len, **how, **lengths)
    if d_lse is not None:  # of a query that sees nothing it means nothing
        d_lse = np.where(np.broadcast_to(visible.any(-1), (batch, q_len))[:, None], d_lse, 0.0)
    then = formulas.attention(q, k, v, visible, scale=scale, softcap=None)
    left, right_bound = how.pop("window", (None, None))
    fields = how | {
        "window_left": -1 if left is None else left,
        "window_right": -1 if right_bound is None else right_bound,
    }
    fields |= {"lse_cotangent": lse_too} | dict.fromkeys(lengths, True)
    arrays = [q, k, v, np.asarray(jnp.asarray(then["out"], dtype), np.float64), then["lse"], d_out]
    dtypes = [dtype] * 4 + ["float32", dtype]
    if d_lse is not None:
        arrays.append(d_lse)
        dtypes.append("float32")
    count = len(arrays)
    arrays += lengths.values()

    def right(xp: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return formulas.attention_gradients(q, k, v, visible, d_out, d_lse, scale=scale, softcap=None)

    options = fields | {"scale": scale}
    return Call(
        "flash_attention_backward", tuple(arrays), (*dtypes, *["int32"] * len(lengths)), options, right, {},
        (True,) * count + (True,) * len(lengths),
    )  # fmt: skip


MAKERS = (
    a_matmul,
    a_ragged_dot,
    a_softmax,
    a_softmax_with_lse,
    a_rms_norm,
    an_add_rms_norm,
    a_silu_and_mul,
    a_flash_attention,
    a_flash_attention_backward,
)
