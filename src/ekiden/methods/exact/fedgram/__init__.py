"""FedGram: the method, and what clients hand on."""
