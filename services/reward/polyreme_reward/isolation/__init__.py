"""Processes for code that may hang, crash or lie: `pool` schedules items, `keeper` forks and ends, `worker` runs the code."""
