"""Processes for untrusted code: `keeper` forks and ends the workers, `processes` is the service's side, `confinement` the worker's."""
