"""The mathematics of reinforcement learning: pure functions of arrays, with the source of each formula.

Nothing here does I/O, reads a clock, knows a process group or touches a global random generator.
"""
