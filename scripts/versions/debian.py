"""A Debian of our own in a folder, for what the machine's own system may lack: Python 3.13, or an
engine for containers.

debootstrap makes it. Commands run in it as they would on a machine that has nothing else, in mount
and process namespaces of their own: whatever they mount or start is gone when they end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SUITE = "trixie"
PYTHON = "3.13"
"""Of that suite."""

MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
"""Where Debian has them."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_KEPT = re.compile(r"(all|ftp|http|https|no)_proxy|TORCH_INDEX", re.IGNORECASE)
"""Variables of this machine that hold there as well; those of pip are in its settings."""

_ENTER = """
root=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/run"
for folder in /dev /sys; do
    mkdir -p "$root$folder"
    mount --rbind "$folder" "$root$folder"
done
while [ "$1" != -- ]; do
    if [ -d "$1" ]; then
        mkdir -p "$root$1"
    else
        mkdir -p "$(dirname "$root$1")"
        touch "$root$1"
    fi
    mount --rbind "$1" "$root$1"
    shift
done
shift
cd "$root"
mkdir -p mnt
pivot_root . mnt
umount -l /mnt
# Not `exec`: the first process of a namespace has to reap what others leave.
code=0
"$@" || code=$?
exit "$code"
"""


def why_unavailable() -> str:
    """Why none can be made or entered here; empty where it can."""
    if reason := why_not_entered():
        return reason
    if shutil.which("debootstrap") is None:
        return "debootstrap is not installed (Debian: apt-get install debootstrap)"
    return ""


def why_not_entered() -> str:
    """Why no folder can be entered as a system of its own here; empty where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root on Linux can make a Debian in a folder"
    try:
        subprocess.run([*_UNSHARE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        told = getattr(error, "stderr", b"").decode().strip()
        return f"namespaces cannot be made here: {told or error}"
    return ""


_UNSHARE = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")


def make(root: Path) -> None:
    """Make a Debian in `root` where there is none, with Python; and give it this machine's name
    servers, certificates and settings of pip. `root.tar` beside it is what it was before that.

    Raises `subprocess.CalledProcessError` where the packages cannot be had.
    """
    made = root / "etc/debootstrap-ended"
    if not made.exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        include = "--include=ca-certificates,python3-venv"
        subprocess.run(
            ["debootstrap", "--variant=minbase", include, SUITE, root, MIRROR], check=True
        )
        left_out = [f"--exclude=./{path}" for path in ("var/cache/apt/*", "var/lib/apt/lists/*")]
        subprocess.run(["tar", "-C", root, *left_out, "-cf", f"{root}.tar", "."], check=True)
        made.touch()
    shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
    inside = root / CERTIFICATES.relative_to("/")
    if found := _certificates():
        shutil.copyfile(found, inside)
    (root / "etc/pip.conf").write_text(pip_settings(pip_config()))


def enter(root: Path, folder: Path, shared: Sequence[Path] = (), **settings: str) -> list[str]:
    """The words before a command that is to run in `root`, there in `folder`, with the paths
    `shared` of this machine at the same places. `settings` are added to its environment."""
    binds = [str(path) for path in [*shared, *local_indexes(pip_config())]]
    told = [f"{name}={value}" for name, value in {**variables(), **settings}.items()]
    script = ["sh", "-ec", _ENTER, "enter", str(root), *binds, "--"]
    return [*_UNSHARE, *script, "env", "-i", f"--chdir={folder}", *told]


def variables() -> dict[str, str]:
    """The environment of a command in there."""
    kept = {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}
    certificates = {"SSL_CERT_FILE": str(CERTIFICATES)} if _certificates() else {}
    return {**kept, **certificates, "HOME": "/root", "LANG": "C.UTF-8", "PATH": PATH}


def _certificates() -> Path | None:
    """This machine's certificates, which may have more than Debian's: those of a proxy."""
    places = (os.environ.get("SSL_CERT_FILE"), CERTIFICATES, "/etc/pki/tls/certs/ca-bundle.crt")
    return next((Path(place) for place in places if place and Path(place).is_file()), None)


# -- pip ------------------------------------------------------------------------------------------


def pip_config() -> str:
    """What `pip config list` says on this machine."""
    for command in ([sys.executable, "-m", "pip"], ["pip"], ["pip3"]):
        try:
            told = subprocess.run([*command, "config", "list"], capture_output=True, text=True)
        except OSError:
            continue
        if told.returncode == 0:
            return told.stdout
    return ""


def pip_settings(config: str) -> str:
    """The same as a `pip.conf`. Variables of the environment come last, and so win."""
    found: dict[str, dict[str, str]] = {"global": {}}
    if _certificates():
        found["global"]["cert"] = str(CERTIFICATES)
    for section, name, value in re.findall(r"^([\w:-]+)\.([\w-]+)='(.*)'$", config, re.MULTILINE):
        if name != "cert":
            place = "global" if section.startswith(":") else section
            found.setdefault(place, {})[name] = value.replace("\\n", " ").strip()
    lines = []
    for section, values in found.items():
        lines += [f"[{section}]", *(f"{name} = {value}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def local_indexes(config: str) -> list[Path]:
    """Folders of this machine that pip is told to look into.

    An index in a folder, as `file:///packages/simple`, points to files beside it.
    """
    indexes = [Path(found).parent for found in re.findall(r"file://(/[^\s'\\]+)", config)]
    links = [Path(found) for found in re.findall(r"(?<![\w/:])(/[^\s'\\]+)", config)]
    found = {path for path in [*indexes, *links] if path.is_dir() and path != Path("/")}
    return sorted(found)
