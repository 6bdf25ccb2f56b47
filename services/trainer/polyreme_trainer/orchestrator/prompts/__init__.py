"""Which prompt comes next, and which are left out."""
