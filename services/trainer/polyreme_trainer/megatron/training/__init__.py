"""Training: an iteration, its steps and losses, roles and their optimizers."""
