"""``python -m benchmarks.capture [--models NAME...] [--save FOLDER] [--parts FOLDER] [--jobs N] [--limit SECONDS]``.

``--save`` keeps the traces, ``--parts`` each subject's findings and messages as soon as they exist. What failed to
capture at all is a bar that doesn't hold, and the other subjects go on.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import Bar, report
from benchmarks.capture import DEVICE
from benchmarks.capture.check import check
from benchmarks.capture.subjects import SUBJECTS, subject
from tessera_core.trace.capture.stage import machine_facts


def main() -> int:
    """Check the subjects that the command line names, or all."""
    names = [found.name for found in SUBJECTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capture")
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--save", type=Path, help="folder that keeps the traces")
    parser.add_argument("--jobs", type=int, default=1, help="subjects at once; timed ones run alone, last")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one subject")
    parser.add_argument("--parts", type=Path, help="folder that keeps each subject's findings and messages")
    parser.add_argument(
        "--alone", action="store_true", help="check one subject in this process, into --parts"
    )
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("capture needs a CUDA device", file=sys.stderr)
        return 2
    if chosen.alone:
        results, bars = check(subject(chosen.models[0]), chosen.save)
        found = json.dumps({"results": results, "bars": [asdict(bar) for bar in bars]})
        (chosen.parts / f"{chosen.models[0]}.json").write_text(found)
        return 0
    build_facts = machine_facts(DEVICE, True)
    timed = [name for name in chosen.models if subject(name).timed]
    others = [name for name in chosen.models if name not in timed]
    with tempfile.TemporaryDirectory(prefix="tessera-capture-") as folder:
        parts = chosen.parts or Path(folder)
        parts.mkdir(parents=True, exist_ok=True)

        def apart(name: str) -> tuple[dict[str, Any], Sequence[Bar]]:
            return _apart(name, chosen.save, parts, chosen.limit)

        with ThreadPoolExecutor(max(1, chosen.jobs)) as pool:
            done = list(pool.map(apart, others))
        done += [apart(name) for name in timed]
    results = {name: found for name, (found, _) in zip((*others, *timed), done)}
    bars = [bar for _, more in done for bar in more]
    facts = {"build": build_facts, **results}
    return report("capture", facts, bars, f"{build_facts['device']}, driver {build_facts['driver']}")


def _apart(name: str, save: Path | None, parts: Path, limit: float) -> tuple[dict[str, Any], Sequence[Bar]]:
    """Check a subject in a process of its own; what that says when it fails is the result."""
    answer, messages = parts / f"{name}.json", parts / f"{name}.txt"
    command = [sys.executable, "-m", "benchmarks.capture", "--models", name, "--alone", "--parts", str(parts)]
    command += [] if save is None else ["--save", str(save)]
    started = time.perf_counter()
    with messages.open("w") as said:
        try:
            subprocess.run(command, stdout=said, stderr=said, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            said.write(f"not done after {limit:.0f} s\n")
    print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)
    if answer.is_file():
        found = json.loads(answer.read_text())
        return found["results"], [Bar(**bar) for bar in found["bars"]]
    text = messages.read_text(errors="replace").strip()
    print(f"{name}: failed\n{text}", file=sys.stderr)
    last = text.rpartition("\n")[2] or "nothing was said"
    return {"failed": last}, [Bar(f"{name}: is captured", last, "= done", False)]


if __name__ == "__main__":
    sys.exit(main())
