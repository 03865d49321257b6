"""How far a solve is, in words."""

from __future__ import annotations

from remat.limits.units import format_bytes
from remat.progress import Progress


def standing(progress: Progress) -> str:
    """Incumbent, bound and gap in words."""
    if progress.phase == "peak":
        parts = [
            "smallest peak",
            "" if progress.incumbent is None else format_bytes(progress.incumbent),
            "" if progress.bound is None else f"at least {format_bytes(progress.bound)}",
        ]
    else:
        parts = [
            "extra time",
            "" if progress.incumbent is None else f"{progress.incumbent:+.2%}",
            "" if progress.bound is None else f"at least {progress.bound:+.2%}",
        ]
    if progress.gap is not None:
        parts.append(f"gap {progress.gap:.2%}")
    return " ".join(parts[:2]) + "".join(f", {part}" for part in parts[2:] if part)
