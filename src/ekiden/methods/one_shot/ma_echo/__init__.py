"""MA-Echo: its quadratic programs."""
