"""Requirements of Hopper kernels on the chip, and padding of their operands before a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.kernel import Target


def not_hopper(target: Target) -> str | None:
    """Returns why Hopper kernels do not run on `target`, or None."""
    if target.platform == "cuda" and target.architecture == "sm_90":
        return None
    return f"is written for NVIDIA Hopper (sm_90), not for {target.kind} ({target.architecture})"


def padded(x: jax.Array, extents: Sequence[Any], value: float = 0.0) -> jax.Array:
    """Pads the last axes of `x` with `value` up to `extents`; None leaves an axis unchanged."""
    lead = x.ndim - len(extents)
    after = [0 if extent is None else int(extent) - size for extent, size in zip(extents, x.shape[lead:], strict=True)]
    return jnp.pad(x, [(0, 0)] * lead + [(0, n) for n in after], constant_values=value) if any(after) else x
