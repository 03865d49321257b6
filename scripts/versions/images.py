"""The rows of the images: `docker/` built and run, in a Debian of our own that has an engine."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.versions import debian
from scripts.versions.pythons import ROOT, Failed, Skipped, make_debian


@dataclass(frozen=True)
class Image:
    """A target of docker/Dockerfile; `scripts.versions.containers` has what is done with it."""

    name: str
    what: str
    target: str
    room_bytes: int
    """What building it takes on the disk, for a while."""
    by_default: bool = True

    def run(self, versions: Path, options: argparse.Namespace) -> None:
        if reason := debian.why_unavailable():
            raise Skipped(reason)
        versions.mkdir(parents=True, exist_ok=True)
        if (free_bytes := shutil.disk_usage(versions).free) < self.room_bytes:
            free = f"{free_bytes / 2**30:.1f} GiB are free in {versions}"
            raise Skipped(f"{free}, and building it takes {self.room_bytes >> 30} GiB")
        root = versions / "debian"
        make_debian(root)
        quiet = {"DEBIAN_FRONTEND": "noninteractive", "PODMAN_IGNORE_CGROUPSV1_WARNING": "1"}
        enter = debian.enter(root, ROOT, [ROOT, Path(f"{root}.tar")], **quiet)
        command = ["python3", "-m", "scripts.versions.containers", self.target, f"{root}.tar"]
        code = subprocess.run([*enter, *command]).returncode
        if code != 0:
            raise Failed(f"`{' '.join(command)}` ended with {code}")
