"""Figures of clinical studies."""
