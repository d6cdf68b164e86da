"""The kernel: what runs a method on this machine."""
