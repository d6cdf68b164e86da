"""CriticalFL, over neighbours and with a server: its critical periods."""
