"""The formula of a kernel whose rows are of two halves: no element waits for another."""

from __future__ import annotations

import abc
from typing import ClassVar

import jax


class HalvesFormula(abc.ABC):
    """A formula of elements that lie at one place of several halves.

    Attributes:
      read: the halves that are loaded, in the order of `compute`: the operand's number, and whether it is the second
        half of its rows; an operand as wide as the problem's columns has a first one only.
      written: likewise of the only result.
    """

    read: ClassVar[tuple[tuple[int, bool], ...]]
    written: ClassVar[tuple[bool, ...]]

    @abc.abstractmethod
    def compute(self, *halves: jax.Array) -> tuple[jax.Array, ...]:
        """What is written, of what is read, in float32."""
