# The password comes by standard input: a command line is for everybody to read.
exec redis-server --dir /data --appendonly yes --appendfsync always --maxmemory-policy noeviction --save '' - <<END
requirepass $POLYREME_REDIS_PASSWORD
END
