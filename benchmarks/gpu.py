"""Checks and measures samestep on this machine's accelerators: results, memory, and speed beside a compiled loop.

    python benchmarks/gpu.py [--only SECTION ...] [--small] [--seconds 470] [--json FILE] [--docs]

Uses all accelerators of the machine, at least one, and takes less than 8 minutes. The loop to compare with is
hand-written, its model compiled. Each section runs in its own process and is skipped if it takes too long. Without an
accelerator it runs the sections that a CPU can run, with small models, and reports those it skipped. `--docs` writes
the tables into docs/gpu.md and docs/zh/gpu.md, with the machine named.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import torch
from page_parts import markdown_table, write_parts
from rich.console import Console
from rich.table import Table

from samestep.launch.device import accelerator_names, accelerators, build

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"

# The sections in the order in which they run, with their titles in both languages.
TITLES: Mapping[str, tuple[str, str]] = {
    "doctor": ("What the machine has", "机器有什么"),
    "proofs": ("Layouts versus one process, in float64", "各布局与单进程的对照（float64）"),
    "precisions": ("Precisions", "精度"),
    "attention": ("Attention in bf16", "bf16 的注意力"),
    "throughput": ("Tokens a second", "每秒 token 数"),
    "memory": ("Memory", "内存"),
    "offload": ("Offload", "卸载"),
    "checkpoints": ("Checkpoints", "检查点"),
    "waits": ("Waits for the device", "对设备的等待"),
}

Result = Mapping[str, Any]  # titles, rows, left_out

KEPT_FOR_EACH = 25.0  # seconds reserved for each later section


def machine() -> str:
    """A line that describes the machine."""
    names = accelerator_names()
    what = f"{len(names)} x {names[0]}" if names else f"no accelerator, {torch.get_num_threads()} threads of a CPU"
    return f"{what}; PyTorch {torch.__version__} ({build()})"


def run(section: str, size: str, seconds: float) -> Result:
    """Run a section in its own process; if that fails or takes too long, the result has the reason."""
    command = [sys.executable, str(HERE / "gpu.py"), "--section", section, "--size", size]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"titles": [], "rows": [], "left_out": [f"all of it: it took more than {seconds:.0f} s"]}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return {"titles": [], "rows": [], "left_out": [f"all of it: it failed ({last})"]}
    result: Result = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def limit(left: float, *, later: int) -> float:
    """Seconds that a section may take of those left, with some reserved for each later section."""
    return max(left / (later + 1), left - KEPT_FOR_EACH * later, 1.0)


def show(console: Console, section: str, result: Result, seconds: float) -> None:
    title = f"{TITLES[section][0]} ({seconds:.0f} s)"
    if result["rows"]:
        table = Table(*result["titles"], title=title)
        for row in result["rows"]:
            table.add_row(*row)
        console.print(table)
    else:
        console.print(title)
    for each in result["left_out"]:
        console.print(f"  left out: {each}")


def page(results: Mapping[str, Result], language: int) -> str:
    """The generated part of the page, in English (0) or Chinese (1)."""
    of_machine, left = (("Measured on", "Left out"), ("测量机器：", "未做"))[language]
    lines = [f"{of_machine} {machine()}.", ""]
    for section, result in results.items():
        lines += [f"### {TITLES[section][language]}", ""]
        if result["rows"]:
            rows = [[cell.replace("|", "/") for cell in row] for row in result["rows"]]
            lines += [markdown_table(result["titles"], rows, align="l"), ""]
        lines += [f"- {left}: {each}" for each in result["left_out"]]
        lines += [""] * bool(result["left_out"])
    return "\n".join(lines)


def write_docs(results: Mapping[str, Result]) -> None:
    for language, file in enumerate((DOCS / "gpu.md", DOCS / "zh" / "gpu.md")):
        write_parts(file, {"measured": page(results, language).rstrip("\n")})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=TITLES, default=list(TITLES), help="sections to run")
    parser.add_argument("--small", action="store_true", help="small models, also where there is an accelerator")
    parser.add_argument("--seconds", type=float, default=470.0, help="for all sections together")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--docs", action="store_true", help="write docs/gpu.md and docs/zh/gpu.md")
    parser.add_argument("--section", choices=TITLES, help=argparse.SUPPRESS)
    parser.add_argument("--size", default="tiny", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.section is not None:
        from gpu_sections import SECTIONS

        print(json.dumps(asdict(SECTIONS[asked.section](asked.size))))
        return 0
    console = Console()
    size = "350M" if accelerators() and not asked.small else "tiny"
    console.print(machine())
    until = time.monotonic() + asked.seconds
    results: dict[str, Result] = {}
    for number, section in enumerate(asked.only, 1):
        began = time.monotonic()
        results[section] = run(section, size, limit(until - began, later=len(asked.only) - number))
        show(console, section, results[section], time.monotonic() - began)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"machine": machine(), "sections": results}, indent=1), encoding="utf-8")
    if asked.docs:
        write_docs(results)
    return int(any(each["left_out"][:1] and "it failed" in each["left_out"][0] for each in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
