"""Converts an array's registers in a kernel to 32-bit words, which a thread can move freely, and back.

In memory, the words of several threads are interleaved by accesses: the first `ACCESS` words of each thread, then the
next ones.
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
    """Returns the words of this thread, in order."""
    bits = ir.IntegerType.get_signless(32)
    return [
        vector.extract(vector.bitcast(ir.VectorType.get(register.type.shape, bits), register), [], [position])
        for register in array.registers.flat
        for position in range(register.type.shape[0])
    ]


def of_words(got: Sequence[Any], like: Any) -> Any:
    """Builds the array with these words, with the type and the layout of `like`."""
    bits, registers = ir.IntegerType.get_signless(32), np.empty_like(like.registers)
    for number, register in enumerate(like.registers.flat):
        width = register.type.shape[0]
        pair = vector.from_elements(ir.VectorType.get((width,), bits), got[number * width : (number + 1) * width])
        registers.flat[number] = vector.bitcast(register.type, pair)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=like.is_signed)


def access() -> Any:
    """Returns the type of a thread's widest access."""
    return ir.VectorType.get((ACCESS,), ir.IntegerType.get_signless(32))


def pointer(own: Any, first: int, threads: int) -> Any:
    """Returns the address of a thread's word `first` among `threads` threads, if its words begin at `own`."""
    return mgpu.utils.getelementptr(own, [first * WORD_BYTES * threads], ir.IntegerType.get_signless(8))


def load(own: Any, count: int, threads: int) -> list[Any]:
    """Loads `count` words of a thread from the same layout."""
    got = []
    for first in range(0, count, ACCESS):
        some = llvm.load(access(), pointer(own, first, threads), alignment=ACCESS_BYTES)
        got += [vector.extract(some, [], [position]) for position in range(ACCESS)]
    return got
