#!/bin/sh
# redis.sh server: a Redis that keeps every acknowledged write. With FIRST set, one of three nodes that Sentinels watch.
# redis.sh sentinel: this node's Sentinel.
#
# FIRST: address of the node that is primary before any failover. NODE: address of this one. BIND, PORT: where a server listens.
# STATE: folder of the data. MEMORY: bytes that the container may use. Servers read the password from standard input or a file, since every user can read command lines.
#
# A node that returns takes its own Sentinel's word for who is primary. If that is old, it may start as a second primary, but takes no
# write: no replica follows it. The Sentinels make it a replica within seconds.
set -eu
state=${STATE:-/data}/sentinel.conf
primary=$(sed -n 's/^sentinel monitor polyreme \([^ ]*\) .*/\1/p' "$state" 2>/dev/null || true)
primary=${primary:-${FIRST:-}}
bind=${BIND:-* -::*}

case $1 in
server)
    settings="bind $bind
port ${PORT:-6379}
requirepass $POLYREME_REDIS_PASSWORD
dir ${STATE:-/data}
appendonly yes
appendfsync always
maxmemory-policy noeviction
save \"\""
    [ -z "${MEMORY:-}" ] || settings="$settings
maxmemory $((MEMORY / 4 * 3))" # beyond it Redis refuses writes; the kernel would kill it, at each start again
    [ -z "$primary" ] || settings="$settings
masterauth $POLYREME_REDIS_PASSWORD
replica-announce-ip $NODE
min-replicas-to-write 1
min-replicas-max-lag 10"
    [ "$primary" = "${NODE:-}" ] || settings="$settings
replicaof $primary 6379"
    exec redis-server - <<END
$settings
END
    ;;
sentinel)
    if [ ! -e "$state" ]; then # a Sentinel rewrites its file
        umask 077
        cat >"$state.new" <<END
port 26379
bind $bind
requirepass $POLYREME_REDIS_PASSWORD
sentinel sentinel-pass $POLYREME_REDIS_PASSWORD
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel announce-ip $NODE
sentinel monitor polyreme $primary 6379 2
sentinel auth-pass polyreme $POLYREME_REDIS_PASSWORD
sentinel down-after-milliseconds polyreme 5000
sentinel failover-timeout polyreme 30000
END
        mv "$state.new" "$state"
    fi
    exec redis-server "$state" --sentinel
    ;;
esac
