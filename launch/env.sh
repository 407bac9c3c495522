# Puts the project's environment and this checkout in front, for bash:  . launch/env.sh
# Makes the environment first where it is missing: see setup.sh.

_dflash_activate() {
    local root venv
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)" || return
    venv="$("$root/launch/setup.sh")" || return
    _dflash_front PYTHONPATH "$root:$root/kernels:$root/build/dist-info"
    _dflash_front PATH "$venv/bin"
    export VIRTUAL_ENV="$venv"
}

# Puts entries in front of a variable; those of an earlier activation do not pile up.
_dflash_front() {
    local rest=":${!1-}:"
    rest="${rest//":$2:"/:}"
    rest="${rest#:}"
    rest="${rest%:}"
    export "$1=$2${rest:+:$rest}"
}

_dflash_activate
