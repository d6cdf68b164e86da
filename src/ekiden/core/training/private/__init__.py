"""Differential privacy: the promise of a run, the noise that keeps it, and what it spends."""
