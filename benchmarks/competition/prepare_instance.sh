#!/bin/sh
# prepare_instance.sh v1 CATEGORY ONNX VNNLIB: status 1 if a file is missing.
set -eu
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
PYTHON=${VERIFIABLE_RELU_PYTHON:-$ROOT/.venv/bin/python}
[ "$1" = v1 ] || { echo "version '$1' of the scripts' interface is not known, only v1" >&2; exit 1; }
for file in "$3" "$4"; do
    [ -f "$file" ] || [ -f "$file.gz" ] || { echo "$file: no such file" >&2; exit 1; }
done
# Loads what a run loads, so that it is in the cache of the operating system.
cd "$ROOT" && "$PYTHON" -c "import torch, onnxruntime, verifiable_relu.api"
