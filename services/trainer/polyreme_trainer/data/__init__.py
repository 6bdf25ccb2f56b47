"""Prompts, supervised rows and the chat template."""
