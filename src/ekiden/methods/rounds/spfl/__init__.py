"""SPFL: GLAM, and the methods that it plugs into."""
