"""Check this machine, the NATS server and the fleet, and print each problem with its remedy.

The command changes nothing. If a check fails (`fail`), it exits with 1. Otherwise it exits with 0, even with warnings.
"""

import argparse
import os
from typing import TYPE_CHECKING

from ..exits import ExitCode

if TYPE_CHECKING:
    from ..doctor.host import Finding


HELP = "find problems of machine, server and fleet"
EXAMPLES = (
    "rollbus doctor",
    "rollbus doctor --nats nats://127.0.0.1:4222 --json",
)
READS_NO_CREDENTIALS = True
"""This command reads the credentials itself, because it reports unreadable credentials as a finding."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


async def run(args: argparse.Namespace) -> int:
    """Run the checks and print the findings."""
    from ..doctor.host import HostProbe, Status, examine_machine
    from ..doctor.server import DoctorTarget, examine_bus

    findings = list(examine_machine(HostProbe.this()))
    target = DoctorTarget(url=args.nats, creds=os.environ.get("ROLLBUS_CREDS") or None, fleet=args.fleet)
    findings += [finding async for finding in examine_bus(target)]
    is_well = all(finding.status is not Status.FAIL for finding in findings)
    _show(args, findings, is_well=is_well)
    return ExitCode.OK if is_well else ExitCode.FAILED


def _show(args: argparse.Namespace, findings: "list[Finding]", *, is_well: bool) -> None:
    from dataclasses import asdict

    from ..console import print_json
    from ..doctor.host import Status
    from ..tables import print_table

    if args.json:
        print_json({"ok": is_well, "findings": [asdict(finding) for finding in findings]})
        return
    worst_first = [Status.FAIL, Status.WARN, Status.OK]
    rows: list[tuple[str, str, str]] = []
    for finding in sorted(findings, key=lambda finding: worst_first.index(finding.status)):
        rows.append((finding.status, finding.check, finding.found))
        if finding.advice:
            rows.append(("", "", f"-> {finding.advice}"))
    print_table(("state", "check", "found"), rows)
