"""`polyreme convert`: the same weights as a Hugging Face directory, a Megatron checkpoint, or a bare state dict.

Invariant: no number changes. Every tensor of the source is in the target, bit for bit, or the command names what does not fit and writes
nothing. Which row of which parameter belongs where is `megatron.hf_mapping` alone; here are only the files.
"""
