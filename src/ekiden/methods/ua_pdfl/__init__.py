"""UA-PDFL: its divergence."""
