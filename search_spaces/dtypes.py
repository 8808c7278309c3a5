"""Dtypes as text: the short forms that users type, and the names that keys contain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MappingProxyType

from search_spaces.space import meant

# Letters with bit counts, as in XLA, Triton and PyTorch; in NumPy's codes i8 has eight bytes.
_LONG = MappingProxyType(
    {
        **{f"{letter}{bits}": f"{kind}{bits}" for letter, kind in (("i", "int"), ("s", "int"), ("u", "uint"))
           for bits in (4, 8, 16, 32, 64)},
        **{f"{letters}{bits}": f"float{bits}" for letters in ("f", "fp") for bits in (16, 32, 64)},
        "bf16": "bfloat16", "half": "float16", "single": "float32", "double": "float64", "pred": "bool",
        "c64": "complex64", "c128": "complex128",
        **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e4m3fn", "f8e4m3fn", "f8_e4m3fn", "e4m3", "e4m3fn"), "float8_e4m3fn"),
        **dict.fromkeys(("fp8_e5m2", "f8e5m2", "f8_e5m2", "e5m2"), "float8_e5m2"),
    }
)  # fmt: skip
NAMES = tuple(dict.fromkeys(_LONG.values()))
_ARRAY = re.compile(r"\s*([\w.]+)\s*\[([\d,\s]*)\]\s*")


def dtype_name(text: str) -> str:
    """Returns the name of the dtype that `text` means: "bfloat16" for "bf16" and "torch.bfloat16".

    Other text is returned unchanged.
    """
    short = text.strip().lower()
    package, _, last = short.rpartition(".")
    if package in ("jnp", "np", "torch", "jax.numpy", "numpy", "ml_dtypes"):
        short = last
    found = _LONG.get(short, short)
    return found if found in NAMES else text


def array_type(text: str) -> tuple[str, str] | None:
    """Returns the dtype name and the extents of an array type such as ``bf16[8, 128]``; None for other text."""
    found = _ARRAY.fullmatch(text)
    return None if found is None else (dtype_name(found[1]), found[2])


def canonical(text: str) -> str:
    """Returns a dtype or an array type as keys contain it; other text is returned unchanged."""
    if (found := array_type(text)) is None:
        return dtype_name(text)
    return f"{found[0]}[{','.join(found[1].replace(',', ' ').split())}]"


def did_you_mean(text: str, known: Sequence[str] = NAMES) -> str:
    """Returns the end of an error message about a dtype that is not among `known`; "" if none is close."""
    close = meant(dtype_name(text), known)
    return f"; did you mean {close!r}?" if close else ""
