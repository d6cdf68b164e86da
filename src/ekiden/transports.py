"""How tasks reach clients: the contract of transports, and ours: in this process, in several,
between machines.
"""

from ekiden.engine import wire
from ekiden.engine.method import INITIAL, payload_types
from ekiden.engine.store import Store
from ekiden.engine.transport import ClientMissing, Interrupted, Request, Transport, resolve
from ekiden.engine.wire import Ref
from ekiden.engine.worker import Job, Outcome, Worker
from ekiden.training.fit import Work
from ekiden.transports.local import MakesTransport, Start
from ekiden.transports.ray import OnRay

__all__ = [
    "INITIAL",
    "ClientMissing",
    "Interrupted",
    "Job",
    "MakesTransport",
    "OnRay",
    "Outcome",
    "Ref",
    "Request",
    "Start",
    "Store",
    "Transport",
    "Work",
    "Worker",
    "payload_types",
    "resolve",
    "wire",
]
