"""Generation: calls of replicas, samples in progress, budgets of tokens."""
