#!/bin/sh
# venv.sh FOLDER [PYTHON]: creates a virtual environment with pip in FOLDER, with a Python that the lock supports.
#
# Without PYTHON it takes the first that works: a supported Python on PATH with its venv module; a supported one that uv finds; one that uv
# downloads into FOLDER/python. Where there is no uv, any Python 3 with pip or venv installs a pinned one into FOLDER/uv.
# Nothing is written outside FOLDER.
set -eu
venv=$1 wanted=${2:-}
lock=$(dirname "$0")
range='>=3.11,<3.14'
downloaded=3.11
export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}" # also those of a proxy that reads along
export UV_CACHE_DIR="${UV_CACHE_DIR:-$venv/cache}"

fail() {
    echo "expected $1; found $2. Fix: $3" >&2
    exit 1
}

is_supported() { # PYTHON
    "$1" -c '
import sys, sysconfig
known = sys.implementation.name == "cpython" and (3, 11) <= sys.version_info[:2] <= (3, 13)
sys.exit(not known or bool(sysconfig.get_config_var("Py_GIL_DISABLED")))' 2>/dev/null
}

has_modules() { # PYTHON MODULE...
    python=$1
    shift
    for module; do "$python" -c "import $module" 2>/dev/null || return 1; done
}

create() { # PYTHON
    echo "using $("$1" -c 'import platform, sys; print("Python", platform.python_version(), "at", sys.executable)')"
    "$1" -m venv "$venv"
}

# The lock needs this platform, since its inference engine and numeric libraries have wheels for no other.
[ "$(uname -sm)" = "Linux x86_64" ] \
    || fail "Linux on x86_64" "$(uname -sm)" "use a Linux machine, a container or WSL 2 (docs/deploy.md)"
rm -f "$venv"/bin/python* # of an interrupted attempt, or of a Python that is gone

if [ -n "$wanted" ]; then
    is_supported "$wanted" || fail "a Python $range at PYTHON" "$("$wanted" -V 2>&1 || true)" "set PYTHON to another one, or to nothing"
    has_modules "$wanted" venv ensurepip || fail "the venv module of $wanted" "none" "on Debian and Ubuntu: apt install python3-venv"
    create "$wanted"
    exit
fi

for python in python3.11 python3.12 python3.13 python3 python; do
    if is_supported "$python" && has_modules "$python" venv ensurepip; then
        create "$python"
        exit
    fi
done

uv=$(command -v uv || true)
for python in python3 python python3.14 python3.13 python3.12 python3.11 python3.10 python3.9; do
    [ -z "$uv" ] || break
    if has_modules "$python" pip; then
        "$python" -m pip install -qq --disable-pip-version-check --target "$venv/uv" -r "$lock/uv.txt" && uv=$venv/uv/bin/uv
    elif has_modules "$python" venv ensurepip; then
        "$python" -m venv "$venv/uv"
        "$venv/uv/bin/pip" install -qq --disable-pip-version-check -r "$lock/uv.txt" && uv=$venv/uv/bin/uv
    fi
done
[ -n "$uv" ] || fail "a Python 3 with venv or pip, or uv" "none on PATH" \
    "install one, for example apt install python3-venv, or set PYTHON=/path/to/python3.11"

if python=$("$uv" python find --system --no-python-downloads "$range" 2>/dev/null) && is_supported "$python"; then
    echo "using $("$python" -V) at $python, with uv"
    "$uv" venv -q --allow-existing --no-python-downloads --python "$python" "$venv"
    "$uv" pip install -q --python "$venv/bin/python" pip
    exit
fi
echo "no Python $range is installed: uv downloads $downloaded (about 30 MB) into $venv/python"
export UV_PYTHON_INSTALL_DIR="${UV_PYTHON_INSTALL_DIR:-$venv/python}"
"$uv" python install --no-bin "$downloaded" \
    || fail "a download of Python $downloaded" "the error above" \
        "set UV_PYTHON_INSTALL_MIRROR or HTTPS_PROXY, or install Python 3.11, 3.12 or 3.13 with its venv module"
create "$("$uv" python find --system --managed-python --no-python-downloads "$downloaded")"
