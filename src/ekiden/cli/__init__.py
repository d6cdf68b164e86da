"""The command line: one module for a family of commands."""
