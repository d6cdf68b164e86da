"""FedGram: its features, what is handed on, and how clients leave and join."""
