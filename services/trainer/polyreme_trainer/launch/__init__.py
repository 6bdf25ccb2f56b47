"""A learner on several machines: who is there, and the launches that all of them share.

Kept here: a launch has every machine, or it ends. The trainer's machine, node 0, calls it by a lease; the others answer in theirs, each
once it sees the trainer's files; those that are then named start their share of the ranks, under torchrun's agent. When a machine is
gone, or its ranks are, the launch ends; and when the launch ends, every machine ends its ranks: nobody waits in a collective for the
dead. One process leads one launch; restarts, and their limit, are the trainer's supervisor's.
"""
