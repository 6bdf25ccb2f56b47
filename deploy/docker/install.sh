#!/bin/sh
# Installation steps of all images:
#   install.sh requirements FILE     creates the virtual environment /opt/polyreme with exactly the packages of the locked FILE
#   install.sh packages FOLDER...    installs our own distributions into /opt/app
#   install.sh user                  creates the user of the services and their directories
#
# Invariant: pip resolves nothing. It uses /wheels and the index in its variables (build arguments), and trusts the system's CAs and those
# in /certificates.
set -eu

python=${PYTHON:-python3}

pip() {
    if [ -n "$(find /certificates -name '*.crt' -o -name '*.pem')" ]; then
        find /etc/ssl/certs/ca-certificates.crt /certificates '(' -name '*.crt' -o -name '*.pem' ')' -exec cat {} + >/tmp/ca.pem
        export PIP_CERT=/tmp/ca.pem
    fi
    [ -d /tmp/pip ] || "$python" -m venv /tmp/pip
    PIP_FIND_LINKS=/wheels PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
        /tmp/pip/bin/python -m pip "$@"
}

case $1 in
requirements)
    "$python" -m venv --without-pip ${SYSTEM_PACKAGES:+--system-site-packages} /opt/polyreme
    into="--python /opt/polyreme/bin/python install -q --no-deps"
    torch=$(grep '^torch==' "$2" || true)
    if [ -n "$torch" ]; then # the CPU build is not on every index
        # shellcheck disable=SC2086
        pip $into "$torch" || pip $into --index-url "$TORCH_INDEX" "$torch"
    fi
    grep -v '^torch==' "$2" >/tmp/requirements.txt
    # shellcheck disable=SC2086
    pip $into -r /tmp/requirements.txt
    ;;
packages)
    shift
    pip install -q --no-deps "$(grep '^setuptools==' /src/requirements/cpu.txt)"
    for folder in "$@"; do
        pip wheel -q --no-deps --no-build-isolation -w /tmp/ours "$folder"
    done
    pip --python /opt/polyreme/bin/python install -q --no-deps --target /opt/app /tmp/ours/*.whl
    ;;
user)
    # Group 0 has the user's write permissions, so that any other user id works too.
    useradd --uid 10001 --gid 0 --create-home --home-dir /home/polyreme polyreme
    mkdir -p /polyreme/data /polyreme/model /polyreme/plugins /polyreme/tls /runs
    chown -R 10001:0 /polyreme /runs /home/polyreme
    chmod -R g=u /polyreme /runs /home/polyreme
    ;;
esac
