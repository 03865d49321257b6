#!/usr/bin/env bash
# Write constraints.txt: the exact versions of all packages that a new environment gets today.
# $1 is the Python of that environment; TORCH_INDEX as in install_torch.sh. With a CPU build of torch,
# the line of triton must be corrected by hand: that build does not require the version that fits.
set -euo pipefail

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$1" -m venv "$scratch/venv"
python=$scratch/venv/bin/python
"$python" -m pip install --quiet --upgrade pip
"$python" -m pip install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
"$python" -m pip install --quiet '.[cli,hf,postgres,ray,server,viz]' --group dev

{
    echo "# Exact versions of the development environment, made by \`make lock\` ($("$python" -V))."
    echo "# Without the dependencies of CUDA builds of torch: torch pins these itself. triton is the"
    echo "# version that they pin; a CPU build names none."
    echo "# torch has no local suffix, so that any build of that version fits."
    "$python" -m pip freeze --all --exclude remat |
        grep -v -i -E '^(nvidia|cuda|pytorch-triton)' |
        sed -E 's/\+[A-Za-z0-9.]+$//'
} >"$scratch/constraints.txt"
mv "$scratch/constraints.txt" constraints.txt
