"""The learner's models on megatron-core: built from a Hugging Face directory, sharded, trained, saved and exported.

Invariant: only this package imports megatron. One table maps parameters to Hugging Face tensors (`hf_mapping`, with the rows of
`families`), one module handles the differences between devices (`device`), and two specs have the kernels (`cpu`, `accelerator`).
"""
