"""Where a Python of some version comes from, and virtual environments made with it."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.versions import debian

ROOT = Path(__file__).resolve().parents[2]
"""Of the repository."""

_NOT_OURS = ("PYTHON", "REMAT_", "VIRTUAL_ENV")
"""Variables that would let a command see what is not in its environment."""


class Skipped(Exception):
    """Something that a row needs cannot be had here; the message says what."""


class Failed(Exception):
    """A command of a row has failed; the message says which."""


@dataclass(frozen=True)
class Python:
    """An interpreter: on this machine, or in a Debian of our own where `root` is set."""

    version: str
    command: str
    root: Path | None = None

    def run(
        self, command: Sequence[str | Path], folder: Path, share: Path, **settings: str
    ) -> None:
        """Run a command to its end where this Python is, with `share` and the repository there.

        Raises `Failed` if it does.
        """
        settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1", **settings}
        path = os.environ["PATH"] if self.root is None else debian.PATH
        settings["PATH"] = f"{settings['PATH']}:{path}" if "PATH" in settings else path
        words = [str(word) for word in command]
        print("$", *words, flush=True)
        if self.root is None:
            mine = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_OURS)}
            code = subprocess.run(words, cwd=folder, env={**mine, **settings}).returncode
        else:
            entered = debian.enter(self.root, folder, [ROOT, share], **settings)
            code = subprocess.run([*entered, *words]).returncode
        if code != 0:
            raise Failed(f"`{shlex.join(words)[:80]}` ended with {code}")


def find(versions: Sequence[str], root: Path, only_debian: bool = False) -> Python:
    """The first of these versions that is here; else Debian's, made in `root` if it is missing.

    Raises `Skipped` where neither can be had.
    """
    for version in versions if not only_debian else ():
        for candidate in candidates(version):
            if works(candidate, version):
                return Python(version, candidate)
    wanted = " or ".join(versions)
    if debian.PYTHON not in versions:
        raise Skipped(f"there is no Python {wanted} here that can make environments")
    if reason := debian.why_unavailable():
        raise Skipped(f"there is no Python {wanted} here, and {reason}")
    make_debian(root)
    return Python(debian.PYTHON, f"python{debian.PYTHON}", root)


def make_debian(root: Path) -> None:
    """Debian in a folder, if it is missing."""
    try:
        debian.make(root)
    except subprocess.CalledProcessError as error:
        raise Skipped(f"debootstrap ended with {error.returncode}; is there a network?") from None


def candidates(version: str) -> list[str]:
    """Interpreters that may be of a version: those on the path, and pyenv's, whose commands on the
    path refuse as long as a version is not switched on."""
    name = f"python{version}"
    found = [shutil.which(name, path=folder) for folder in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return [*filter(None, found), *map(str, sorted(pyenv.glob(f"versions/{version}*/bin/{name}")))]


def works(candidate: str, version: str) -> bool:
    """Whether this is a Python of that version that can make virtual environments."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        told = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
    except OSError:
        return False
    return told.returncode == 0 and told.stdout.strip() == version


@dataclass(frozen=True)
class Environment:
    """A virtual environment in `folder`/venv, kept from run to run."""

    python: Python
    folder: Path

    def run(self, *command: str | Path, folder: Path = ROOT, **settings: str) -> None:
        """Run a command of this environment to its end."""
        settings["PATH"] = f"{self.folder}/venv/bin"
        self.python.run(command, folder, self.folder, **settings)

    def is_made_from(self, *text: str) -> bool:
        """Whether it was made from this, and by this Python; see `made_from`."""
        try:
            return (self.folder / "made-from").read_text() == self._digest(text)
        except FileNotFoundError:
            return False

    def empty(self) -> None:
        """Make it anew, with nothing in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.python.run(
            [self.python.command, "-m", "venv", self.folder / "venv"], Path("/"), self.folder
        )

    def made_from(self, *text: str) -> None:
        """Note what it was made from, so that it is made anew when that has changed."""
        (self.folder / "made-from").write_text(self._digest(text))

    def _digest(self, text: Sequence[str]) -> str:
        return hashlib.sha256("\0".join([repr(self.python), *text]).encode()).hexdigest()
