"""The dtypes that TPUs multiply, by chip."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from search_spaces.kernel import Target

# 8-bit operands that the MXU multiplies at twice the rate of bfloat16, by architecture (Google's pages of each version,
# cloud.google.com/tpu/docs); other chips would have to widen them first.
NARROW: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        **dict.fromkeys(("TPU v5 lite", "TPU v5", "TPU v6 lite"), frozenset({"int8"})),
        "TPU7x": frozenset({"float8_e4m3fn", "float8_e5m2"}),
    }
)
# All other dtypes that a kernel reads and writes. Mosaic does not support float16
# (docs.jax.dev/en/latest/pallas/tpu/details.html).
OTHERS = frozenset({"bfloat16", "float32", "int32"})


def unsupported(target: Target, operands: str, *others: str) -> str | None:
    """Returns why `target` does not support a product of such operands, with other arrays of `others`.

    None if it does.
    """
    if target.platform != "tpu":
        return f"needs a TPU, not {target.kind}"
    if operands not in OTHERS | NARROW.get(target.architecture, frozenset()):
        return f"multiplies no {operands} on {target.kind}"
    if unknown := sorted(set(others) - OTHERS):
        return f"reads and writes no {unknown[0]}"
    return None
