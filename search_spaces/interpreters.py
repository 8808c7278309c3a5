"""Pallas interpreters of whole kernels on a CPU: a kernel runs there, slowly, without its chip."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax.experimental.pallas import tpu as pltpu

# Platforms whose kernels can be interpreted unchanged; uninitialized memory is NaN.
PLATFORMS = frozenset({"tpu"})


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Context in which kernels of `PLATFORMS` are interpreted when traced."""
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()  # an interpreter that raised leaves its memory behind
