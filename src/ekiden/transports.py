"""How tasks reach clients: the contract of transports, and ours: in this process, in several,
between machines.
"""

from ekiden.core.engine import wire
from ekiden.core.engine.local import MakesTransport, Start
from ekiden.core.engine.method import INITIAL, payload_types
from ekiden.core.engine.store import Store
from ekiden.core.engine.transport import ClientMissing, Interrupted, Request, Transport, resolve
from ekiden.core.engine.wire import Ref
from ekiden.core.engine.worker import Job, Outcome, Worker
from ekiden.core.training.fit import Work
from ekiden.lab.ray import OnRay

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
