"""Rows that build and run the images of `docker/`, in a separate Debian with a container engine."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.versions import debian
from scripts.versions.pythons import ROOT, RowFailed, RowSkipped, make_debian


@dataclass(frozen=True)
class Image:
    """A row that builds and runs a target of docker/Dockerfile by `scripts.versions.containers`."""

    name: str
    description: str
    target: str
    disk_bytes: int
    """Disk space that the build needs temporarily."""
    by_default: bool = True

    def run(self, versions: Path, options: argparse.Namespace) -> None:
        if reason := debian.unavailable_reason():
            raise RowSkipped(reason)
        versions.mkdir(parents=True, exist_ok=True)
        if (free_bytes := shutil.disk_usage(versions).free) < self.disk_bytes:
            free = f"{free_bytes / 2**30:.1f} GiB are free in {versions}"
            raise RowSkipped(f"{free}, and building it takes {self.disk_bytes >> 30} GiB")
        root = versions / "debian"
        make_debian(root)
        quiet = {"DEBIAN_FRONTEND": "noninteractive", "PODMAN_IGNORE_CGROUPSV1_WARNING": "1"}
        enter = debian.enter_command(root, ROOT, [ROOT, Path(f"{root}.tar")], **quiet)
        command = ["python3", "-m", "scripts.versions.containers", self.target, f"{root}.tar"]
        code = subprocess.run([*enter, *command]).returncode
        if code != 0:
            raise RowFailed(f"`{' '.join(command)}` ended with {code}")
