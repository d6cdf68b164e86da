"""The names of the command line's own flags."""

from dataclasses import fields

from ekiden.base.settings import Hardware, Training
from ekiden.cli.runs import RunOptions
from ekiden.cli.silos import RemoteOptions
from ekiden.runs.plan import Plan
from ekiden.transports.flower.remote_plan import RemotePlan

TAKEN = {f.name for kind in (Plan, RemotePlan, Training, Hardware, RunOptions, RemoteOptions) for f in fields(kind)}
