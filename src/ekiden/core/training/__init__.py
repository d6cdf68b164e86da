"""Training at a client: the training loop, and weights as one flat vector."""
