"""The attention gradients compiled by XLA: those of ``jax.nn.dot_product_attention``, and a formula."""

from __future__ import annotations

from typing import Any

import jax

from search_spaces.attention import xla
from search_spaces.attention.problem import SOFTCAP
from search_spaces.flash_attention_backward.problem import FlashAttentionBackwardProblem
from search_spaces.kernel import Library, LibraryKernel
from search_spaces.problem import Tolerance
from search_spaces.space import Space
from search_spaces.target import Target


class XlaFlashAttentionBackward(LibraryKernel[FlashAttentionBackwardProblem]):
    """The formula with the log-sum-exp, and the program "plain", the derivative of ``jax.nn.dot_product_attention``.

    The formula splits the queries into blocks if the logits need much memory.
    """

    version = 1

    def programs(self, problem: FlashAttentionBackwardProblem) -> tuple[str, ...]:
        if problem.lse_cotangent or xla.unwritten(problem) is not None:
            return (Library.program,)
        return (Library.program, "plain")

    def space(self, problem: FlashAttentionBackwardProblem, target: Target) -> Space[Library]:
        whole = super().space(problem, target)
        return whole if xla.compiles(problem, target) else Space(Library, {"program": (Library.program,)})

    def tolerance(self, problem: FlashAttentionBackwardProblem, schedule: Library) -> tuple[Tolerance, ...]:
        """Returns 8 times the problem's tolerance for "plain".

        That program rounds cotangents of probabilities before it subtracts their mean.
        """
        exact = problem.tolerance()
        if schedule.program != "plain":
            return exact
        return tuple(Tolerance(absolute=8 * one.absolute, relative=8 * one.relative) for one in exact)

    def run(
        self,
        problem: FlashAttentionBackwardProblem,
        schedule: Library,
        target: Target,
        /,
        *args: Any,
        scale: float | None = None,
        softcap: float = SOFTCAP,
    ) -> tuple[jax.Array, ...]:
        p, of = problem, problem.lengths(args)
        scale = p.default_scale() if scale is None else scale
        if schedule.program == "plain":
            q, k, v, _, _, d_out = args[:6]
            return xla.as_written_backward(p, q, k, v, d_out, of, scale=scale)
        d_lse = args[6] if p.lse_cotangent else None
        return xla.backward(p, args[:6], d_lse, of, scale=scale, softcap=softcap)
