"""Formatting of quantities for people: three significant digits and a unit."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Formats seconds with three digits and a unit: "1.20 ms"."""
    if not seconds:
        return "0 s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * scale:
            return f"{_padded(seconds / scale)} {unit}"
    return f"{_padded(seconds / 1e-9)} ns"


def digits(value: float) -> str:
    """Formats a number with three digits, without trailing zeros."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ratio_text(ratio: float) -> str:
    """Formats a ratio with three digits, at most two of them decimals: "0.98x", "1.05x", "24.9x"."""
    return f"{ratio:.2f}x" if ratio < 9.995 else f"{_padded(ratio)}x" if ratio < 99_999 else f"{ratio:.2g}x"


def share_text(share: float) -> str:
    """Formats a fraction as a percentage with three digits, at most two of them decimals: "12.3%", "0.07%"."""
    return f"{digits(round(100 * share, 2))}%"


def faster_text(excess: float) -> str:
    """Formats a speedup from the other's excess time as a fraction: "12.3% faster", from 1 on "3.05 times as fast"."""
    return f"{share_text(excess)} faster" if excess < 1 else f"{digits(1 + excess)} times as fast"


def _padded(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"
