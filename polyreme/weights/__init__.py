"""Policy versions: their manifest, shared memory, digests and wire format. Numpy views, no copies, no torch."""
