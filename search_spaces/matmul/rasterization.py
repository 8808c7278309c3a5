"""The order in which the tiles of a product are computed, so that those that run together share what they load."""

from __future__ import annotations

from typing import Any

from jax import lax


def planar_snake(number: Any, grid: tuple[int, int], minor_dim: str, width: int) -> tuple[Any, Any, Any]:
    """Product, row and column of a tile by its number, in groups of `width` tiles, every other one backwards.

    The order of `plgpu.planar_snake`, which branches between whole groups and the last one; here extents are static,
    and a `min` does it. Its lowering also differs between versions of JAX.
    """
    rows, columns = grid
    minors, majors = grid if minor_dim == "m" else grid[::-1]
    product, number = lax.div(number, rows * columns), lax.rem(number, rows * columns)
    group, number = lax.div(number, width * majors), lax.rem(number, width * majors)
    width_here = width if minors % width == 0 else lax.min(width, minors - group * width)
    major, minor = lax.div(number, width_here), group * width + lax.rem(number, width_here)
    major = lax.select(lax.rem(group, 2) == 0, major, majors - 1 - major)
    return (product, minor, major) if minor_dim == "m" else (product, major, minor)
