"""Build an image of `docker/` and run it by compose.yaml, inside of a Debian made by `debian`.

    python3 -m scripts.versions.containers server|worker-gpu BASE.tar

The engine is podman, controlled by Docker's own compose. No image registry is needed: debootstrap
makes the base images, Debian for the server and Ubuntu for the worker, without the libraries that
NVIDIA's images add. PostgreSQL and Prometheus come from Debian's packages instead of their images.
Grafana is left out, because Debian has no package of it.

Containers run in a separate network namespace: they reach each other and nothing else, and this
machine's network is not changed.
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
"""Engine settings with limits that any machine can set, as they are not above its own."""

# The base image of Python, whose command is `python`.
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
    && install --directory --owner 65534 /prometheus
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
    print_image_size(services["api"]["image"], time.monotonic() - began)
    if target == "worker-gpu":
        began = time.monotonic()
        build_target("worker-gpu", services["worker-gpu"]["image"])
        print_image_size(services["worker-gpu"]["image"], time.monotonic() - began)
    command = ["unshare", "--net", sys.executable, "-m", "scripts.versions.services", target]
    try:
        subprocess.run(command, check=True)
    finally:
        if target == "worker-gpu":  # it has several GB
            podman("rmi", "--force", full_image_name(services["worker-gpu"]["image"]))
        podman("image", "prune", "--force")
        for cache in Path("/var/tmp").glob("buildah-cache-*"):
            shutil.rmtree(cache)


def install_engine() -> None:
    """Install podman, compose and their dependencies if they are missing, and set limits."""
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
    """Import Ubuntu 24.04 as an image, without the libraries that NVIDIA's base images add."""
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
    """Return the services of compose.yaml with all profiles, as Docker's compose reads it."""
    completed = subprocess.run(
        ["docker-compose", "--profile", "*", "config", "--format", "json"],
        cwd=ROOT / "docker",
        check=True,
        stdout=subprocess.PIPE,
    )
    return json.loads(completed.stdout)["services"]


# -- images ---------------------------------------------------------------------------------------


def full_image_name(image: str) -> str:
    """Return the image name with registry, as Docker completes it."""
    return f"docker.io/{image}" if "/" in image else f"docker.io/library/{image}"


def podman(*arguments: str) -> None:
    """Run a podman command without its output."""
    subprocess.run(["podman", *arguments], check=True, stdout=subprocess.DEVNULL)


def has_image(name: str) -> bool:
    """True if a local image with this name exists."""
    return subprocess.run(["podman", "image", "exists", f"localhost/{name}"]).returncode == 0


def build(name: str, containerfile: str) -> None:
    """Build a helper image from the text of its container file; podman caches the layers."""
    tag = f"localhost/{name}" if name.startswith("remat-") else full_image_name(name)
    subprocess.run(
        ["podman", "build", *_OPTIONS, "--tag", tag, "-"],
        input=containerfile.encode(),
        check=True,
        stdout=subprocess.DEVNULL,
    )


def build_target(target: str, name: str) -> None:
    """Build a target of docker/Dockerfile, with this machine's certificates and pip settings."""
    settings = [debian.CERTIFICATES, Path("/etc/pip.conf")]
    settings += debian.local_index_folders(Path("/etc/pip.conf").read_text())
    mounts = [f"--volume={path}:{path}:ro" for path in settings if path.exists()]
    bases = ["PYTHON_IMAGE=localhost/remat-python", "CUDA_IMAGE=localhost/remat-ubuntu"]
    index = [f"TORCH_INDEX={os.environ['TORCH_INDEX']}"] if "TORCH_INDEX" in os.environ else []
    arguments = [f"--build-arg={argument}" for argument in [*bases, *index]]
    file = ["--file", "docker/Dockerfile", "--target", target, "--tag", full_image_name(name)]
    podman("build", *_OPTIONS, "--layers=false", *mounts, *arguments, *file, str(ROOT))


_OPTIONS = ("--quiet", "--isolation=chroot", "--format=docker", "--pull=never")


def print_image_size(image: str, took_s: float) -> None:
    """Print the size of an image, and the seconds of its build."""
    command = ["podman", "image", "inspect", "--format", "{{.Size}}", full_image_name(image)]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    print(f"{image}: {int(completed.stdout) / 1e6:.0f} MB, built in {took_s:.0f} s", flush=True)


if __name__ == "__main__":
    main()
