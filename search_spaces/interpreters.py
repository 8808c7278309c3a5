"""Pallas' interpreters of whole kernels on a CPU: a kernel whose chip is not here runs there, slowly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax.experimental.pallas import tpu as pltpu

# Platforms whose kernels are interpreted as they are, memory that nobody wrote being NaN.
PLATFORMS = frozenset({"tpu"})


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Within it, kernels of `PLATFORMS` that are traced are interpreted."""
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
            yield
    finally:
        pltpu.reset_tpu_interpret_mode_state()  # one that raised leaves its memory behind
