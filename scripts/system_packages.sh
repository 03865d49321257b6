#!/usr/bin/env bash
# Install missing Debian packages that some tests need, if run as root on a system with apt.
# Never fails; prints which tests will be skipped. NO_SYSTEM_PACKAGES=1 installs nothing.
# Arguments replace the default packages PostgreSQL, Chromium and g++, as `make test-versions` does.
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
    # RUNLEVEL=1: install the PostgreSQL server without starting it; tests start their own.
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
mapfile -t missing_packages < <(missing)
if [ ${#missing_packages[@]} -eq 0 ]; then
    exit 0
fi
if [ -z "${NO_SYSTEM_PACKAGES:-}" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    echo "installing Debian packages for tests: ${missing_packages[*]}"
    if ! log=$(install "${missing_packages[@]}" 2>&1 </dev/null); then
        echo "$log" | tail -n 5
    fi
fi
for package in $(missing); do
    case $package in
        postgresql) subject="the store on PostgreSQL" ;;
        chromium) subject="the page in a browser" ;;
        g++) subject="torch.compile" ;;
        debootstrap) subject="images and of missing Python versions" ;;
    esac
    echo "$package is not installed: the tests of $subject are skipped"
done
exit 0
