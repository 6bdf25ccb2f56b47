"""Groups: what makes one, the tasks that bring those in flight into the experience log, and what is counted meanwhile."""
