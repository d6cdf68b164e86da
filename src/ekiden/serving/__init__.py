"""What a run gave, put to use."""
