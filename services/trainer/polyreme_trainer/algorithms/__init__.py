"""The mathematics of reinforcement learning: pure functions of arrays, with the source of each formula.

Invariant: no module of this package does I/O, reads a clock, uses a process group or a global random generator.
"""
