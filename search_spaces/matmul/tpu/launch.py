"""The matmul on TPUs: supported problems, and the launch of one matmul."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from search_spaces.footprint import Footprint
from search_spaces.kernel import INDICES_OF_32_BITS, Kernel, Target
from search_spaces.matmul import epilogue
from search_spaces.matmul.problem import MatmulProblem
from search_spaces.matmul.tpu.dtypes import unsupported
from search_spaces.matmul.tpu.footprint import footprint, vmem_limit
from search_spaces.matmul.tpu.kernel import Factor, launched
from search_spaces.matmul.tpu.schedule import TpuSchedule
from search_spaces.matmul.tpu.space import space
from search_spaces.problem import Arrays
from search_spaces.space import Columns, Space


class MosaicTpuMatmul(Kernel[MatmulProblem, TpuSchedule]):
    backend = "mosaic_tpu"
    version = 1
    most_elements = INDICES_OF_32_BITS

    def supports(self, problem: MatmulProblem, target: Target) -> str | None:
        p = problem
        return unsupported(target, p.dtype, *filter(None, (p.out_dtype, p.bias, p.residual)))

    def space(self, problem: MatmulProblem, target: Target) -> Space[TpuSchedule]:
        return space(problem)

    def footprint(self, problem: MatmulProblem, schedules: Columns, target: Target) -> Footprint:
        return footprint(problem, schedules, target)

    def run(
        self, problem: MatmulProblem, schedule: TpuSchedule, target: Target, /, *args: Any, **params: Any
    ) -> Arrays:
        p = problem
        a, b, bias, residual = p.named([x.reshape((p.batch, -1, x.shape[-1])) for x in args])

        def finish(accs: Sequence[jax.Array], biases: Sequence[Any], residual: Any) -> jax.Array:
            return epilogue.apply(accs[0], bias=biases[0], activation=p.activation, residual=residual)

        limit = int(vmem_limit(p, Columns.of([schedule]), target)[0])
        c = launched(p, schedule, a, [Factor(b, bias)], residual, finish, name="matmul", vmem_limit_bytes=limit)
        return p.cut(c.reshape(p.whole.shape))
