"""Quantities as a person reads them: three digits and a unit."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: "1.20 ms"."""
    if not seconds:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{_padded(seconds / scale)} {unit}"
    return f"{_padded(seconds / 1e-9)} ns"


def digits(value: float) -> str:
    """Three digits, without zeros at the end."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ratio_text(ratio: float) -> str:
    """Three digits, of which two are decimals at most: "0.98x", "1.05x", "24.9x"."""
    return f"{ratio:.2f}x" if ratio < 9.995 else f"{_padded(ratio)}x" if ratio < 99_999 else f"{ratio:.2g}x"


def share_text(share: float) -> str:
    """Three digits of a percentage, of which two are decimals at most: "12.3%", "0.07%"."""
    return f"{digits(round(100 * share, 2))}%"


def faster_text(excess: float) -> str:
    """Of what another takes so much longer than, as a share: "12.3% faster", and from twice on "3.05 times as fast"."""
    return f"{share_text(excess)} faster" if excess < 1 else f"{digits(1 + excess)} times as fast"


def _padded(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"
