#!/usr/bin/env bash
# The acceptance run. Needs a Python with CUDA torch, transformers and pytest; no .venv, no network.
# Other dependencies of remat are installed from build/gpu-wheels (scripts/gpu_wheels.py).
# $PYTHON names the Python; arguments go to `python -m benchmarks.gpu`, whose exit code is returned.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
wheels=build/gpu-wheels site=build/gpu-site
has_all() { "$PYTHON" -c 'import highspy, pulp, pydantic'; }
if ! has_all 2>/dev/null && compgen -G "$wheels/*.whl" >/dev/null; then
    if [ ! -d "$site" ] || [ "$wheels" -nt "$site" ]; then
        rm -rf "$site"
        "$PYTHON" -m pip --disable-pip-version-check install --quiet --no-index --no-deps \
            --target "$site" "$wheels"/*.whl
        touch "$site"
    fi
    PYTHONPATH="$PWD/$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD/solver:$PWD/server${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m benchmarks.gpu "$@"
