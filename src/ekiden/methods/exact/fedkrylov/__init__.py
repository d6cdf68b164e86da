"""FedKrylov: what clients hand on, and the solver at the first client."""
