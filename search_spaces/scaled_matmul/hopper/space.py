"""The search space of a scaled matmul on Hopper: the matmul's schedules, restricted to those that can scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from search_spaces.hopper.limits import WARPGROUP
from search_spaces.matmul.hopper.scales import Scaling
from search_spaces.matmul.hopper.schedule import PING_PONG, HopperSchedule
from search_spaces.matmul.hopper.space import space as space_of_product
from search_spaces.scaled_matmul.problem import BLOCK, ScaledMatmulProblem
from search_spaces.space import Space


def scaling(problem: ScaledMatmulProblem) -> Scaling:
    """Returns the kernel's view of the problem's scales."""
    return Scaling(problem.a_scales, problem.b_scales, BLOCK)


# Per thread; with 192 it spills 8 registers (ptxas).
MOST_ACCUMULATORS = 160


def space(problem: ScaledMatmulProblem, cores: int) -> Space[HopperSchedule]:
    """Returns the schedules without swap_ab and without split-K; with scales by blocks, a step is one block."""
    product = space_of_product(problem.product, cores)
    kept: dict[str, tuple[Any, ...]] = {
        "swap_ab": (False,),
        "split_k": (1,),
        "cluster": ("none", "m", "n"),
        "tail_split_k": (1,),
    }
    if not scaling(problem).by_steps:
        rules = {
            f"beside scales a thread holds {MOST_ACCUMULATORS} accumulators": lambda s: (
                s.tile_m * s.tile_n // np.where(np.isin(s.consumers, ("cooperative_m", "cooperative_n")), 2, 1)
                <= MOST_ACCUMULATORS * WARPGROUP
            )
        }
        choices = {**product.choices, **kept}
        return dataclasses.replace(product, choices=choices, rules={**product.rules, **rules})
    kept |= {
        "tile_m": tuple(tile for tile in (128, 64, 256) if tile in product.choices["tile_m"]),
        "tile_n": tuple(tile for tile in (128, 256, 64) if tile in product.choices["tile_n"]),
        "tile_k": (BLOCK,),
        # Each step is waited for, so consumers alternate without explicit turns.
        "consumers": tuple(each for each in product.choices["consumers"] if each not in PING_PONG),
        "delay_release": (0,),
    }
    return dataclasses.replace(
        product,
        choices={**product.choices, **kept},
        rules={
            **product.rules,
            f"a consumer's columns have one scale a step, as {BLOCK} do": lambda s: (
                BLOCK % (s.tile_n // np.where(s.consumers == "cooperative_n", 2, 1)) == 0
            ),
        },
    )
