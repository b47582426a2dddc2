#!/bin/sh
# run_instance.sh v1 CATEGORY ONNX VNNLIB RESULT_FILE TIMEOUT
set -eu
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
PYTHON=${VERIFIABLE_RELU_PYTHON:-$ROOT/.venv/bin/python}
[ "$1" = v1 ] || { echo "version '$1' of the scripts' interface is not known, only v1" >&2; exit 1; }
PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(nproc)}
export PYTHONPATH OMP_NUM_THREADS
status=0
"$PYTHON" -m verifiable_relu.solver verify "$4" --net "$3" --timeout "$6" >"$5.part" || status=$?
[ $status = 0 ] || echo error >"$5.part"
# The standard writes timed-out where the competition writes timeout.
sed '1s/^timed-out$/timeout/' "$5.part" >"$5"
rm -f "$5.part"
