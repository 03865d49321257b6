"""What a package says that it needs, and whether an installed version is that."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

State = Literal["ok", "untested", "missing", "wrong"]

_REQUIREMENT = re.compile(
    r"""(?P<name>[\w.-]+) \s* (\[(?P<parts>.*?)\])? (?P<versions>[^;]*)
        (;.*\bextra\s*==\s*["'](?P<extra>[\w-]+)["'])?""",
    re.VERBOSE,
)
_LEAST, _BELOW = re.compile(r">=\s*([\d.]+)"), re.compile(r"<\s*([\d.]+)")


@dataclass(frozen=True)
class Requirement:
    """Versions from `least` on and below `below`, "" where any newer one will do; `parts` are the
    package's own extras."""

    name: str
    least: str
    below: str
    extra: str
    parts: frozenset[str]

    @classmethod
    def read(cls, line: str) -> Requirement | None:
        """From a package's metadata."""
        found = _REQUIREMENT.match(line)
        if found is None:
            return None
        least, below = _LEAST.search(found["versions"]), _BELOW.search(found["versions"])
        return cls(
            name=found["name"],
            least=least[1] if least else "0",
            below=below[1] if below else "",
            extra=found["extra"] or "",
            parts=frozenset(part.strip() for part in (found["parts"] or "").split(",") if part),
        )

    @property
    def install(self) -> str:
        """What gets a version that is tested."""
        below = f",<{self.below}" if self.below else ""
        return f"pip install '{self.name}>={self.least}{below}'"

    def judge(self, version: str) -> tuple[State, str]:
        """Of an installed version: what to think of it, and in words that follow it."""
        if _numbers(version) < _numbers(self.least):
            return "wrong", f"; remat needs {self.least}"
        if self.below and _numbers(version) >= _numbers(self.below):
            return (
                "untested",
                f", outside the tested range ({self.least} or newer, below {self.below})",
            )
        return "ok", ""


def requirements(package: str) -> list[Requirement]:
    """As the package itself says; of a source tree that is not installed, nothing is known."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []
    return [found for line in lines if (found := Requirement.read(line))]


def version_of(package: str) -> str | None:
    """Of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Of a release: "2.13.0+cpu" is (2, 13, 0)."""
    release = re.match(r"[\d.]*", version)
    return tuple(int(part) for part in release[0].split(".") if part) if release else ()
