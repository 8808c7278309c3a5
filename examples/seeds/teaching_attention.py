"""Flash attention forward in its teaching form, and how far it and ours are from attention as it is written.

    python examples/seeds/teaching_attention.py

The two loops of the documents: over blocks of queries, the grid; over blocks of keys and values, with the running
maximum m, the running sum l, and the result rescaled as they change (online softmax). It is an operation that is tuned,
on a CPU by Pallas's interpreter, on an NVIDIA GPU by Pallas's Triton backend.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

import scheduler
from scheduler import tuned_flash_attention
from scheduler.core.hardware import detect
from search_spaces import Columns, Footprint, Kernel, Operand, Operation, Phase, Space, Target
from search_spaces.flash_attention import FlashAttentionProblem
from search_spaces.flash_attention.kernels import XlaFlashAttention

sys.path.append(str(Path(__file__).parent))  # where a command line loads this file by its path
from teaching_matmul import THREADS, WARPS, refusal, triton

# What Triton makes blocks of.
SIZES = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class AttentionBlocks:
    """Br queries and Bc keys."""

    block_q: int
    block_kv: int


class TeachingAttention(Kernel[FlashAttentionProblem, AttentionBlocks]):
    backend = "teaching"

    def supports(self, problem: FlashAttentionProblem, target: Target) -> str | None:
        p = problem
        if reason := refusal(target):
            return reason
        if target.platform == "cuda" and (p.dtype == "float32" or p.head_dim not in (32, 64, 128)):
            return "multiplies bfloat16 or float16 of head size 32, 64 or 128 on a GPU"
        plain = FlashAttentionProblem(p.batch, p.q_len, p.kv_len, p.heads, p.heads, p.head_dim, dtype=p.dtype)
        return None if p == plain else "attends to all keys, each head to its own, and returns the result alone"

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[AttentionBlocks]:
        p = problem
        return Space(
            AttentionBlocks,
            choices={"block_q": SIZES, "block_kv": SIZES},
            rules={
                "blocks divide queries and keys": lambda s: (p.q_len % s.block_q == 0) & (p.kv_len % s.block_kv == 0)
            },
        )

    def footprint(self, problem: FlashAttentionProblem, schedules: Columns, target: Target) -> Footprint:
        p, br, bc = problem, schedules.block_q, schedules.block_kv
        d, itemsize = p.head_dim, jnp.dtype(p.dtype).itemsize
        rows = br * d * itemsize
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(np.full(len(schedules), p.batch * p.heads), p.q_len / br),
            axes=("heads of all sequences", "queries"),
            step=Phase(
                loads=tuple(Operand(bytes=bc * d * itemsize, axes=(0,), name=name) for name in "KV"),
                flops=4.0 * br * bc * d,
                mufu_ops=br * (bc + 1),
                fp32_ops=br * (4 * bc + d),
            ),
            tile=Phase(loads=(Operand(bytes=rows, axes=(0, 1), name="Q"),), fp32_ops=br * d, bytes_written=rows),
            onchip_bytes=_onchip_elements(br, bc, d, target) * itemsize,
            steps=p.kv_len / bc,
            minor=1,
            group=p.q_len / br,
            stages=1,
            threads=THREADS,
            registers=br * (bc + d) // THREADS,  # S and O alone
        )

    def run(
        self, problem: FlashAttentionProblem, schedule: AttentionBlocks, target: Target, /, *args: Any, **params: Any
    ) -> jax.Array:
        p, s = problem, schedule
        d = p.head_dim

        def head(length: int, block: int | None) -> pl.BlockSpec:
            if block is None:
                return pl.BlockSpec((None, length, None, d), lambda b, h, i: (b, 0, h, 0))
            return pl.BlockSpec((None, block, None, d), lambda b, h, i: (b, i, h, 0))

        out: jax.Array = pl.pallas_call(
            lambda *refs: flash_attention_forward(*refs, Bc=s.block_kv),
            grid=(p.batch, p.heads, p.q_len // s.block_q),
            in_specs=[head(p.q_len, s.block_q), head(p.kv_len, None), head(p.kv_len, None)],
            out_specs=head(p.q_len, s.block_q),
            out_shape=p.out(),
            **(
                {"interpret": True}
                if target.platform == "cpu"
                else {"compiler_params": triton().CompilerParams(num_warps=WARPS, num_stages=1)}
            ),
        )(*args)
        return out


def _onchip_elements(br: Any, bc: Any, d: int, target: Target) -> Any:
    """In the interpreter all that a block names, Q, K, V, S, O, m and l; on a GPU what Triton asks for, exactly.

    S and O are in registers there, and V takes the place of K. P goes through shared memory where warps divide its
    columns; but Hopper's WGMMA, of 64 rows and more, has it in registers, and reads V on chip beside K.
    """
    if target.platform == "cpu":
        return 2 * br * d + 2 * bc * d + br * bc + 2 * br
    wgmma = (br >= 64) & (target.architecture == "sm_90")
    return br * d + bc * d + np.where(wgmma, bc * d, np.where(br < d, br * bc, 0))


def flash_attention_forward(Q: Any, K: Any, V: Any, O: Any, *, Bc: int) -> None:  # noqa: E741 (the documents' names)
    """Of ``Q[Br, d]``, ``K[N, d]``, ``V[N, d]`` and ``O[Br, d]``: one block of queries, all of the keys."""
    Br, d = Q.shape
    Q_i, scale = Q[...], 1 / math.sqrt(d)

    def step(j: Any, carry: Any) -> Any:
        m_i, l_i, O_i = carry
        block = pl.ds(j * Bc, Bc)
        K_j, V_j = K[block, :], V[block, :]
        S_ij = jnp.dot(Q_i, K_j.T, preferred_element_type=jnp.float32) * scale
        m_new = jnp.maximum(m_i, S_ij.max(axis=1))
        exp_m_old, P_ij = jnp.exp(m_i - m_new), jnp.exp(S_ij - m_new[:, None])
        O_i = exp_m_old[:, None] * O_i + jnp.dot(P_ij.astype(V_j.dtype), V_j, preferred_element_type=jnp.float32)
        return m_new, exp_m_old * l_i + P_ij.sum(axis=1), O_i

    start = (jnp.full(Br, -jnp.inf, jnp.float32), jnp.zeros(Br, jnp.float32), jnp.zeros((Br, d), jnp.float32))
    _, l_i, O_i = lax.fori_loop(0, K.shape[0] // Bc, step, start)
    O[...] = (O_i / l_i[:, None]).astype(O.dtype)


TEACHING_ATTENTION = Operation(
    "teaching_attention", FlashAttentionProblem, (TeachingAttention(), XlaFlashAttention()), params=("scale", "softcap")
)
PROBLEM = FlashAttentionProblem(batch=2, q_len=256, kv_len=256, heads=1, kv_heads=1, head_dim=64, dtype="float32")


@dataclasses.dataclass(frozen=True)
class Errors:
    """Of a result beside the standard one: largest and mean absolute difference, and mean relative one."""

    largest: float
    mean: float
    relative: float

    @classmethod
    def of(cls, actual: Any, standard: Any) -> Errors:
        actual, standard = np.asarray(actual, np.float64), np.asarray(standard, np.float64)
        off = np.abs(actual - standard)
        return cls(float(off.max()), float(off.mean()), float((off / (np.abs(standard) + 1e-8)).mean()))

    def __str__(self) -> str:
        return f"largest absolute {self.largest:.2e}, mean absolute {self.mean:.2e}, mean relative {self.relative:.2e}"


def standard_attention(Q: jax.Array, K: jax.Array, V: jax.Array) -> jax.Array:
    """As it is written: all of S and P, in float32."""
    S = jnp.einsum("bqhd,bkhd->bhqk", Q, K, precision="highest") / math.sqrt(Q.shape[-1])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(S, axis=-1), V, precision="highest")


def errors(problem: FlashAttentionProblem) -> dict[str, Errors]:
    """Of the teaching kernel in blocks of 64 x 64, of the best that was found of it, and of our attention."""
    q, k, v = problem.inputs(seed=0)
    standard, target = standard_attention(q, k, v), detect().target
    in_64 = jax.jit(lambda q, k, v: TeachingAttention().run(problem, AttentionBlocks(64, 64), target, q, k, v))
    tuned = scheduler.tuned(TEACHING_ATTENTION)
    results = {
        "teaching, 64 x 64": in_64(q, k, v),
        "teaching, tuned": tuned(q, k, v, backends="teaching"),
        "tuned_flash_attention": tuned_flash_attention(q, k, v, backends="pallas"),
    }
    return {name: Errors.of(result, standard) for name, result in results.items()}


def main() -> None:
    # Ours on a GPU multiplies 16 bits: float32 is XLA's there.
    problem = PROBLEM
    if jax.default_backend() == "gpu":
        problem = dataclasses.replace(PROBLEM, q_len=4096, kv_len=4096, heads=8, kv_heads=8, dtype="bfloat16")
    record = scheduler.tune(TEACHING_ATTENTION, problem, budget=8)
    print(f"{problem}: {record.tried} trials")
    for entry in record.entries:
        schedule = " ".join(f"{name}={value}" for name, value in entry.schedule.items())
        print(f"  {entry.backend:8} {schedule:28} {1e6 * entry.measurement.median_s:9.1f} us")
    for name, found in errors(problem).items():
        print(f"{name:22} {found}")


if __name__ == "__main__":
    main()
