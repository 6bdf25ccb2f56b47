"""The schema of a run, and how a run's YAML is read."""
