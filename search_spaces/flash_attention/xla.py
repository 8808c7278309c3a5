"""Attention compiled by XLA: ``jax.nn.dot_product_attention``, and a formula for the cases it does not cover."""

from __future__ import annotations

from typing import Any

from search_spaces.attention import xla
from search_spaces.attention.problem import SOFTCAP
from search_spaces.flash_attention.problem import FlashAttentionProblem
from search_spaces.kernel import Library, LibraryKernel
from search_spaces.space import Space
from search_spaces.target import Target


class XlaFlashAttention(LibraryKernel[FlashAttentionProblem]):
    """The formula, with float32 statistics, and the program "plain", which is ``jax.nn.dot_product_attention``.

    The formula splits the queries into blocks if the logits need much memory.
    """

    version = 1

    def programs(self, problem: FlashAttentionProblem) -> tuple[str, ...]:
        if problem.return_lse or xla.unwritten(problem) is not None:  # JAX rounds the log-sum-exp to the dtype of keys
            return (Library.program,)
        return (Library.program, "plain")

    def space(self, problem: FlashAttentionProblem, target: Target) -> Space[Library]:
        whole = super().space(problem, target)
        return whole if xla.compiles(problem, target) else Space(Library, {"program": (Library.program,)})

    def run(
        self,
        problem: FlashAttentionProblem,
        schedule: Library,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
    ) -> Any:
        p, (q, k, v), of = problem, args[:3], problem.lengths(args)
        scale = p.default_scale() if scale is None else scale
        if schedule.program == "plain":
            return xla.as_written(p, q, k, v, of, scale=scale)
        out, lse = xla.forward(p, q, k, v, of, scale=scale, softcap=softcap)
        return (out, lse) if p.return_lse else out
