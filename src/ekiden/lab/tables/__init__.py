"""Tables: experiment files, their sweeps, records, printed values and verdicts."""
