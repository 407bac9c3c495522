# Puts the project's environment in front, for bash:  . launch/env.sh
# Makes it first where it is missing (see environment.py). DFLASH_SGLANG_VENV says where it is kept.

_dflash_python() {
    local candidate newest=""
    # 3.11 first: the pins were tested with it.
    for candidate in python3.11 python3.12 python3.13 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            newest="${newest:-$candidate}"
            if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
                echo "$candidate"
                return 0
            fi
        fi
    done
    echo "$newest"
    [ -n "$newest" ]
}

_dflash_activate() {
    local root python lines
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)" || return 1
    if ! python="$(_dflash_python)"; then
        echo "dflash_sglang: Python 3.11 or newer is needed and not on PATH;" \
            "on Debian or Ubuntu: sudo apt install python3 python3-venv" >&2
        return 1
    fi
    lines="$(PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$python" -P -m launch.environment)" || return
    eval "$lines"
}

_dflash_activate
