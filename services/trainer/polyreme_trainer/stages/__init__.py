"""Stages of training on the learner's ranks other than reinforcement learning itself."""
