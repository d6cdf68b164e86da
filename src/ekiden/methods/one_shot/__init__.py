"""One round: each client trains once, the server combines."""
