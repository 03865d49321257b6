#!/usr/bin/env bash
# Install the pinned torch into the environment whose Python is $1.
#
# TORCH_INDEX, if set, is the package index to take it from, e.g.
#   https://download.pytorch.org/whl/cpu   (small, no GPU)
#   https://download.pytorch.org/whl/cu130
# Otherwise the default index decides: on Linux that is the CUDA build, unless pip is configured to
# prefer another. On a machine with an NVIDIA GPU, a torch without CUDA is replaced by the build whose
# version is exactly the pinned one, without a local suffix like +cpu.
set -euo pipefail

python=$1
pin=$(grep -E '^torch==' constraints.txt)

if [ -n "${TORCH_INDEX:-}" ]; then
    "$python" -m pip install --quiet --index-url "$TORCH_INDEX" "$pin"
    exit 0
fi

has_cuda() { "$python" -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; }

if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    # "===" compares the text of the version: 2.13.0 matches, 2.13.0+cpu does not.
    has_cuda || "$python" -m pip install --quiet --upgrade "${pin/==/===}"
else
    "$python" -m pip install --quiet "$pin"
fi
