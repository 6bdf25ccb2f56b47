"""Processes for untrusted code: `pool` schedules items, `keeper` forks and ends the workers, `worker` runs the code."""
