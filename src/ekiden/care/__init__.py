"""What may be wrong with data."""
