"""The learner's models on megatron-core: built from a Hugging Face directory, sharded, trained, saved and exported.

Invariant: this package is the only one that imports megatron. One table maps parameters to Hugging Face tensors (`hf_mapping`, with the rows
of `families`), one module knows what differs between kinds of devices (`device`), and two specs hold the kernels (`cpu`, `accelerator`).
"""
