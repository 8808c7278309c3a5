"""The teaching kernel: a matrix product over four-dimensional views with a loop over k, as an operation that is tuned.

    python examples/seeds/teaching_matmul.py [--hardware a100] [--plot tiles.svg]

Views, block specs and body are those of the first teaching document (docs/seeds.md); the blocks, 128 x 128 x 32 there,
are searched. On a CPU Pallas interprets it, on an NVIDIA GPU its Triton backend compiles it. The drawing shows the
blocks that the model would choose for a chip.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

import scheduler
from scheduler.inspect import plots
from scheduler.inspect.case import Case
from search_spaces import Columns, Footprint, Kernel, Operand, Operation, Phase, Space, Target
from search_spaces.matmul import MatmulProblem
from search_spaces.matmul.xla import XlaMatmul

WARPS = 4
THREADS = 32 * WARPS


@dataclasses.dataclass(frozen=True)
class Blocks:
    """BM, BN and BK of the documents, and what they leave to the compiler.

    Attributes:
      block_m, block_n: of the result, computed by one program of the grid.
      block_k: extent of k that one step of the loop loads.
      group: rows of blocks that are walked together, column by column; 1 is row by row.
      stages: of the pipeline in which the compiler loads steps ahead.
    """

    block_m: int
    block_n: int
    block_k: int
    group: int = 1
    stages: int = 3


class TeachingMatmul(Kernel[MatmulProblem, Blocks]):
    backend = "teaching"

    def supports(self, problem: MatmulProblem, target: Target) -> str | None:
        p = problem
        if reason := refusal(target):
            return reason
        if p.dtype not in ("float32", "bfloat16") or p.out_dtype or p.precision != "default":
            return "multiplies float32 or bfloat16 at default precision, and rounds to the same"
        if p.batch > 1 or p.transpose_a or p.transpose_b or p.fused:
            return "multiplies two matrices as they are: no batch, no transposes, no epilogue"
        return None

    def space(self, problem: MatmulProblem, target: Target) -> Space[Blocks]:
        p, gpu = problem, target.platform == "cuda"
        line = 128 // jnp.dtype(p.dtype).itemsize  # elements of a row of 128 bytes, a line of the cache
        return Space(
            Blocks,
            choices={
                "block_m": (64, 128),
                "block_n": (64, 128),
                "block_k": (line, 2 * line, 4 * line),
                "group": (1, 2, 4, 8) if gpu else (1,),
                "stages": (2, 3, 4) if gpu else (3,),
            },
            rules={
                "blocks divide the matrices: the views have no ragged block": lambda s: (
                    (p.m % s.block_m == 0) & (p.n % s.block_n == 0) & (p.k % s.block_k == 0)
                ),
                "groups divide the rows of blocks": lambda s: (p.m // s.block_m) % s.group == 0,
            },
        )

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        p, s = problem, schedules
        itemsize = jnp.dtype(p.dtype).itemsize
        a, b = s.block_m * s.block_k * itemsize, s.block_k * s.block_n * itemsize
        return Footprint(
            arithmetic=p.arithmetic,
            grid=(p.m / s.block_m, p.n / s.block_n),
            axes=("m", "n"),
            step=Phase(
                loads=(Operand(bytes=a, axes=(0,), name="a"), Operand(bytes=b, axes=(1,), name="b")),
                flops=2.0 * s.block_m * s.block_n * s.block_k,
            ),
            tile=Phase(bytes_written=s.block_m * s.block_n * itemsize),
            onchip_bytes=_onchip_bytes(a, b, s.stages, itemsize, target),
            steps=p.k / s.block_k,
            minor=0,
            group=s.group,
            stages=s.stages,
            threads=THREADS,
            registers=s.block_m * s.block_n // THREADS,  # the accumulators alone
        )

    def run(self, problem: MatmulProblem, schedule: Blocks, target: Target, /, *args: Any, **params: Any) -> jax.Array:
        p, s = problem, schedule
        a, b = args
        m_grid, n_grid, k_grid = p.m // s.block_m, p.n // s.block_n, p.k // s.block_k
        # Views: nothing moves.
        a_view = a.reshape(m_grid, s.block_m, k_grid, s.block_k)
        b_view = b.reshape(k_grid, s.block_k, n_grid, s.block_n)

        def row(g: Any) -> Any:
            return place(g, s.group, n_grid)[0]

        def column(g: Any) -> Any:
            return place(g, s.group, n_grid)[1]

        c_view = pl.pallas_call(
            matmul_kernel,
            grid=(m_grid * n_grid,),
            in_specs=[
                pl.BlockSpec((1, s.block_m, k_grid, s.block_k), lambda g: (row(g), 0, 0, 0)),
                pl.BlockSpec((k_grid, s.block_k, 1, s.block_n), lambda g: (0, 0, column(g), 0)),
            ],
            out_specs=pl.BlockSpec((1, s.block_m, 1, s.block_n), lambda g: (row(g), 0, column(g), 0)),
            out_shape=jax.ShapeDtypeStruct((m_grid, s.block_m, n_grid, s.block_n), a.dtype),
            **(
                {"interpret": True}
                if target.platform == "cpu"
                else {"compiler_params": triton().CompilerParams(num_warps=WARPS, num_stages=s.stages)}
            ),
        )(a_view, b_view)
        return c_view.reshape(p.m, p.n)


def matmul_kernel(a_ref: Any, b_ref: Any, c_ref: Any) -> None:
    """Of ``a_ref[1, BM, k_grid, BK]``, ``b_ref[k_grid, BK, 1, BN]`` and ``c_ref[1, BM, 1, BN]``.

    Blocks name all of k, but a program holds no more of it than the steps it has asked for (`memory_limits.py`).
    """

    def body(k: Any, acc: Any) -> Any:
        return acc + jnp.dot(a_ref[0, :, k, :], b_ref[k, :, 0, :], preferred_element_type=jnp.float32)

    acc = jnp.zeros((c_ref.shape[1], c_ref.shape[3]), jnp.float32)
    acc = lax.fori_loop(0, b_ref.shape[0], body, acc)
    c_ref[0, :, 0, :] = acc.astype(c_ref.dtype)


def place(program: Any, group: int, n_grid: int) -> tuple[Any, Any]:
    """Row and column of the block of the result that a program computes: down a group of rows, then the next column."""
    first, within = lax.div(program, group * n_grid), lax.rem(program, group * n_grid)
    return first * group + lax.rem(within, group), lax.div(within, group)


def refusal(target: Target) -> str | None:
    """Why no teaching kernel runs there, in words; None where it does."""
    if target.platform not in ("cpu", "cuda"):
        return f"runs in Pallas's interpreter and on NVIDIA GPUs, not on {target.kind}"
    if target.platform == "cuda" and importlib.util.find_spec("jax.experimental.pallas.triton") is None:
        return f"is compiled by Pallas's Triton backend, which jax {jax.__version__} does not have"
    return None


def triton() -> Any:
    """Pallas's Triton backend, without which the interpreter does."""
    from jax.experimental.pallas import triton

    return triton


def _onchip_bytes(a: Any, b: Any, stages: Any, itemsize: int, target: Target) -> Any:
    """What Triton asks for, exact for the blocks of `TeachingMatmul.space`: accumulators are in registers.

    On Ampere and Ada a step is multiplied from registers, so that its buffer is free for the next load: one less than
    there are stages. Hopper's WGMMA reads both operands on chip, but float32 only with k contiguous, so `b` is
    transposed into one buffer more.
    """
    if target.platform == "cpu":
        return a + b
    if target.architecture != "sm_90":
        return (stages - 1) * (a + b)
    return (stages - 1) * (a + b) + b if itemsize == 4 else stages * (a + b)


TEACHING_MATMUL = Operation("teaching_matmul", MatmulProblem, (TeachingMatmul(), XlaMatmul()))


def main(argv: list[str] | None = None) -> None:
    from example_options import arguments, save  # beside this file, which a command line may load by its path

    told = arguments(__doc__, argv)
    problem = MatmulProblem(m=256, n=192, k=128, dtype="float32")
    if jax.default_backend() == "gpu":
        problem = MatmulProblem(m=4096, n=4096, k=4096, dtype="float32")
    record = scheduler.tune(TEACHING_MATMUL, problem, budget=8)
    print(f"{problem}: {record.tried} trials")
    for entry in record.entries:
        schedule = " ".join(f"{name}={value}" for name, value in entry.schedule.items())
        print(f"  {entry.backend:8} {schedule:40} {1e6 * entry.measurement.median_s:9.1f} us")

    a, b = problem.inputs(seed=1)
    ours = scheduler.tuned(TEACHING_MATMUL)(a, b, backends="teaching")
    print(f"the teaching kernel differs from the float32 product by {largest_error(problem, ours, a, b):.1e} at most")
    if told.plot:
        case = Case(TEACHING_MATMUL, MatmulProblem(m=4096, n=4096, k=1024, dtype="float32"), told.hardware)
        save(plots.tiles(case, backend="teaching", dark=told.dark), told.plot)


def largest_error(problem: MatmulProblem, result: jax.Array, *args: jax.Array) -> float:
    """Largest absolute difference from the reference."""
    return float(np.abs(np.asarray(result, np.float32) - np.asarray(problem.reference(*args))).max())


if __name__ == "__main__":
    main()
