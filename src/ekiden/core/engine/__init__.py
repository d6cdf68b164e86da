"""The machine that runs methods: federation, ledger, worker, wire format, run folder."""
