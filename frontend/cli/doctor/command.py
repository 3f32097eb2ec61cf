"""`rollbus doctor`: runs the checks and prints their findings, the worst first."""

import argparse
import os
from dataclasses import asdict

from ..console import print_json
from ..exits import ExitCode
from ..tables import print_table
from .host import Finding, HostProbe, Status, examine_machine
from .server import DoctorTarget, examine_bus


async def run(args: argparse.Namespace) -> int:
    """Run the checks and print the findings."""
    findings = list(examine_machine(HostProbe.this()))
    target = DoctorTarget(url=args.nats, creds=os.environ.get("ROLLBUS_CREDS") or None, fleet=args.fleet)
    findings += [finding async for finding in examine_bus(target)]
    is_well = all(finding.status is not Status.FAIL for finding in findings)
    show_findings(args, findings, is_well=is_well)
    return ExitCode.OK if is_well else ExitCode.FAILED


def show_findings(args: argparse.Namespace, findings: list[Finding], *, is_well: bool) -> None:
    """Print the findings, the worst first."""
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
