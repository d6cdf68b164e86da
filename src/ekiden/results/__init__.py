"""The result of a run as an object."""
