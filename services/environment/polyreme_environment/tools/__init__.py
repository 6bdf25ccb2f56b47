"""Tools for data without an environment: built in, in Python files, and behind MCP servers."""
