"""Processes for untrusted code: `keeper` forks and ends the workers, `processes` is the service's side, `confinement` the
worker's, and `sandbox` runs programs that a model wrote."""
