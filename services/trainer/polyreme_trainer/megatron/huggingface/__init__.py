"""Hugging Face directories: the mapping of their tensors, their files, families of models, adapters."""
