"""The layers that megatron-core's model is built from, by device."""
