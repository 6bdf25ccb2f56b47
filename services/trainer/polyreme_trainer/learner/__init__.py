"""The learner: torchrun-style ranks that turn planned groups into the next policy version and publish it."""
