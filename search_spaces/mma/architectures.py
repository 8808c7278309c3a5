"""The chips that kernels by warp-level MMA support, and the dtypes that their tensor cores multiply."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax

from search_spaces.jax_compat import HAS_MMA, NEEDS_JAX
from search_spaces.kernel import Target

_HALF = ("bfloat16", "float16", "int8")
_FP8 = ("float8_e4m3fn", "float8_e5m2")
# PTX ISA, mma.m16n8k16 and mma.m16n8k32: FP8 from sm_89 on. Mosaic GPU does not support TF32 (jax 0.12).
DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"sm_80": _HALF, "sm_86": _HALF, "sm_89": (*_HALF, *_FP8), "sm_90": (*_HALF, *_FP8)}
)
_NAMES = {"sm_80": "Ampere", "sm_86": "Ampere", "sm_89": "Ada", "sm_90": "Hopper"}
# Mosaic GPU compiles for these (jax 0.11.2), without TMA and wgmma.
BEFORE_HOPPER = frozenset({"sm_80", "sm_86", "sm_89"})


def not_before_hopper(target: Target, also_on: frozenset[str] = frozenset()) -> str | None:
    """Returns why pre-Hopper kernels do not run on `target`, or None; `also_on` are additional architectures."""
    known = sorted(BEFORE_HOPPER | also_on)
    if target.platform != "cuda" or target.architecture not in known:
        *others, last = dict.fromkeys(_NAMES[architecture] for architecture in known)
        names = f"{', '.join(others)} and {last} ({', '.join(known)})"
        return f"is written for NVIDIA {names}, not for {target.kind} ({target.architecture})"
    if not HAS_MMA:
        wanted = f"{NEEDS_JAX}0.11.2 or newer, whose Mosaic GPU compiles for {target.architecture}"
        return f"{wanted}; this is {jax.__version__}"
    return None


def multiplies(target: Target, dtype: str) -> str | None:
    """Returns why the tensor cores of `target` do not multiply operands of this dtype, or None."""
    if dtype in DTYPES[target.architecture]:
        return None
    return f"multiplies {', '.join(DTYPES[target.architecture])} on {target.architecture}, not {dtype}"
