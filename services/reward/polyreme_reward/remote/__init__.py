"""Rewards behind HTTP: `protocols` is what goes over the wire, `endpoints` where it goes, `reward` when, how often and for how long."""
