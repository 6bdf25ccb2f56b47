"""What happens in the episodes of a task, between its admission and its record."""
