"""Build an image of `docker/`, and run it as compose.yaml says; in a Debian that `debian` has made.

    python3 -m scripts.versions.containers server|worker-gpu BASE.tar

The engine is podman, and Docker's own compose talks to it. No registry of images is needed: the
bases are made by debootstrap, Debian for the server and Ubuntu for the worker, without what
NVIDIA's images add to that. In the places of PostgreSQL's and Prometheus' images stand the same
programs, from Debian's packages. Grafana is no package of Debian.

Containers run in a network namespace of their own: they reach each other and nothing else, and
nothing is changed in this machine's network.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts.versions import debian

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "aardvark-dns",
    "catatonit",
    "debootstrap",
    "docker-compose",
    "iproute2",
    "netavark",
    "nftables",
    "podman",
    "runc",
    "ubuntu-keyring",
)
UBUNTU_MIRROR = os.environ.get("UBUNTU_MIRROR", "http://archive.ubuntu.com/ubuntu")

_SETTINGS = """
[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
"""
"""Limits that every machine can set, as they are no higher than its own."""

# What an image for Python has, whose command is `python`.
_PYTHON = """
FROM localhost/remat-debian
RUN python3 -m venv /opt/python
ENV PATH=/opt/python/bin:$PATH
"""

_POSTGRES = """
FROM localhost/remat-debian
ARG DEBIAN_FRONTEND=noninteractive
RUN groupadd --gid 999 postgres && useradd --uid 999 --gid postgres postgres \\
    && apt-get -qq update && apt-get -qq install --no-install-recommends postgresql \\
    && install --directory --owner postgres --mode 0700 /var/lib/postgresql/data \\
    && ln -s /usr/lib/postgresql/*/bin/* /usr/local/bin/
RUN printf '%s\\n' '#!/bin/sh' 'set -eu' 'cd /var/lib/postgresql/data' \\
    'if [ ! -s PG_VERSION ]; then' \\
    '    echo "$POSTGRES_PASSWORD" > /tmp/password' \\
    '    initdb -D . -U "$POSTGRES_USER" --pwfile=/tmp/password $POSTGRES_INITDB_ARGS' \\
    '    echo "host all all all scram-sha-256" >> pg_hba.conf' \\
    '    echo "CREATE DATABASE $POSTGRES_DB" | postgres --single -D . postgres' \\
    'fi' \\
    'exec postgres -D . -c "listen_addresses=*"' > /entrypoint && chmod 0755 /entrypoint
ENV LANG=C.UTF-8
ENTRYPOINT ["/entrypoint"]
"""

_PROMETHEUS = """
FROM localhost/remat-debian
ARG DEBIAN_FRONTEND=noninteractive
RUN apt-get -qq update && apt-get -qq install --no-install-recommends prometheus \\
    && install --directory --owner nobody /prometheus
ENTRYPOINT ["prometheus"]
"""


def main() -> None:
    target, base = sys.argv[1], Path(sys.argv[2])
    install_engine()
    if not has_image("remat-debian"):
        podman("import", "--quiet", str(base), "localhost/remat-debian")
        build("remat-python", _PYTHON)
    if target == "worker-gpu" and not has_image("remat-ubuntu"):
        import_ubuntu()
    services = compose_services()
    build(services["postgres"]["image"], _POSTGRES)
    build(services["prometheus"]["image"], _PROMETHEUS)
    began = time.monotonic()
    build_target("server", services["api"]["image"])
    tell_of(services["api"]["image"], time.monotonic() - began)
    if target == "worker-gpu":
        began = time.monotonic()
        build_target("worker-gpu", services["worker-gpu"]["image"])
        tell_of(services["worker-gpu"]["image"], time.monotonic() - began)
    alone = ["unshare", "--net", sys.executable, "-m", "scripts.versions.services", target]
    try:
        subprocess.run(alone, check=True)
    finally:
        if target == "worker-gpu":  # gigabytes
            podman("rmi", "--force", named(services["worker-gpu"]["image"]))
        podman("image", "prune", "--force")
        for cache in Path("/var/tmp").glob("buildah-cache-*"):
            shutil.rmtree(cache)


def install_engine() -> None:
    """podman, compose and what they need, where they are missing."""
    installed = Path("/etc/remat-engine")
    if not installed.exists() or installed.read_text() != repr(PACKAGES):
        apt = ["apt-get", "-qq", "-o", "Dpkg::Use-Pty=0"]
        subprocess.run([*apt, "update"], check=True)
        install = [*apt, "install", "--yes", "--no-install-recommends", *PACKAGES]
        subprocess.run(install, check=True, stdout=subprocess.DEVNULL)
        installed.write_text(repr(PACKAGES))
    settings = Path("/etc/containers/containers.conf")
    settings.parent.mkdir(parents=True, exist_ok=True)
    limits = {
        "files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "processes": resource.getrlimit(resource.RLIMIT_NPROC)[1],
    }
    settings.write_text(_SETTINGS.format(**limits))


def import_ubuntu() -> None:
    """Ubuntu 24.04 as an image, without the libraries that NVIDIA's base images add."""
    root = Path("/var/lib/remat-ubuntu")
    shutil.rmtree(root, ignore_errors=True)
    options = ["--variant=minbase", "--components=main,universe", "--include=ca-certificates"]
    keys = "--keyring=/usr/share/keyrings/ubuntu-archive-keyring.gpg"
    subprocess.run(["debootstrap", *options, keys, "noble", root, UBUNTU_MIRROR], check=True)
    subprocess.run(["tar", "-C", root, "-cf", f"{root}.tar", "."], check=True)
    podman("import", "--quiet", f"{root}.tar", "localhost/remat-ubuntu")
    shutil.rmtree(root)
    Path(f"{root}.tar").unlink()


def compose_services() -> dict[str, dict[str, Any]]:
    """The services of compose.yaml, as Docker's compose reads it with every profile on."""
    told = subprocess.run(
        ["docker-compose", "--profile", "*", "config", "--format", "json"],
        cwd=ROOT / "docker",
        check=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(told.stdout)["services"]


# -- images ---------------------------------------------------------------------------------------


def named(image: str) -> str:
    """As Docker completes the name of an image."""
    return f"docker.io/{image}" if "/" in image else f"docker.io/library/{image}"


def podman(*arguments: str) -> None:
    """A command whose names of what it made or removed nobody needs."""
    subprocess.run(["podman", *arguments], check=True, stdout=subprocess.DEVNULL)


def has_image(name: str) -> bool:
    return subprocess.run(["podman", "image", "exists", f"localhost/{name}"]).returncode == 0


def build(name: str, containerfile: str) -> None:
    """Build a small image of our own; quick where nothing has changed."""
    tag = f"localhost/{name}" if name.startswith("remat-") else named(name)
    subprocess.run(
        ["podman", "build", *_OPTIONS, "--tag", tag, "-"],
        input=containerfile.encode(),
        check=True,
        stdout=subprocess.DEVNULL,
    )


def build_target(target: str, name: str) -> None:
    """Build a target of docker/Dockerfile, with this machine's certificates and settings of pip."""
    settings = [debian.CERTIFICATES, Path("/etc/pip.conf")]
    settings += debian.local_indexes(Path("/etc/pip.conf").read_text())
    mounts = [f"--volume={path}:{path}:ro" for path in settings if path.exists()]
    bases = ["PYTHON_IMAGE=localhost/remat-python", "CUDA_IMAGE=localhost/remat-ubuntu"]
    index = [f"TORCH_INDEX={os.environ['TORCH_INDEX']}"] if "TORCH_INDEX" in os.environ else []
    arguments = [f"--build-arg={each}" for each in [*bases, *index]]
    file = ["--file", "docker/Dockerfile", "--target", target, "--tag", named(name)]
    podman("build", *_OPTIONS, "--layers=false", *mounts, *arguments, *file, str(ROOT))


_OPTIONS = ("--quiet", "--isolation=chroot", "--format=docker", "--pull=never")


def tell_of(image: str, took_s: float) -> None:
    """Say how large an image is, and how long it took."""
    command = ["podman", "image", "inspect", "--format", "{{.Size}}", named(image)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(f"{image}: {int(told.stdout) / 1e6:.0f} MB, built in {took_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
