"""How tasks reach clients: in this process, in several processes."""
