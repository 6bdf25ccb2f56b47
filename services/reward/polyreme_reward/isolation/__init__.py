"""Worker processes for untrusted rewards: `pool` schedules items, `worker` runs the code."""
