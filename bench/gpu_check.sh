#!/usr/bin/env bash
# Checks and times the kernels on a GPU; arguments and needs are those of `python -m bench.gpu`.
# Uses the Python that is first on PATH, or $PYTHON: nothing is installed, SGLang is not needed.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
export PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python}" -P -m bench.gpu "$@"
