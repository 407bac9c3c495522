#!/usr/bin/env bash
# Serves on a GPU in every way and measures; arguments and needs are those of
# `python -m bench.gpu.serve`. Uses $PYTHON, into which the package was installed, or makes the
# project's own environment.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
if [[ -n ${PYTHON-} ]]; then
    export PYTHONPATH="$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}"
else
    . "$root/launch/env.sh"
    PYTHON=python
fi
exec "$PYTHON" -P -m bench.gpu.serve "$@"
