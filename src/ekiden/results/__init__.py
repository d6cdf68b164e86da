"""What a run gave, as an object."""
