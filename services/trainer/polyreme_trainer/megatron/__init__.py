"""The policy on megatron-core: built from a Hugging Face directory, sharded, trained, saved and exported.

This package and the learner are the only ones that import megatron. What maps its parameters to Hugging Face tensors is one table,
`layout`, and what differs between kinds of machines is one module, `device`.
"""
