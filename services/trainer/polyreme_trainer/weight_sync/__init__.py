"""From a sealed version in the arena to a version that every replica serves."""
