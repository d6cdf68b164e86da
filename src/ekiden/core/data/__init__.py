"""Samples in memory, and who holds which of them."""
