"""Child processes, supervision, logging and resource metrics."""
