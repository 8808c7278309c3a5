"""The footprint of a launch: that of the matmul, plus the demands of its scales."""

from __future__ import annotations

import dataclasses

import numpy as np

from search_spaces.footprint import Footprint, Operand
from search_spaces.hopper.limits import WARPGROUP
from search_spaces.matmul.hopper.footprint import footprint as footprint_of_product
from search_spaces.matmul.hopper.footprint import registers_per_block
from search_spaces.matmul.hopper.tiling import Tiling
from search_spaces.scaled_matmul.hopper.space import scaling
from search_spaces.scaled_matmul.problem import ScaledMatmulProblem
from search_spaces.space import Columns


def footprint(p: ScaledMatmulProblem, s: Columns) -> Footprint:
    """Returns the footprint; with scales by blocks, a consumer holds two sets of accumulators."""
    product, t = footprint_of_product(p.product, s), Tiling(p.product, s)
    by_steps, results = scaling(p).by_steps, s.tile_m * s.tile_n
    registers = product.registers + by_steps * (t.wg_m * t.wg_n // WARPGROUP)
    a_scale, b_scale = (x.size * x.dtype.itemsize for x in p.operands()[2:])
    rows = Operand(bytes=4.0 * s.tile_m, axes=(0, 1), name="a_scale")
    # The scales of a are transposed, so that a warpgroup's are adjacent, and padded together with those of b.
    return dataclasses.replace(
        product,
        step=dataclasses.replace(
            product.step,
            loads=(*product.step.loads, *((rows,) if p.a_scales == "blocks" else ())),
            fp32_ops=2.0 * results if by_steps else 0.0,
        ),
        tile=dataclasses.replace(
            product.tile, fp32_ops=product.tile.fp32_ops + results * ((p.a_scales == "rows") + (p.b_scales == "rows"))
        ),
        # While one consumer scales, the other one multiplies.
        ping_pong=product.ping_pong | (by_steps & (np.asarray(t.consumers) > 1)),
        registers=registers,
        registers_per_block=registers_per_block(t, registers),
        copied_bytes=product.copied_bytes + 2.0 * (a_scale + b_scale),
        launches=product.launches + 1,
    )
