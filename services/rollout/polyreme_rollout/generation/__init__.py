"""The service `Rollout`: requests, and the sequences that the engine samples for them."""
