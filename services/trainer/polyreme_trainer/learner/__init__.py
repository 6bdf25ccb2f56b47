"""The learner: ranks with torchrun's environment that train on planned groups and publish each new policy version."""
