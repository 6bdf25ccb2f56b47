"""State that is kept in the host's memory and moves to the device when it is needed."""
