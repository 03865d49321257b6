"""Version requirements in a package's metadata, and checks of installed versions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

State = Literal["ok", "untested", "missing", "wrong"]

_REQUIREMENT = re.compile(
    r"""(?P<name>[\w.-]+) \s* (\[(?P<required_extras>.*?)\])? (?P<versions>[^;]*)
        (;.*\bextra\s*==\s*["'](?P<extra>[\w-]+)["'])?""",
    re.VERBOSE,
)
_MIN_VERSION, _BELOW_VERSION = re.compile(r">=\s*([\d.]+)"), re.compile(r"<\s*([\d.]+)")


@dataclass(frozen=True)
class Requirement:
    """A requirement of one package on another: `min_version` or newer, and below `below_version`
    unless that is "".

    `extra` is the extra of the requiring package that adds the requirement, "" for none.
    `required_extras` are the extras of the required package.
    """

    name: str
    min_version: str
    below_version: str
    extra: str
    required_extras: frozenset[str]

    @classmethod
    def parse(cls, line: str) -> Requirement | None:
        """Parse a `Requires-Dist` line of a package's metadata; None if it has another form."""
        match = _REQUIREMENT.match(line)
        if match is None:
            return None
        min_version, below_version = (
            _MIN_VERSION.search(match["versions"]),
            _BELOW_VERSION.search(match["versions"]),
        )
        return cls(
            name=match["name"],
            min_version=min_version[1] if min_version else "0",
            below_version=below_version[1] if below_version else "",
            extra=match["extra"] or "",
            required_extras=frozenset(
                part.strip() for part in (match["required_extras"] or "").split(",") if part
            ),
        )

    @property
    def install_command(self) -> str:
        """The pip command that installs a tested version."""
        below_version = f",<{self.below_version}" if self.below_version else ""
        return f"pip install '{self.name}>={self.min_version}{below_version}'"

    def check_version(self, version: str) -> tuple[State, str]:
        """Return the state of an installed version, and a text to append to it, such as "; remat
        needs 2.11"."""
        if _release_numbers(version) < _release_numbers(self.min_version):
            return "wrong", f"; remat needs {self.min_version}"
        if self.below_version and _release_numbers(version) >= _release_numbers(self.below_version):
            return (
                "untested",
                f", outside the tested range ({self.min_version} or newer, "
                f"below {self.below_version})",
            )
        return "ok", ""


def requirements(package: str) -> list[Requirement]:
    """Return the requirements in the package's metadata; [] if the package is not installed."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return []
    return [requirement for line in lines if (requirement := Requirement.parse(line))]


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _release_numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: "2.13.0+cpu" is (2, 13, 0)."""
    release_match = re.match(r"[\d.]*", version)
    return tuple(int(part) for part in release_match[0].split(".") if part) if release_match else ()
