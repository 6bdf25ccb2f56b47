"""State that is kept in the host's memory and moves to the device when it is needed."""

PART_BYTES = 2**30
"""The largest part of an offloaded optimizer's state that is on the device at a time; a single parameter's may be larger."""
