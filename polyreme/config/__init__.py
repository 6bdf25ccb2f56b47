"""The configuration schema, one file per section, and the loader of a run's YAML file."""
