"""Policies and critics: models, how they are built and run, in one stage or several."""
