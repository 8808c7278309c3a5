"""The formula of a kernel on rows of two halves, in which elements are independent."""

from __future__ import annotations

import abc
from typing import ClassVar

import jax


class HalvesFormula(abc.ABC):
    """A formula on elements at the same position of several halves.

    Attributes:
      read: the halves that are loaded, in the order of `compute`: the operand's number, and whether it is the second
        half of its rows. An operand with as many columns as the problem only has a first half.
      written: whether each half of the only result that is written is the second.
    """

    read: ClassVar[tuple[tuple[int, bool], ...]]
    written: ClassVar[tuple[bool, ...]]

    @abc.abstractmethod
    def compute(self, *halves: jax.Array) -> tuple[jax.Array, ...]:
        """Computes the halves in `written` from those in `read`, in float32."""
