"""Runs as the command line makes them: plans, presets, several runs at once, tables of what came out."""
