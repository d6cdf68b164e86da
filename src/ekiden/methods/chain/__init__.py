"""One model, handed from client to client."""
