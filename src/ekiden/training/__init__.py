"""What happens inside a client: weights as one flat vector, the training loop."""
