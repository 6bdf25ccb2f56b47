"""A run as people see it in a terminal or a notebook."""
