"""Runs as the command line makes them: plans, several runs at once, and tables of results."""
