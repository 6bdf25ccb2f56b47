"""What a CPU needs where megatron-core expects CUDA."""
