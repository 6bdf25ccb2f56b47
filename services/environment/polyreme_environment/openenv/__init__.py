"""Environments behind OpenEnv servers: each episode is one connection to a server's WebSocket."""
