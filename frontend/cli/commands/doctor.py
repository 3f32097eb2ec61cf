"""Look at this machine, the NATS server and the fleet, and say what is wrong and what to do about it.

Changes nothing. Ends with 1 when something will not work (`fail`), with 0 otherwise, warnings included.
"""

import argparse
import os
from typing import TYPE_CHECKING

from frontend.cli.exits import ExitCode

if TYPE_CHECKING:
    from frontend.cli.doctor.findings import Finding

__all__ = ["HELP", "READS_NO_CREDENTIALS", "add_arguments", "run"]

HELP = "say what is wrong here, and what to do"
READS_NO_CREDENTIALS = True
"""That they cannot be read is one of its findings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options of its own."""


def run(args: argparse.Namespace) -> int:
    """Look, and say what was found."""
    from frontend.cli.app import run_async

    return run_async(_doctor(args))


async def _doctor(args: argparse.Namespace) -> int:
    from frontend.cli.doctor.bus import Target, examine_bus
    from frontend.cli.doctor.findings import Status
    from frontend.cli.doctor.machine import Machine, examine_machine

    findings = list(examine_machine(Machine.this()))
    target = Target(url=args.nats, creds=os.environ.get("ROLLBUS_CREDS") or None, fleet=args.fleet)
    findings += [finding async for finding in examine_bus(target)]
    is_well = all(finding.status is not Status.FAIL for finding in findings)
    _show(args, findings, is_well=is_well)
    return ExitCode.OK if is_well else ExitCode.FAILED


def _show(args: argparse.Namespace, findings: "list[Finding]", *, is_well: bool) -> None:
    from dataclasses import asdict

    from frontend.cli.console import print_json, say

    if args.json:
        print_json({"ok": is_well, "findings": [asdict(finding) for finding in findings]})
        return
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        say(f"{finding.status:4}  {finding.check:{width}}  {finding.found}")
        if finding.advice:
            say(f"{'':{width + 8}}-> {finding.advice}")
