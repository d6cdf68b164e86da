"""Regression with standard errors, from sums."""
