"""The registers of an array in a kernel as 32-bit words, which a thread moves as it likes, and an array of words.

In memory words of several threads lie by accesses: the first `ACCESS` words of each thread, then the next ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from search_spaces.hopper.limits import ACCESS_BYTES

WORD_BYTES = 4
ACCESS = ACCESS_BYTES // WORD_BYTES  # words in the widest access of a thread


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


def access() -> Any:
    """The type of what a thread moves at a time."""
    return ir.VectorType.get((ACCESS,), ir.IntegerType.get_signless(32))


def pointer(own: Any, first: int, threads: int) -> Any:
    """Where a thread's word `first` is, and the next ones, of so many threads, if its words begin at `own`."""
    return mgpu.utils.getelementptr(own, [first * WORD_BYTES * threads], ir.IntegerType.get_signless(8))


def load(own: Any, count: int, threads: int) -> list[Any]:
    """So many words of a thread, likewise."""
    got = []
    for first in range(0, count, ACCESS):
        some = llvm.load(access(), pointer(own, first, threads), alignment=ACCESS_BYTES)
        got += [vector.extract(some, [], [position]) for position in range(ACCESS)]
    return got
