"""Code that runs inside the sandbox and uses only the standard library. A program sees no other part of this package."""
