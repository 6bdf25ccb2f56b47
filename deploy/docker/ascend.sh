#!/bin/bash
# Runs a command in CANN's environment, which the base image sets only for interactive shells.
for file in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/nnal/atb/set_env.sh; do
    # shellcheck disable=SC1090
    [ -f "$file" ] && source "$file"
done
exec "$@"
