#!/usr/bin/env bash
# node.sh RANK NODES ADDRESS [OVERRIDE ...]: the part of a run on several machines that machine RANK of NODES has. ADDRESS is machine 0's.
#
# Machine 0 has Redis, the rewards and the trainer, machines 1 to LEARNERS - 1 the learner's other nodes, and the rest a replica for each
# of their cards. deploy/slurm and deploy/skypilot start it everywhere; it ends with the run.
#
# Variables: CONFIG (run.yaml), RUNS (folder of runs; one file system for all machines of the learner), LEARNERS (1), CARDS (this machine's
# cards; 0 for a CPU), REDIS_PORT (6379), POLYREME_REDIS_PASSWORD, POLYREME_TOKEN.
set -euo pipefail
{ # bash reads to the closing brace before it runs anything, so the checkout may change meanwhile
rank=$1 nodes=$2 address=$3
shift 3
: "${CONFIG:?the path of run.yaml}" "${RUNS:?the folder of runs}"
: "${POLYREME_REDIS_PASSWORD:?openssl rand -hex 24, the same on all machines}" "${POLYREME_TOKEN:?openssl rand -hex 24, the same on all machines}"
learners=${LEARNERS:-1} cards=${CARDS:-0} port=${REDIS_PORT:-6379}
if ((nodes <= learners)); then
    echo "expected more machines than LEARNERS=$learners, for the replicas; found $nodes. Fix: ask for more, or run polyreme up on one" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export POLYREME_REDIS=redis://$address:$port/0 POLYREME_WAIT=3600 POLYREME_REDIS_PASSWORD POLYREME_TOKEN
services=()

answers() { timeout 5 bash -c "</dev/tcp/$address/$port" 2>/dev/null; }

# Starts a service again when it fails, at most 20 times, until it has seen the end of the run (status 0) or machine 0 has ended.
keep() {
    for _ in {1..150}; do
        if answers; then break; fi
        sleep 2
    done
    local service
    for _ in {1..20}; do
        "$@" &
        service=$!
        trap 'kill "$service"; wait "$service"; exit' TERM # the shell alone would leave it behind
        wait "$service" && return 0
        answers || return 0
        sleep 5
    done
    echo "failed 20 times: $*" >&2
    return 1
}

finish() { ((${#services[@]} == 0)) || { kill "${services[@]}" && wait "${services[@]}"; } 2>/dev/null || true; }
trap finish EXIT

if ((rank == 0)); then
    mkdir -p "$RUNS/redis/bin"
    ln -sf "$(python3 -c 'from polyreme.experience.embedded_redis import redis_binary; print(redis_binary())')" "$RUNS/redis/bin/redis-server"
    PATH=$RUNS/redis/bin:$PATH STATE=$RUNS/redis PORT=$port sh "$here/../helm/polyreme/files/redis.sh" server &
    services+=($!)
    keep polyreme reward &
    services+=($!)
    overrides=("output_dir=$RUNS" security.token_env=POLYREME_TOKEN "$@")
    ((learners == 1)) || overrides+=("trainer.parallel.nodes=$learners")
    polyreme train "$CONFIG" "${overrides[@]}" --resume &
    trainer=$!
    echo "$trainer" >"$RUNS/trainer.pid" # SIGTERM to it alone: it finishes the iteration and saves
    wait "$trainer"
elif ((rank < learners)); then
    keep polyreme learner --node "$rank"
elif ((cards == 0)); then
    keep polyreme rollout
else
    for ((card = 0; card < cards; card++)); do
        CUDA_VISIBLE_DEVICES=$card ASCEND_RT_VISIBLE_DEVICES=$card keep polyreme rollout &
        services+=($!)
    done
    wait "${services[@]}"
fi
exit
}
