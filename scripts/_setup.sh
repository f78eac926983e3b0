# Read by the other scripts (POSIX sh), in the root of the checkout: sets VENV to a virtual environment with everything
# in it, and makes or renews it where pyproject.toml or constraints.txt changed. Says so on one line, asks nothing.

PATH="$PATH:/usr/sbin:/sbin" # where Debian puts mosquitto
ROOT=$(pwd -P)

find_python() {
    for name in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3.14 python3 python; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "error: no Python >= 3.11 with venv here: install python3.11 (on Debian also python3-venv), or set PYTHON" >&2
    return 1
}

ready() { # the environment in $1 is whole, and of these files
    [ "$(cat "$1/stamp" 2>/dev/null)" = "$STAMP" ] && "$1/bin/python" -c '' 2>/dev/null
}

writable() { # $1 can be made, or is ours already: a directory of somebody else's under /tmp is not
    (umask 077 && mkdir -p "$(dirname "$1")") 2>/dev/null && [ -w "$(dirname "$1")" ] && { [ ! -e "$1" ] || [ -O "$1" ]; }
}

STAMP="$ROOT $(cat pyproject.toml constraints.txt | cksum)"
KEY=$(printf %s "$ROOT" | cksum | cut -d' ' -f1)
VENV=
for place in "$ROOT/.venv" "${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/edgesplit/venv-$KEY" "${TMPDIR:-/tmp}/edgesplit-$(id -u)/venv-$KEY"; do
    if ready "$place"; then VENV=$place && break; fi
    if [ -z "$VENV" ] && writable "$place"; then VENV=$place; fi
done
[ -n "$VENV" ] || { echo "error: neither this checkout nor the home nor /tmp can be written: set TMPDIR" >&2 && exit 1; }

if ! ready "$VENV"; then
    PYTHON=$(find_python) || exit 1
    echo "setting up $VENV with $("$PYTHON" --version) (minutes the first time)" >&2
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || "$PYTHON" -m venv --clear "$VENV"
    rm -f "$VENV/stamp"
    "$VENV/bin/python" -m pip install --quiet --no-input --disable-pip-version-check -c constraints.txt -e '.[all,dev]' >&2
    echo "$STAMP" >"$VENV/stamp"
fi

# Caches live beside the environment, which is writable where the checkout may not be.
export MYPY_CACHE_DIR="$VENV/cache/mypy" RUFF_CACHE_DIR="$VENV/cache/ruff" HYPOTHESIS_STORAGE_DIRECTORY="$VENV/cache/hypothesis"
