# The password comes from standard input, since every user can read command lines.
exec redis-server --dir /data --appendonly yes --appendfsync always --maxmemory-policy noeviction --save '' - <<END
requirepass $POLYREME_REDIS_PASSWORD
END
