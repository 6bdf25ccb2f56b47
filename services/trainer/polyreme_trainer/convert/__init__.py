"""`polyreme convert`: the same weights as a Hugging Face directory, a Megatron checkpoint, or a bare state dict.

Invariant: no number changes. Every tensor of the source is in the target, bit for bit, or the command reports what does not fit
and writes nothing. Only `megatron.hf_mapping` maps parameters to tensors; this package reads and writes files.
"""
