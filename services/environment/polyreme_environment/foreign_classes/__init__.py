"""Classes of environments and tools that were written for other systems, as environments in a Python file."""
