"""Starts the trainer's processes on one machine, and the learner's ranks on several.

Invariant: a launch includes every learner machine, or it ends. The trainer's machine, node 0, announces it with a lease. The
others answer in their leases once they see the trainer's files. The leader then names the members, and each starts its share of
the ranks under torchrun's agent. When a machine or a rank is lost, the launch ends, and every machine ends its ranks, so no rank
waits in a collective for a dead one. One process leads one launch; the trainer's supervisor restarts it and limits the restarts.
"""
