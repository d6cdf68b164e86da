"""Runs: what identifies one, how several are executed, and what they gave."""
