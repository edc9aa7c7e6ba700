# SPDX-License-Identifier: Apache-2.0
"""Look the locked packages up in a database of known vulnerabilities; of packages for several Pythons, this one's.

Exit code 0: nothing is known, or nobody could be asked, which a line says. 1: something is known. 2: it went wrong.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import requests

FOLDER = Path(__file__).parent
# Each of them, because pip-audit reads no file that another one names. Both builds of torch are of one source.
LOCKS = sorted(set(FOLDER.glob("*.txt")) - {FOLDER / "torch-cpu.txt"})
# PyPI's own advisories are in it too. PyPI's interface for them will not do: pip-audit passes over every package for
# which a mirror of PyPI without that interface says 404, and calls that clean.
OSV = "https://api.osv.dev/v1/query"


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="audit.py", description="look for known vulnerabilities in what is locked")
    parser.add_argument(
        "--database", default=OSV, metavar="URL", help="that speaks OSV's protocol (default: %(default)s)"
    )
    parser.add_argument("--timeout-seconds", type=float, default=10, help="to reach it (default: %(default)s)")
    args = parser.parse_args()
    question = {"package": {"name": "pip", "ecosystem": "PyPI"}, "version": "26.3"}
    try:
        requests.post(args.database, json=question, timeout=args.timeout_seconds)
    except (requests.ConnectionError, requests.Timeout):
        print(f"SKIPPED: {args.database} cannot be reached from here, so nothing was looked up")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.txt"
        command = [sys.executable, "-m", "pip_audit", "--vulnerability-service=osv", f"--osv-url={args.database}"]
        command += [f"--requirement={lock}" for lock in LOCKS]
        command += ["--require-hashes", "--disable-pip", "--strict", "--progress-spinner=off", f"--output={table}"]
        result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        found = table.read_text(encoding="utf-8") if table.is_file() else ""
    if result.returncode == 0:
        print("no known vulnerabilities in what is locked")
        return 0
    if found:
        print(f"{found}\nrequirements/lock.py --upgrade-package NAME takes another version")
        return 1
    print(f"the audit failed: {(result.stderr.strip().splitlines() or ['without a word'])[-1]}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
