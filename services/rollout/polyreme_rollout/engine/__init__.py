"""Inference engines behind one protocol. vLLM is imported here and nowhere else."""
