#!/usr/bin/env bash
# Runs tests where everything is slow: RUNS times beside BUSY busy loops, once with tasks that are delayed at random
# (tests/support/jitter.py), then once on a single core. Every run must pass.
#
# The tests are those of `make test`, or of another TARGET. Arguments, if there are any, go to pytest instead.
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${RUNS:-3} busy=${BUSY:-4} target=${TARGET:-test}

unset PYTHONDONTWRITEBYTECODE # as the Makefile does

loops=()
quiet() {
    ((${#loops[@]} == 0)) || kill "${loops[@]}"
    loops=()
}
trap quiet EXIT
trap 'exit 130' INT TERM

suite() { # SEED [ARGUMENT...]
    local seed=$1
    shift
    if (($#)); then
        .venv/bin/pytest --randomly-seed="$seed" "$@"
    else
        make --no-print-directory "$target" SEED="$seed"
    fi
}

failed=()
for _ in $(seq "$busy"); do
    timeout 12h bash -c 'while :; do :; done' & # ends by itself, should this script be killed
    loops+=($!)
done
for run in $(seq "$runs"); do
    echo "== beside $busy busy loops, $run of $runs"
    suite "$run" "$@" || failed+=("beside busy loops, --randomly-seed=$run")
done
quiet
echo "== with delayed tasks"
JITTER=1 suite "$((runs + 1))" "$@" || failed+=("with delayed tasks, JITTER=1 --randomly-seed=$((runs + 1))")
echo "== on one core"
taskset -p -c 0 $$ >/dev/null
suite 0 "$@" || failed+=("on one core, --randomly-seed=0")

if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
