"""Comparisons of models with Hugging Face's and with replicas, and the self-test of a device."""
