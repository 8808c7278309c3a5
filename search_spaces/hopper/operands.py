"""What kernels for Hopper ask of a chip and of their operands before they are launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from search_spaces.kernel import Target


def not_hopper(target: Target) -> str | None:
    """Why none of these kernels runs on `target`, or None."""
    if target.platform == "cuda" and target.architecture == "sm_90":
        return None
    return f"is written for NVIDIA Hopper (sm_90), not for {target.kind} ({target.architecture})"


def padded(x: jax.Array, extents: Sequence[Any], value: float = 0.0) -> jax.Array:
    """`x` with `value` behind its last axes, up to `extents`; None is an axis as it is."""
    lead = x.ndim - len(extents)
    after = [0 if extent is None else int(extent) - size for extent, size in zip(extents, x.shape[lead:], strict=True)]
    return jnp.pad(x, [(0, 0)] * lead + [(0, n) for n in after], constant_values=value) if any(after) else x
