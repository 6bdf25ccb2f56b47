"""The model spec for CPU, and its layers."""
