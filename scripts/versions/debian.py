"""A separate Debian in a folder, for what the machine's own system may lack.

That is Python 3.13, or a container engine. debootstrap makes it. Commands run in it as on a machine
of its own, in separate mount and process namespaces: their mounts and processes end with them.
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
"""The Python version of that suite."""

MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
"""The path of the certificates in Debian."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_INHERITED = re.compile(r"(all|ftp|http|https|no)_proxy|TORCH_INDEX", re.IGNORECASE)
"""Environment variables that commands inherit. Those of pip are in its configuration file."""

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
# Not `exec`: the first process of a namespace must reap orphaned processes.
code=0
"$@" || code=$?
exit "$code"
"""


def unavailable_reason() -> str:
    """Return why this machine cannot make or enter a Debian; "" if it can."""
    if reason := cannot_enter_reason():
        return reason
    if shutil.which("debootstrap") is None:
        return "debootstrap is not installed (Debian: apt-get install debootstrap)"
    return ""


def cannot_enter_reason() -> str:
    """Return why this machine cannot enter a folder as a separate system; "" if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root on Linux can make a Debian in a folder"
    try:
        subprocess.run([*_UNSHARE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", b"").decode().strip()
        return f"namespaces cannot be made here: {message or error}"
    return ""


_UNSHARE = ("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")


def make(root: Path) -> None:
    """Make a Debian with Python in `root` if it is missing, and copy this machine's settings.

    The settings are name servers, certificates and pip's configuration. `root.tar` next to it is an
    archive without them.

    Raises `subprocess.CalledProcessError` if the packages cannot be downloaded.
    """
    end_marker = root / "etc/debootstrap-ended"
    if not end_marker.exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        include = "--include=ca-certificates,python3-venv"
        subprocess.run(
            ["debootstrap", "--variant=minbase", include, SUITE, root, MIRROR], check=True
        )
        excludes = [f"--exclude=./{path}" for path in ("var/cache/apt/*", "var/lib/apt/lists/*")]
        subprocess.run(["tar", "-C", root, *excludes, "-cf", f"{root}.tar", "."], check=True)
        end_marker.touch()
    shutil.copyfile("/etc/resolv.conf", root / "etc/resolv.conf")
    if certificates := _certificates():
        shutil.copyfile(certificates, root / CERTIFICATES.relative_to("/"))
    (root / "etc/pip.conf").write_text(to_pip_conf(read_pip_config()))


def enter_command(
    root: Path, folder: Path, shared: Sequence[Path] = (), **settings: str
) -> list[str]:
    """Return the prefix of a command that runs it in the system `root`, in `folder`.

    The paths `shared` of this machine are mounted at the same places. `settings` are added to the
    environment.
    """
    binds = [str(path) for path in [*shared, *local_index_folders(read_pip_config())]]
    variables = [f"{name}={value}" for name, value in {**environment(), **settings}.items()]
    script = ["sh", "-ec", _ENTER, "enter", str(root), *binds, "--"]
    return [*_UNSHARE, *script, "env", "-i", f"--chdir={folder}", *variables]


def environment() -> dict[str, str]:
    """Return the environment of a command that runs in the Debian."""
    inherited = {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}
    certificates = {"SSL_CERT_FILE": str(CERTIFICATES)} if _certificates() else {}
    return {**inherited, **certificates, "HOME": "/root", "LANG": "C.UTF-8", "PATH": PATH}


def _certificates() -> Path | None:
    """Return the file of this machine's certificates, which may include those of a proxy."""
    places = (os.environ.get("SSL_CERT_FILE"), CERTIFICATES, "/etc/pki/tls/certs/ca-bundle.crt")
    return next((Path(place) for place in places if place and Path(place).is_file()), None)


# -- pip ------------------------------------------------------------------------------------------


def read_pip_config() -> str:
    """Return the output of `pip config list` on this machine; "" without pip."""
    for command in ([sys.executable, "-m", "pip"], ["pip"], ["pip3"]):
        try:
            listed = subprocess.run([*command, "config", "list"], capture_output=True, text=True)
        except OSError:
            continue
        if listed.returncode == 0:
            return listed.stdout
    return ""


def to_pip_conf(config: str) -> str:
    """Return the output of `pip config list` as the text of a `pip.conf`.

    Environment variables come last in that output, and so take precedence.
    """
    sections: dict[str, dict[str, str]] = {"global": {}}
    if _certificates():
        sections["global"]["cert"] = str(CERTIFICATES)
    for section, name, value in re.findall(r"^([\w:-]+)\.([\w-]+)='(.*)'$", config, re.MULTILINE):
        if name != "cert":
            target = "global" if section.startswith(":") else section
            sections.setdefault(target, {})[name] = value.replace("\\n", " ").strip()
    lines = []
    for section, values in sections.items():
        lines += [f"[{section}]", *(f"{name} = {value}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def local_index_folders(config: str) -> list[Path]:
    """Return the local folders that pip's configuration names.

    An index in a folder, such as `file:///packages/simple`, refers to files in its parent folder.
    """
    indexes = [Path(path).parent for path in re.findall(r"file://(/[^\s'\\]+)", config)]
    links = [Path(path) for path in re.findall(r"(?<![\w/:])(/[^\s'\\]+)", config)]
    return sorted({path for path in [*indexes, *links] if path.is_dir() and path != Path("/")})
