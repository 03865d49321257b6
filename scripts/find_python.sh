#!/usr/bin/env bash
# Print the first Python of 3.11 or newer; $PYTHON is tried first.
set -euo pipefail

for candidate in ${PYTHON:-} python3.12 python3.11 python3.13 python3 python; do
    if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        command -v "$candidate"
        exit 0
    fi
done
echo "remat needs Python 3.11 or newer: install one, or name it: make PYTHON=/path/to/python" >&2
exit 1
