"""Bytes and seconds as text for people: "7.45 GiB", "12.3 ms"."""

from __future__ import annotations


def format_bytes(size_bytes: int | float) -> str:
    """Return a number of bytes in binary units with three or four digits, such as "7.45 GiB"."""
    sign, size = ("-" if size_bytes < 0 else ""), abs(float(size_bytes))
    if size < 1024:
        return f"{sign}{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024 or unit == "TiB":
            break
    decimals = 2 if size < 10 else 1 if size < 100 else 0
    return f"{sign}{size:.{decimals}f} {unit}"


def format_seconds(time_s: float) -> str:
    """Return a time with up to three digits, in the unit that fits: "12.3 ms", "1,234 s"."""
    if abs(time_s) >= 999.5:
        return f"{time_s:,.0f} s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        text = f"{time_s * factor:.3g}"  # a value that rounds up to 1,000 is 1 of the next unit
        if abs(float(text)) >= 1:
            return f"{text} {unit}"
    return f"{time_s * 1e9:.3g} ns" if time_s else "0 s"
