#!/usr/bin/env bash
# Makes the Python environment of this checkout, or reuses it, and prints its folder.
#
# It holds exactly constraints.txt and is shared by every checkout with the same pins. The project
# itself comes in through PYTHONPATH (env.sh), together with a folder of metadata inside the
# checkout in which SGLang finds our entry points: two checkouts never replace each other.
# DFLASH_SGLANG_VENV says where the environment is kept; by default in the user's cache folder.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
pins="$root/constraints.txt"
uv_release="uv==0.13.9"
need_gb=13 # 11.4 GB, measured
hash="$(sha256sum "$pins")"
key="${hash:0:12}"
venv="${DFLASH_SGLANG_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/dflash_sglang/$key}"
[[ $venv = /* ]] || venv="$PWD/$venv"
venv="${venv%/}"
parent="$(dirname "$venv")"
python="$venv/bin/python"
marker="$venv/dflash_sglang.key" # empty until the environment is complete
scratch="$venv/tmp"              # on the same disk: /tmp may be a small one in memory
log="$venv/install.log"
step="" # the process that is running

# Standard output is for the folder.
say() { printf 'dflash_sglang: %s\n' "$@" >&2; }

die() {
    say "$@"
    exit 1
}

is_ready() { [[ -x $python && -e $marker && $(<"$marker") = "$key" ]]; }

is_foreign() { [[ ! -e $marker && -n $(ls -A "$venv" 2>/dev/null) ]]; }

# Accepts an environment that somebody else made when it holds the project's requirements.
check_foreign() {
    local missing="a Python"
    [[ ! -x $python ]] || missing="$(
        "$python" -I - "$root/pyproject.toml" 2>&1 <<'END'
import importlib.metadata, pathlib, sys, tomllib
project = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())["project"]
clean = lambda name: name.lower().replace("_", "-")
found = [(clean(d.name), d.version) for d in importlib.metadata.distributions()]
have = {name for name, _ in found} | {f"{name}=={version}" for name, version in found}
wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
print(*[want for want in wanted if clean(want.partition(">=")[0]) not in have])
END
    )" || missing="Python 3.11 or newer"
    [[ -z $missing ]] || die "$venv was not made by this script, so it is left alone; it lacks:" \
        "  $missing" "install with: $python -m pip install --no-deps -r $pins" \
        "or set DFLASH_SGLANG_VENV to another folder"
}

# A Python that can make an environment; 3.11 first: the pins were tested with it.
find_python() {
    local candidate found=""
    for candidate in python3.11 python3.12 python3.13 python3; do
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        found="${found:-$candidate}"
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    [[ -n $found ]] || die "Python 3.11 or newer is needed and not on PATH;" \
        "on Debian or Ubuntu: sudo apt install python3 python3-venv"
    die "$found has no module venv or ensurepip; on Debian or Ubuntu: sudo apt install $found-venv"
}

check_space() {
    local free
    free="$(df -Pk "$parent" | awk 'NR == 2 {print int($4 * 1024 / 1e9)}')"
    ((free >= need_gb)) || die "the environment needs $need_gb GB in $parent, $free GB are free;" \
        "make room or set DFLASH_SGLANG_VENV to a folder on another disk"
}

# Runs a command with its output in the log. Progress is one line that rewrites itself on a
# terminal, elsewhere a line every 30 seconds.
follow() {
    local begin=$SECONDS next=0 interval=30 before="" after=$'\n' status=0
    [[ ! -t 2 ]] || interval=1 before=$'\r' after=$'\e[K'
    "$@" >>"$log" 2>&1 </dev/null &
    step=$!
    while kill -0 "$step" 2>/dev/null; do
        if ((SECONDS - begin >= next)); then
            next=$((SECONDS - begin + interval))
            printf '%s  %3d s  %.70s%s' "$before" "$SECONDS" "$(tail -n 1 "$log")" "$after" >&2
        fi
        sleep 0.2
    done
    wait "$step" || status=$?
    step=""
    [[ ! -t 2 ]] || printf '\r\e[K' >&2
    return "$status"
}

# With uv, from PATH or from the package index; fails when neither works.
install_with_uv() {
    local uv index
    if ! uv="$(command -v uv)"; then
        follow "$python" -m pip install --progress-bar off --target "$scratch/uv" "$uv_release" ||
            return
        uv="$scratch/uv/bin/uv"
        # On the same disk files are linked, not copied. The user's own uv has its own cache.
        export UV_CACHE_DIR="$scratch/cache"
    fi
    # uv does not read pip's settings.
    index="${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}"
    [[ -z $index ]] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
    export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-120}"
    follow "$uv" pip install --python "$python" --no-deps --compile-bytecode -r "$pins"
}

# Several times slower: pip unpacks on one core.
install_with_pip() {
    follow "$python" -m pip install --no-input --no-cache-dir --progress-bar off --no-compile \
        --no-deps -r "$pins" || return
    # Some packages bring templates that are not Python: compileall reports those and goes on.
    follow "$python" -m compileall -q -j 0 "$venv/lib" || true
}

make_environment() {
    local system other
    system="$(find_python)" || exit
    check_space
    if [[ -e $marker ]]; then
        say "removing an interrupted set-up, or one with other pins: $venv"
        rm -rf "$venv"
    fi
    say "making the environment $venv" \
        "  SGLang with its CUDA build of PyTorch: 4 GB to download, 11 GB on disk; done once"
    for other in "$parent"/*/pyvenv.cfg; do
        [[ -n ${DFLASH_SGLANG_VENV-} || ! -e $other ]] ||
            say "  an environment with other pins, may be deleted: $(dirname "$other")"
    done
    mkdir -p "$venv"
    : >"$marker" # first of all: what has it is ours
    : >"$log"
    mkdir "$scratch"
    # Neither the caller's packages nor the caller's settings belong to it.
    unset "${!PYTHON@}"
    export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 TMPDIR="$scratch"
    if ! follow "$system" -m venv "$venv" || ! install_with_uv; then
        say "uv could not install; trying pip (log: $log)"
        need_gb=16 check_space # it keeps 4 GB of wheels until all are unpacked
        install_with_pip ||
            die "the environment could not be made; log: $log" "$(tail -n 15 "$log")"
    fi
    rm -rf "$scratch"
    printf '%s' "$key" >"$marker"
    say "the environment is complete after $SECONDS s"
}

# The lines of metadata that `pip install` would write for this checkout, out of pyproject.toml.
write_metadata() {
    local source="$root/pyproject.toml" folder="$root/build/dist-info/dflash_sglang.dist-info"
    [[ ! $folder/entry_points.txt -nt $source ]] || return 0
    mkdir -p "$folder"
    # Moved into place: another start reads the whole file or the old one.
    sed -n 's/^name = "\(.*\)"/Name: \1/p; s/^version = "\(.*\)"/Version: \1/p' \
        "$source" >"$folder/$$"
    mv "$folder/$$" "$folder/METADATA"
    sed -n '/^\[project.entry-points/,/^$/ {s/.*"\(.*\)"\]/[\1]/; s/"//g; p}' \
        "$source" >"$folder/$$"
    mv "$folder/$$" "$folder/entry_points.txt"
}

if ! is_ready && is_foreign; then
    check_foreign
elif ! is_ready; then
    mkdir -p "$parent" 2>/dev/null && touch "$parent/.${venv##*/}.lock" 2>/dev/null ||
        die "cannot write to $parent; set DFLASH_SGLANG_VENV to a folder that can be written"
    # The steps hold the lock too: should this script be killed, the next one waits for them.
    exec 9>"$parent/.${venv##*/}.lock"
    flock -n 9 || { say "another process is preparing $venv; waiting for it" && flock 9; }
    trap 'kill $step 2>/dev/null || true; wait
        say "interrupted; the next start makes the environment anew"; exit 130' INT TERM HUP
    is_ready || make_environment
    exec 9>&-
fi
write_metadata
echo "$venv"
