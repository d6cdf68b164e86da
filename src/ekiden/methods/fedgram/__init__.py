"""FedGram: what is handed on, and how clients leave and join."""
