"""The registers of an array in a kernel as 32-bit words, which a thread moves as it likes, and an array of words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector


def words(array: Any) -> list[Any]:
    """Of this thread, in order."""
    bits = ir.IntegerType.get_signless(32)
    return [
        vector.extract(vector.bitcast(ir.VectorType.get(register.type.shape, bits), register), [], [position])
        for register in array.registers.flat
        for position in range(register.type.shape[0])
    ]


def of_words(got: Sequence[Any], like: Any) -> Any:
    """The array of the type and the layout of `like` whose words these are."""
    bits, registers = ir.IntegerType.get_signless(32), np.empty_like(like.registers)
    for number, register in enumerate(like.registers.flat):
        width = register.type.shape[0]
        pair = vector.from_elements(ir.VectorType.get((width,), bits), got[number * width : (number + 1) * width])
        registers.flat[number] = vector.bitcast(register.type, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=like.is_signed)
