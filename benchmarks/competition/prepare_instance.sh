#!/bin/sh
# prepare_instance.sh v1 CATEGORY ONNX VNNLIB: status 1 if a file is missing. ONNX may be several networks, as
# instances.csv has them: [('f', 'f.onnx'), ('g', 'g.onnx')].
set -eu
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
PYTHON=${VERIFIABLE_RELU_PYTHON:-$ROOT/.venv/bin/python}
[ "$1" = v1 ] || { echo "version '$1' of the scripts' interface is not known, only v1" >&2; exit 1; }
PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
# Loads what a run loads, so that it is in the cache of the operating system.
"$PYTHON" - "$3" "$4" <<'END'
import sys

import onnxruntime
import torch

import verifiable_relu.api
from verifiable_relu.files import on_disk
from verifiable_relu.spec.find import onnx_files, paths

missing = [path for each in sys.argv[1:] for path in paths(onnx_files(each)) if not on_disk(path).is_file()]
sys.exit("\n".join(f"{path}: no such file" for path in missing) or 0)
END
