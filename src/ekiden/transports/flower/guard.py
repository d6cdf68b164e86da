"""Stands in for `flwr-clientapp` at a silo: runs Ekiden's own ClientApp, never code that came with a run.

A SuperNode starts `flwr-clientapp` for each message, which unpacks and imports the app that the coordinator sent.
`ekiden silo start` puts a command of that name before it on the path, which comes here.
"""

from flwr.clientapp import ClientApp
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from ekiden.transports.flower.client_app import app


def main() -> None:
    """Run one message through Ekiden's app, whatever app it came with."""
    run_clientapp.install_from_fab = lambda *args, **kwargs: None
    run_clientapp.get_load_client_app_fn = lambda *args, **kwargs: _own
    flwr_clientapp()


def _own(fab_id: str, fab_version: str, fab_hash: str) -> ClientApp:
    return app


if __name__ == "__main__":
    main()
