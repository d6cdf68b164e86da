"""Rounds of parallel training."""
