#!/bin/sh
# install_tool.sh v1: make the environment with its pinned versions.
set -eu
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
PYTHON=${VERIFIABLE_RELU_PYTHON:-$ROOT/.venv/bin/python}
[ "$1" = v1 ] || { echo "version '$1' of the scripts' interface is not known, only v1" >&2; exit 1; }
exec python3 "$ROOT/dev.py" run python -c "import verifiable_relu"
