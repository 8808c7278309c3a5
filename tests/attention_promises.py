"""What attention promises of NaN, empty rows and lengths: operands for each situation, and the right answer in float64.

A masked key is left out of the oracle, as though it were not there; so is a query that sees none.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from search_spaces.attention.problem import AttentionProblem
from search_spaces.flash_attention import FlashAttentionProblem
from search_spaces.flash_attention_backward import FlashAttentionBackwardProblem

BAD = (np.nan, np.inf, -np.inf)
SOFTCAP = 5.0


class Sequence(NamedTuple):
    """One of a batch.

    Attributes:
      queries, keys: its lengths, as parts of all; None is full length.
      padding: what queries that see no key, and keys that no query sees, hold.
      poisoned: whether a value that some query sees is NaN.
    """

    queries: float | None = None
    keys: float | None = None
    padding: str = "bad"
    poisoned: str = ""


# (a) to (f) of docs/use/calls.md, in one launch.
SEQUENCES = {
    "whole": Sequence(),
    "no keys": Sequence(keys=0.0),
    "few keys": Sequence(keys=0.3),
    "some keys": Sequence(keys=0.85),
    "some queries and keys": Sequence(queries=0.6, keys=0.5),
    "no queries": Sequence(queries=0.0),
    "neither": Sequence(queries=-0.1, keys=-1.0),
    "lengths beyond the array": Sequence(queries=1.5, keys=3.0),
    "NaN in a value": Sequence(queries=0.8, keys=0.7, poisoned="v"),
    "NaN in a key": Sequence(queries=0.8, keys=0.7, poisoned="k"),
    "NaN in a query": Sequence(queries=0.8, keys=0.7, poisoned="q"),
}


# For what is slow: each kind once.
FEW = ("no keys", "some queries and keys", "lengths beyond the array", "NaN in a value")


class Situation(NamedTuple):
    """Attributes: `seen` is ``bool[batch, q_len, kv_len]``; the others are in the order of their operands."""

    problem: AttentionProblem
    sequences: tuple[str, ...]
    qkv: tuple[np.ndarray, ...]
    cotangents: tuple[np.ndarray, np.ndarray]
    lengths: tuple[np.ndarray, ...]
    seen: np.ndarray


def situation(problem: AttentionProblem, seed: int = 0) -> Situation:
    """Of a problem of one sequence for each of `SEQUENCES`, or of the `FEW`; lengths are those that it has."""
    p, draw = problem, np.random.default_rng(seed)
    names = {len(SEQUENCES): tuple(SEQUENCES), len(FEW): FEW}[p.batch]
    sequences = [SEQUENCES[name] for name in names]

    def lengths(parts: list[float | None], most: int) -> np.ndarray:
        return np.array([most if part is None else round(part * most) for part in parts], np.int32)

    q_lengths = lengths([s.queries if p.q_lengths else None for s in sequences], p.q_len)
    kv_lengths = lengths([s.keys if p.kv_lengths else None for s in sequences], p.kv_len)
    i, j = np.arange(p.q_len)[:, None], np.arange(p.kv_len)[None]
    seen = (i < q_lengths[:, None, None]) & (j < kv_lengths[:, None, None])
    if p.left is not None:
        seen &= j >= i - p.left
    if p.right is not None:
        seen &= j <= i + p.right
    q, k, v = (draw.standard_normal(x.shape) for x in p.qkv())
    d_out, d_lse = (draw.standard_normal(x.shape) for x in (p.out(), p.lse()))
    for b, sequence in enumerate(sequences):
        hidden, empty = ~seen[b].any(axis=0), ~seen[b].any(axis=1)
        for x, rows in ((k, hidden), (v, hidden), (q, empty), (d_out, empty)):
            x[b, rows] = draw.choice(BAD, x[b, rows].shape)
        d_lse[b][:, empty] = np.nan
        if sequence.poisoned and seen[b].any():
            i, j = next(iter(np.argwhere(seen[b])[len(np.argwhere(seen[b])) // 2 :]))
            {"q": q, "k": k, "v": v}[sequence.poisoned][b, i if sequence.poisoned == "q" else j, 0, 0] = np.nan
    given = (*([q_lengths] if p.q_lengths else []), *([kv_lengths] if p.kv_lengths else []))
    rounded = [np.asarray(jnp.asarray(x, p.dtype), np.float64) for x in (q, k, v, d_out)]
    return Situation(p, names, tuple(rounded[:3]), (rounded[3], d_lse), given, seen)


class Answer(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def oracle(s: Situation, *, scale: float | None = None, with_d_lse: bool = False) -> Answer:
    """Results and gradients, query by query, of the keys that it sees alone."""
    p, (q, k, v), (d_out, d_lse) = s.problem, s.qkv, s.cotangents
    scale = p.default_scale() if scale is None else scale
    out, lse = np.zeros(p.out().shape), np.full(p.lse().shape, -np.inf)
    dq, dk, dv = (np.zeros(x.shape) for x in s.qkv)
    with np.errstate(invalid="ignore", over="ignore"):
        for b, i, n in np.ndindex(p.batch, p.q_len, p.heads):
            keys, head = np.flatnonzero(s.seen[b, i]), n // p.group
            if not len(keys):
                continue
            ks, vs = k[b, keys, head], v[b, keys, head]
            x = ks @ q[b, i, n] * scale
            slope = np.ones_like(x)
            if p.softcap:
                x = SOFTCAP * np.tanh(x / SOFTCAP)
                slope = 1 - (x / SOFTCAP) ** 2
            lse[b, n, i] = x.max() + np.log(np.exp(x - x.max()).sum())
            w = np.exp(x - lse[b, n, i])
            out[b, i, n] = w @ vs
            ds = w * (vs @ d_out[b, i, n] - out[b, i, n] @ d_out[b, i, n] + (d_lse[b, n, i] if with_d_lse else 0))
            ds *= slope * scale
            dq[b, i, n] = ds @ ks
            dk[b, keys, head] += np.outer(ds, q[b, i, n])
            dv[b, keys, head] += np.outer(w, d_out[b, i, n])
    return Answer(out, lse, dq, dk, dv)


def operands(s: Situation) -> tuple[jax.Array, ...]:
    """Of the forward pass."""
    return *(jnp.asarray(x, s.problem.dtype) for x in s.qkv), *map(jnp.asarray, s.lengths)


def backward(s: Situation, **fields: Any) -> tuple[FlashAttentionBackwardProblem, tuple[jax.Array, ...]]:
    """The problem of the gradients, and its operands: what the forward pass promises is the oracle's."""
    p, right = s.problem, oracle(s)
    shared = {field.name: getattr(p, field.name) for field in dataclasses.fields(AttentionProblem)}
    posed = FlashAttentionBackwardProblem(**shared, **fields)
    q, k, v, *lengths = operands(s)
    of_lse = (jnp.asarray(s.cotangents[1], jnp.float32),) if posed.lse_cotangent else ()
    out, d_out = (jnp.asarray(x, p.dtype) for x in (right.out, s.cotangents[0]))
    return posed, (q, k, v, out, jnp.asarray(right.lse, jnp.float32), d_out, *of_lse, *lengths)


def problem(
    q_len: int, kv_len: int, heads: int, kv_heads: int, head_dim: int, *, few: bool = False, **fields: Any
) -> FlashAttentionProblem:
    """Of one sequence for each of `SEQUENCES`, or of the `FEW`."""
    return FlashAttentionProblem(len(FEW if few else SEQUENCES), q_len, kv_len, heads, kv_heads, head_dim, **fields)


def broken_promises(s: Situation, expected: Answer, tolerance: float, **found: Any) -> list[str]:
    """Which results, by their names in `Answer`, are not as promised, and of which sequence."""
    broken = []
    hidden, empty = ~s.seen.any(axis=1), ~s.seen.any(axis=2)
    for name, result in found.items():
        actual, right = np.asarray(result, np.float64), getattr(expected, name)
        assert actual.shape == right.shape
        left_out = hidden if name in ("dk", "dv") else empty
        for b, title in enumerate(s.sequences):
            one, wanted, absent = actual[b], right[b], left_out[b]
            one, wanted = (x.swapaxes(0, 1) if name == "lse" else x for x in (one, wanted))
            nothing = -np.inf if name == "lse" else 0.0
            if not (one[absent] == nothing).all():
                broken.append(f"{name} of {title}: not {nothing} where nothing is seen")
            one, wanted = one[~absent], wanted[~absent]
            if SEQUENCES[title].poisoned:  # All that depends on it is NaN; what else is, is not said.
                if np.isfinite(one[np.isnan(wanted)]).any():
                    broken.append(f"{name} of {title}: a number in place of NaN")
            elif one.size and not np.allclose(
                one, wanted, atol=tolerance * max(1, np.abs(wanted).max()), rtol=tolerance
            ):
                worst = np.abs(one - wanted).max()
                broken.append(f"{name} of {title}: off by {worst:.3g}, of {np.abs(wanted).max():.3g}")
    return broken
