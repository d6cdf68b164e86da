"""Studies, sweeps, tables, reports, clusters, and the tests of a method's contract."""
