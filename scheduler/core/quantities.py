"""Quantities as a person reads them: three digits and a unit."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: "1.23 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{digits(seconds / scale)} {unit}"
    return f"{digits(seconds / 1e-9)} ns"


def digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
