"""The command line: find the command, run it, and turn a user's mistake into one line."""

import errno
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, get_type_hints

from ekiden._version import __version__
from ekiden.cli import without_torch
from ekiden.core.base import errors
from ekiden.core.base.errors import UserError, command_line, unknown, warnings_as_lines

COMMANDS = {
    "run": "cli.runs:run",
    "resume": "cli.runs:resume",
    "evaluate": "cli.evaluating:evaluate",
    "show": "cli.folders:show",
    "log": "cli.folders:log",
    "compare": "cli.folders:compare",
    "report": "cli.sweeps:report",
    "predict": "cli.serving:predict",
    "export": "cli.serving:export",
    "card": "cli.serving:card",
    "audit": "cli.serving:audit",
    "data": "cli.runs:data",
    "list": "cli.listing:list_all",
    "topology": "cli.listing:show_topology",
    "sweep": "cli.sweeps:run_sweep",
    "results": "cli.sweeps:list_results",
    "forget": "cli.runs:forget",
    "join": "cli.runs:join",
    "check": "cli.checking:check_method",
    "new method": "cli.own:new",
    "new study": "cli.own:new_study",
    "new hospital": "cli.own:new_hospital",
    "trust": "cli.own:trust",
    "federation init": "cli.federations:init",
    "federation start": "cli.federations:start_federation",
    "federation agree": "cli.federations:agree",
    "federation add": "cli.federations:add",
    "federation rotate": "cli.federations:rotate",
    "federation revoke": "cli.federations:revoke",
    "federation status": "cli.federations:status",
    "silo init": "cli.silos:init_silo",
    "silo join": "cli.silos:join_roster",
    "silo start": "cli.silos:start",
    "silo keys": "cli.silos:make_keys",
    "silo status": "cli.silos:status",
    "silo sums": "cli.silos:sums",
    "silo release": "cli.silos:release",
    "silo approve": "cli.silos:approve",
    "silo trust": "cli.silos:trust_code",
    "ps": "cli.coordinator:ps",
    "stop": "cli.coordinator:stop",
    "verify": "cli.coordinator:verify",
}
"""Where each command is: its module is loaded when it is called. Its argument is a dataclass, whose
fields are its flags; `run`, whose flags depend on the method, takes the command line."""

_WITHOUT_TENSORS = {
    "list",
    "show",
    "log",
    "compare",
    "ps",
    "stop",
    "trust",
    "new method",
    "new study",
    "new hospital",
    "silo init",
    "silo join",
    "silo keys",
    "silo status",
    "silo trust",
    "federation init",
    "federation add",
    "federation status",
}
"""Commands that start without PyTorch; see `without_torch`."""

_HELP = """usage: ekiden COMMAND [arguments]        ekiden COMMAND --help

train
  run METHOD        train over many data silos: ekiden run fedelmy --help
  resume RUN...     continue interrupted runs
look
  show RUN          what a run folder holds
  log RUN -f        a line for each step, until the run ends
  evaluate RUN      figures with intervals, by client and group; also at silos
  compare RUN...    runs side by side
  report RUN...     one page of tables and figures, from runs and sweeps
  export RUN... -o  metrics as Parquet or CSV
use the result
  predict RUN F...  predictions for images, tables, texts
  export RUN --to F the model as onnx, pt2 (torch.export) or hf, checked
  card RUN          a model card in Markdown
  audit RUN         a membership-inference attack, and who received which values
change a finished run (cheap with fedgram), as if it were trained again
  forget RUN        remove a client
  join RUN          add a client
data, networks, methods
  list              all of them
  data NAME         who holds what, as a table and a picture
  topology NAME     a graph of clients: its mixing matrix and spectral gap
your own
  new method NAME   write a method to begin with, its test and its page
  new study NAME    write a project: a study of several hospitals on one machine
  new hospital NAME write a project: a study between hospitals
  check METHOD      whether FILE.py:CLASS keeps the contract of all methods
  trust FILE...     allow a run folder from someone else to load this Python file
published tables
  sweep FILE        run one, or continue it
  results SWEEP...  results next to the printed values
between machines
  silo init FOLDER  a silo's key and file; its public key goes to the coordinator
  federation init   certificates, and a roster of the silos' public keys
  federation start  the SuperLink that these silos connect to
  silo start        take part with data that stay here
  ps, stop RUN      list runs, end one of them
  verify RUN        check a run against what the silos signed
"""


def main() -> None:
    """Entry point of the command line: exit code 0, or 2 with one line that says what to do."""
    errors.typed = tuple(sys.argv)
    args = sys.argv[1:]
    named = {*args[:1], " ".join(args[:2])}
    with command_line():
        if named & _WITHOUT_TENSORS or {"-h", "--help"} & set(args):
            without_torch.start(_main)
        else:
            _main()


def _main() -> None:
    warnings_as_lines()
    args = sys.argv[1:]
    try:
        if not args or args[0] in ("-h", "--help", "help"):
            print(_HELP, end="")
        elif args[0] == "--version":
            print(__version__)
        else:
            call(args)
        sys.stdout.flush()
    except UserError as error:
        _refuse(" ".join(str(error).split()))
    except RecursionError:  # of JSON or TOML that somebody else made
        _refuse("a file is nested too deeply to be read: it is damaged, or made to do harm")
    except OSError as error:
        if error.filename is None and error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # drop the rest of the output, or Python complains about it at exit
        if error.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # the reader is gone, as in `ekiden results ... | head`
        if error.errno == errno.EPIPE:
            sys.exit(141)
        what = "the output" if error.filename is None else error.filename
        _refuse(f"cannot read or write {what}: {error.strerror}")
    except KeyboardInterrupt as stop:  # its arguments are the folders of interrupted runs
        hint = ""
        if stop.args:
            hint = f". To continue: ekiden resume {' '.join(map(str, stop.args))}"
        elif args[:1] == ["sweep"]:
            hint = ". To continue: run the same command again"
        print(f"\nekiden: stopped{hint}", file=sys.stderr)
        sys.exit(130)


def _refuse(line: str) -> NoReturn:
    """End with one line that says what to do."""
    print(f"ekiden: {line}", file=sys.stderr)
    sys.exit(2)


def call(args: Sequence[str]) -> None:
    """Run the command that the first one or two arguments name."""
    command = next((name for name in (" ".join(args[:2]), args[0]) if name in COMMANDS), "")
    group = [name.split()[1] for name in COMMANDS if name.startswith(f"{args[0]} ")]
    if group and not command:
        if len(args) == 1 or args[1] in ("-h", "--help"):
            usage = f"usage: ekiden {args[0]} {'|'.join(group)} ...        ekiden {args[0]} {group[0]} --help"
            return print(usage)
        raise unknown(f"{args[0]} command", args[1], group)
    if not command:
        raise unknown("command", args[0], COMMANDS)
    _trust_typed_files(args)
    # collections take a sixth of the time in which modules are loaded, and find nothing
    gc.disable()
    module, _, name = COMMANDS[command].partition(":")
    function = getattr(import_module(f"ekiden.{module}"), name)
    rest = args[len(command.split()) :]
    gc.enable()
    if command == "run":
        return function(rest)  # type: ignore[no-any-return]
    # `--version` and `--help` do without it
    from ekiden.cli.flags import parse

    function(parse(get_type_hints(function)["options"], rest, f"ekiden {command}"))


def _trust_typed_files(args: Sequence[str]) -> None:
    """Note that the user named the code in FILE.py:NAME, as a value of its own or behind `--flag=`.

    Nothing else in Ekiden trusts a file: run folders, records, and files of settings may come from
    anybody.
    """
    # `--version` and `--help` do without it
    from ekiden.core.base import outside

    for arg in args:
        value = arg.partition("=")[2] if arg.startswith("--") and "=" in arg else arg
        if outside.is_file(value) and outside.path_in(value).is_file():
            outside.trust(value)


if __name__ == "__main__":
    main()
