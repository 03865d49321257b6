"""Search for a Python of a given version, and virtual environments made with it."""

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
"""The repository's folder."""

_REMOVED_PREFIXES = ("PYTHON", "REMAT_", "VIRTUAL_ENV")
"""Prefixes of environment variables that would expose packages outside of the environment."""


class RowSkipped(Exception):
    """A row cannot run on this machine; the message says what is missing."""


class RowFailed(Exception):
    """A command of a row failed; the message says which."""


@dataclass(frozen=True)
class Python:
    """An interpreter: on this machine, or in the separate Debian at `root` if that is set."""

    version: str
    command: str
    root: Path | None = None

    def run(
        self, command: Sequence[str | Path], folder: Path, share: Path, **settings: str
    ) -> None:
        """Run a command on this Python's system, with access to `share` and the repository.

        Raises `RowFailed` if the command fails.
        """
        settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1", **settings}
        path = os.environ["PATH"] if self.root is None else debian.PATH
        settings["PATH"] = f"{settings['PATH']}:{path}" if "PATH" in settings else path
        words = [str(word) for word in command]
        print("$", *words, flush=True)
        if self.root is None:
            inherited = {k: v for k, v in os.environ.items() if not k.startswith(_REMOVED_PREFIXES)}
            code = subprocess.run(words, cwd=folder, env={**inherited, **settings}).returncode
        else:
            prefix = debian.enter_command(self.root, folder, [ROOT, share], **settings)
            code = subprocess.run([*prefix, *words]).returncode
        if code != 0:
            raise RowFailed(f"`{shlex.join(words)[:80]}` ended with {code}")


def find_python(versions: Sequence[str], root: Path, only_debian: bool = False) -> Python:
    """Return a Python of the first of these versions that exists, or else Debian's in `root`.

    Raises `RowSkipped` if there is neither.
    """
    for version in versions if not only_debian else ():
        for candidate in candidate_interpreters(version):
            if can_make_environments(candidate, version):
                return Python(version, candidate)
    wanted = " or ".join(versions)
    if debian.PYTHON not in versions:
        raise RowSkipped(f"there is no Python {wanted} here that can make environments")
    if reason := debian.unavailable_reason():
        raise RowSkipped(f"there is no Python {wanted} here, and {reason}")
    make_debian(root)
    return Python(debian.PYTHON, f"python{debian.PYTHON}", root)


def make_debian(root: Path) -> None:
    """Make a Debian in a folder. Raises `RowSkipped` if debootstrap fails."""
    try:
        debian.make(root)
    except subprocess.CalledProcessError as error:
        raise RowSkipped(
            f"debootstrap ended with {error.returncode}; is there a network?"
        ) from None


def candidate_interpreters(version: str) -> list[str]:
    """Return interpreters that may be of a version: those on the path, and pyenv's.

    pyenv's own commands on the path fail unless the version is selected.
    """
    name = f"python{version}"
    on_path = [shutil.which(name, path=folder) for folder in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    return [
        *filter(None, on_path),
        *map(str, sorted(pyenv.glob(f"versions/{version}*/bin/{name}"))),
    ]


def can_make_environments(candidate: str, version: str) -> bool:
    """True if this is a Python of that version that can make virtual environments."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        completed = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
    except OSError:
        return False
    return completed.returncode == 0 and completed.stdout.strip() == version


@dataclass(frozen=True)
class Environment:
    """A virtual environment in `folder`/venv, which later runs reuse."""

    python: Python
    folder: Path

    def run(self, *command: str | Path, folder: Path = ROOT, **settings: str) -> None:
        """Run a command of this environment. Raises `RowFailed` if it fails."""
        settings["PATH"] = f"{self.folder}/venv/bin"
        self.python.run(command, folder, self.folder, **settings)

    def has_inputs(self, *text: str) -> bool:
        """True if the environment was made from these inputs by this Python."""
        try:
            return (self.folder / "made-from").read_text() == self._digest(text)
        except FileNotFoundError:
            return False

    def recreate(self) -> None:
        """Recreate the environment without packages."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.python.run(
            [self.python.command, "-m", "venv", self.folder / "venv"], Path("/"), self.folder
        )

    def record_inputs(self, *text: str) -> None:
        """Store a digest of the inputs, so that the environment is recreated when they change."""
        (self.folder / "made-from").write_text(self._digest(text))

    def _digest(self, text: Sequence[str]) -> str:
        return hashlib.sha256("\0".join([repr(self.python), *text]).encode()).hexdigest()
