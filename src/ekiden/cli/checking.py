"""`ekiden check`: whether a method keeps the contract."""

from dataclasses import asdict, dataclass

from ekiden.cli.console import print_json, say
from ekiden.core.base import outside
from ekiden.core.base.checks import Positional
from ekiden.core.base.errors import UserError
from ekiden.lab.conformance import Finding, check, line, rules
from ekiden.methods import method_named


@dataclass(frozen=True)
class CheckOptions:
    """Check a method against the contract that all methods keep."""

    method: Positional[str]
    """FILE.py:CLASS, or the name of a method"""
    json: bool = False
    """print JSON: a list with an object for each line of the contract: `name`, `line`, `broken`
    (empty if it holds), `tried`"""


def check_method(options: CheckOptions) -> None:
    """`ekiden check METHOD`."""
    name = options.method
    try:
        kind = method_named(name)
    except UserError as error:
        # Python's error for a dataclass that derives from a frozen one
        if "frozen" not in str(error.__cause__):
            raise
        _tell(
            Finding(
                rules.is_a_frozen_dataclass.__name__, line(rules.is_a_frozen_dataclass), str(error)
            )
        )
        raise UserError(
            f"{name} breaks the contract: write @dataclass(frozen=True) above the class"
        ) from None
    findings = check(kind, (lambda finding: None) if options.json else _tell)
    if options.json:
        print_json([asdict(finding) for finding in findings])
    broken = [finding for finding in findings if finding.broken]
    if broken:
        untried = sum(not finding.tried for finding in findings)
        rest = f"; {untried} could not be tried" if untried else ""
        raise UserError(
            f"{name} breaks {len(broken)} of {len(findings)} lines of the contract (listed "
            f"above){rest}"
        )
    if not options.json:
        say(f"{outside.short(name)} keeps the contract")


def _tell(finding: Finding) -> None:
    if finding.broken:
        say(f"BROKEN  {finding.line}\n        found: {finding.broken}")
    else:
        say(f"{'holds' if finding.holds else 'untried':8}{finding.line}")
