"""Code that may hang, crash or lie runs in processes of its own: `pool` asks, `keeper` forks and ends, `worker` runs the code."""
