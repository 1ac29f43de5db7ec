"""Graphs of real checkpoints' sizes: what it takes to write, check and load them.

``export`` is ``moe-onnx export --preset NAME``, every graph of the default assembly (grad, apply, eval,
forward); ``check`` is ``onnx.checker`` with its full check of each of them, ``validate`` the static level of
``moe-onnx validate``, and ``load`` a session: a plain one of onnxruntime, by the function bodies, and
``moe_onnx.InferenceSession`` with native kernels. Nothing is run: there are no weights. Each row is a fresh
process, and its peak that of the whole process (VmHWM), libraries included. Seconds of the clock hold
whatever else the machine does; CPU seconds do not.

    python benchmarks/full_size.py                         # all limits, exit code 1 if one is missed
    python benchmarks/full_size.py --preset olmoe-1b-7b --routes native
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
from operators import status

import moe_onnx
from moe_onnx.build.full_size import FULL_SIZE
from moe_onnx.cli import main as moe_onnx_command

LIMITED = ("mixtral-8x7b", "qwen3-30b-a3b")
SECONDS, MEGABYTES = 60, 2000  # of each row
ROUTES = ("plain", "native")
HEAD = ("preset", "work", "graph", "nodes", "MB", "seconds", "CPU s", "peak MB", "")
ROW = "{:14} {:15} {:8} {:>7} {:>5} {:>8} {:>7} {:>8}  {}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=list(FULL_SIZE), nargs="+", default=list(LIMITED))
    parser.add_argument("--routes", choices=ROUTES, nargs="+", default=list(ROUTES))
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # a child process: work, preset, path
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return
    print(ROW.format(*HEAD).rstrip())
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        for preset in arguments.preset:
            target = Path(folder) / preset
            missed |= row(preset, "export", "all", target, "-", "-")
            for path in sorted(target.glob("*.onnx")):
                size = f"{path.stat().st_size / 1e6:.1f}"
                nodes = len(onnx.load(path).graph.node)
                works = ("check", "validate", *(f"load, {route}" for route in arguments.routes))
                for work in works:
                    missed |= row(preset, work, path.stem, path, nodes, size)
    sys.exit(1 if missed else 0)


def row(preset: str, work: str, name: str, path: Path, nodes: Any, size: str) -> bool:
    """Measure one piece of work in a process of its own and print it; whether a limit is missed."""
    command = [sys.executable, __file__, "--measure", work, preset, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    missed = found["seconds"] > SECONDS or found["peak_mb"] > MEGABYTES or found["fault"]
    said = found["fault"] or ("missed" if missed else "")
    times = (f"{found[key]:.1f}" for key in ("seconds", "cpu"))
    line = ROW.format(preset, work, name, nodes, size, *times, f"{found['peak_mb']:.0f}", said)
    print(line.rstrip(), flush=True)
    return bool(missed)


def measure(work: str, preset: str, path: str) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    fault = ""
    if work == "export":
        moe_onnx_command(["export", "--preset", preset, "-o", path], standalone_mode=False)
    elif work == "check":
        onnx.checker.check_model(path, full_check=True)
    elif work == "validate":
        fault = ", ".join(moe_onnx.validate(path).codes)
    elif work == "load, plain":
        onnxruntime.InferenceSession(path)
    else:
        moe_onnx.InferenceSession(path, kernels="native")
    return {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "peak_mb": status("VmHWM") / 1e6,
        "fault": fault,
    }


if __name__ == "__main__":
    main()
