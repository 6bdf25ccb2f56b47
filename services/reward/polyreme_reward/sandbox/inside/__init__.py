"""What runs inside the sandbox, with the standard library alone. The directory is all that a program sees of this package."""
