"""Agents as environments: programs that sample the policy through a session address, and give a reward when they end."""
