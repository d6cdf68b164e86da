"""What stands at a silo: its file, what it agrees to, what it does and what it keeps."""
