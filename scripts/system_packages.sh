#!/usr/bin/env bash
# Install the Debian packages that some tests need, where they are missing and we may: as root, on a
# system with apt. Never fails; says which tests will be skipped. NO_SYSTEM_PACKAGES=1 only says that.
# Arguments name others than PostgreSQL, Chromium and g++: debootstrap, for `make test-versions`.
set -uo pipefail

has_postgresql() { compgen -G '/usr/lib/postgresql/*/bin/initdb' || command -v initdb; } >/dev/null
has_g++() { command -v g++; } >/dev/null
has_debootstrap() { command -v debootstrap; } >/dev/null
has_chromium() { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null

missing() {
    for package in "${needed[@]}"; do
        "has_$package" || echo "$package"
    done
}

install() {
    export DEBIAN_FRONTEND=noninteractive
    # RUNLEVEL=1: install the PostgreSQL server, but start none; tests start their own.
    local apt=(timeout 900 apt-get -qq -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0)
    "${apt[@]}" update || return
    for package in "$@"; do
        RUNLEVEL=1 "${apt[@]}" install --yes --no-install-recommends "$package" || return
    done
}

needed=("$@")
if [ $# -eq 0 ]; then
    needed=(postgresql chromium g++)
fi
mapfile -t wanted < <(missing)
if [ ${#wanted[@]} -eq 0 ]; then
    exit 0
fi
if [ -z "${NO_SYSTEM_PACKAGES:-}" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "installing Debian packages for tests: ${wanted[*]}"
    if ! log=$(install "${wanted[@]}" 2>&1 </dev/null); then
        echo "$log" | tail -n 5
    fi
fi
for package in $(missing); do
    case $package in
        postgresql) what="the store on PostgreSQL" ;;
        chromium) what="the page in a browser" ;;
        g++) what="torch.compile" ;;
        debootstrap) what="images and of Pythons that are missing" ;;
    esac
    echo "$package is not installed: the tests of $what are skipped"
done
exit 0
