"""FedELMY, in a chain and in parallel: its diversity terms."""
