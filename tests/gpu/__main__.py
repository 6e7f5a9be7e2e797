"""Runs the GPU tests file by file and ends with one table: `python -m tests.gpu [--seconds 540] [pytest's arguments]`.

Each file has a process of its own: a device error or a hang in one leaves the others alone, and each is ended when the
time for all of them is over.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTHING_COLLECTED = 5
FIRST, LAST = ("test_chain_device", "test_no_host"), ("test_sanitizer",)


@dataclass
class Area:
    """One file of tests and how it went."""

    file: Path
    about: str
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


def verdict(outcomes: Counter[str]) -> str:
    """In a word or two."""
    if outcomes["failed"]:
        return "FAILED"
    return "passed" if outcomes["passed"] else "skipped" if outcomes["skipped"] else "nothing ran"


def areas() -> list[Area]:
    """Every file of tests, described by its docstring: what matters most first, the slowest last."""
    found = sorted(Path(__file__).parent.glob("test_*.py"), key=lambda file: (_rank(file), file))
    return [Area(file, _about(file)) for file in found]


def _rank(file: Path) -> int:
    return 0 if file.stem in FIRST else 2 if file.stem in LAST else 1


def _about(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or file.stem
    return " ".join(text.split("\n\n")[0].split())


def run(area: Area, options: list[str], seconds: float) -> None:
    """Runs one file and fills in how it went; never longer than `seconds`."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", str(area.file), "-rs", f"--junitxml={report}", *options]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            status = process.wait(max(seconds, 1))
            if not report.is_file() or status not in (0, 1, NOTHING_COLLECTED):
                _fail(area, f"pytest ended with status {status}")
        except subprocess.TimeoutExpired:
            _kill(process)
            _fail(area, f"killed after {seconds:.0f} s")
        if report.is_file():
            read_report(area, report)
    area.seconds = time.monotonic() - began


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With what it has started; SIGINT first, so that fixtures stop their servers."""
    for number, patience in ((signal.SIGINT, 10.0), (signal.SIGKILL, 5.0)):
        os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def read_report(area: Area, report: Path) -> None:
    """Counts outcomes and keeps the reasons of what was skipped and the first line of what failed."""
    reasons: Counter[str] = Counter()
    for case in ET.parse(report).getroot().iter("testcase"):
        problem = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
        area.outcomes[outcome] += 1
        if problem is not None:
            message = _message(problem)
            reasons[f"skipped: {message}" if outcome == "skipped" else f"FAILED {case.get('name')}: {message}"] += 1
    area.notes += [f"{reason} ({count} tests)" if count > 1 else reason for reason, count in reasons.items()]


def _message(problem: ET.Element) -> str:
    """One line of it; a file that was skipped as a whole has its reason in the text only."""
    message = problem.get("message") or ""
    if message == "collection skipped":
        message = (problem.text or message).rpartition("Skipped: ")[2].rstrip("')")
    return " ".join(message.split())[:200]


def _fail(area: Area, note: str) -> None:
    area.outcomes["failed"] += 1
    area.notes.append(f"FAILED: {note}")


def table(done: list[Area], seconds: float) -> str:
    """What was checked, how it went, and how long it took."""
    rows: list[tuple[str, ...]] = [("area", "result", "passed", "failed", "skipped", "seconds")]
    for one in done:
        counts = [str(one.outcomes[kind]) for kind in ("passed", "failed", "skipped")]
        rows.append((one.file.stem.removeprefix("test_"), verdict(one.outcomes), *counts, f"{one.seconds:.0f}"))
    total = sum((one.outcomes for one in done), Counter[str]())
    rows.append(("all", verdict(total), *(str(total[k]) for k in ("passed", "failed", "skipped")), f"{seconds:.0f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        lines += [f"    {one.about}" for one in done if one.file.stem == f"test_{row[0]}"]
        lines += [f"    {note}" for one in done if one.file.stem == f"test_{row[0]}" for note in one.notes]
    return "\n".join(lines)


def main() -> int:
    """Status 1 when something failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything together")
    parser.add_argument("--files", default="", help="run only files whose names hold one of these words (a,b)")
    arguments, options = parser.parse_known_args()
    began = time.monotonic()
    words = arguments.files.split(",")
    done = [area for area in areas() if any(word in area.file.stem for word in words)]
    for area in done:
        print(f"\n==> {area.file.stem}: {area.about}", flush=True)
        run(area, options, arguments.seconds - (time.monotonic() - began))
    print(f"\n{table(done, time.monotonic() - began)}", flush=True)
    return int(any(area.outcomes["failed"] for area in done))


if __name__ == "__main__":
    sys.exit(main())
