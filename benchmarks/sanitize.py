"""compute-sanitizer over small calls of the CuTe-DSL kernels: memcheck, synccheck and racecheck, one record each.

    python benchmarks/sanitize.py --out benchmarks/results/h200/checks/sanitizer.json

A record says what the tool found, or why it was not run. Kernels should be compiled before (`MEGAMOE_CACHE_DIR`): under
the tool only loading is left. The exit status is 0 if every tool that ran found nothing, 1 if one found something or
failed, and 2 if none ran.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megamoe.cli.options import choices, within, writable
from megamoe.cli.records import environment, write_records
from megamoe.errors import MegaMoEValueError

TOOLS = ("memcheck", "synccheck", "racecheck")
KERNELS = ("forward", "dgrad", "wgrad", "ranks")
WATCH = "kns=kernel_cutlass"
"""Only CuTe-DSL kernels are watched: all their names hold this. Torch's and Triton's run unwatched beside them."""

_SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (.*)")


def command(tool: str, kernel: str, watch: str) -> list[str]:
    """What to run: the tool around `sanitize_calls.py`."""
    calls = str(Path(__file__).with_name("sanitize_calls.py"))
    filters = ["--kernel-regex", watch] if watch else []
    return ["compute-sanitizer", "--tool", tool, "--print-limit", "20", *filters, sys.executable, calls, kernel]


def run(tool: str, kernel: str, timeout_s: float, watch: str) -> dict[str, Any]:
    """One record: `status` is "clean", "found", "failed" or "not run"."""
    record: dict[str, Any] = {"tool": tool, "kernel": kernel}
    if shutil.which("compute-sanitizer") is None:
        return record | {"status": "not run", "reason": "compute-sanitizer is not installed"}
    start = time.monotonic()
    try:
        done = subprocess.run(
            command(tool, kernel, watch), capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return record | {"status": "not run", "reason": f"not finished after {timeout_s:g} s"}
    return record | {"seconds": round(time.monotonic() - start, 1)} | judge(done.stdout + done.stderr, kernel)


def judge(output: str, kernel: str) -> dict[str, Any]:
    """What a tool's output says.

    Args:
        output: of tool and program. kernel: whose result the program confirms in its last line.
    """
    summaries = [text for _, text in _SUMMARY.findall(output)]
    if "Device not supported" in output or not summaries:
        last = [line for line in output.splitlines() if line.strip()][-3:]
        return {"status": "not run", "reason": " / ".join(last) or "the tool said nothing"}
    found: dict[str, Any] = {"summary": summaries[-1]}
    if f"{kernel}: equal to Triton" not in output:
        return found | {
            "status": "failed",
            "reason": "the call's result was not confirmed",
            "reports": _reports(output),
        }
    if re.match(r"0 (errors|hazards)", summaries[-1]):
        return found | {"status": "clean"}
    return found | {"status": "found", "reports": _reports(output)}


def _reports(output: str) -> list[str]:
    """The first lines of the tool's reports, without the numbers of processes that lead them."""
    lines = [line.removeprefix("=========").strip() for line in output.splitlines() if line.startswith("=========")]
    return [line for line in lines if line][:40]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for one tool and kernel")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--kernels", default=",".join(KERNELS))
    parser.add_argument("--at-once", type=int, default=4, help="processes at once")
    parser.add_argument("--watch", default=WATCH, help="as compute-sanitizer's --kernel-regex; '': all kernels")
    arguments = parser.parse_args()
    try:
        within("--timeout", arguments.timeout, 0)
        within("--at-once", arguments.at_once, 1)
        tools = choices("--tools", arguments.tools, TOOLS)
        kernels = choices("--kernels", arguments.kernels, KERNELS)
        writable("--out", arguments.out)
    except MegaMoEValueError as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 2
    pairs = [(tool, kernel) for tool in tools for kernel in kernels]
    with concurrent.futures.ThreadPoolExecutor(arguments.at_once) as pool:
        records = list(pool.map(lambda pair: run(pair[0], pair[1], arguments.timeout, arguments.watch), pairs))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    write_records(arguments.out, [{**environment("cute", device), "watch": arguments.watch, **r} for r in records])
    for record in records:
        said = record.get("summary", record.get("reason"))
        print(f"{record['tool']:10} {record['kernel']:8} {record['status']:8} {said}")
    statuses = {record["status"] for record in records} - {"not run"}
    return 2 if not statuses else 0 if statuses == {"clean"} else 1


if __name__ == "__main__":
    sys.exit(main())
