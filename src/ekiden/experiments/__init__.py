"""Runs as the command line makes them: plans, presets, several runs at once, and tables of results."""
