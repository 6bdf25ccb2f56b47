"""The schema of a run, one file per section, and how a run's YAML is read."""
