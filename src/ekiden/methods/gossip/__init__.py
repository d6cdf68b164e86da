"""A model for each client, with a server or without."""
