"""Runs the zoo by the prover's wheel alone, in environments of its own, and writes docs/is-my-training-right.md.

python tools/zoo_wheel.py ENVIRONMENT...     of ENVIRONMENTS; without one, all

Each is made in build/prove-ENVIRONMENT: PyTorch and what the scripts import, then the wheel of packages/prove. The
zoo runs there from a folder from which the sources can't be imported. Scripts that import what isn't installed are
left out, and counted. The rows are kept in docs/zoo-wheel.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page_parts import markdown_table, write_parts

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "docs" / "zoo-wheel.json"
PART = "zoo-wheel"
PAGES = {"en": ROOT / "docs/is-my-training-right.md", "zh": ROOT / "docs/zh/is-my-training-right.md"}
TITLES = {
    "en": ("environment", "faults found", "kind named right", "right scripts", "of them judged wrongly", "left out"),
    "zh": ("环境", "找出的错误", "类别正确", "正确的脚本", "其中误判", "未运行"),
}


@dataclass(frozen=True, kw_only=True)
class ProverEnvironment:
    """What is installed beside the wheel."""

    title: Mapping[str, str]
    installs: Sequence[Sequence[str]]  # arguments of `pip install`, one after the other


_NOTHING = {"en": "nothing else", "zh": "没有别的"}
ENVIRONMENTS: Mapping[str, ProverEnvironment] = {
    "alone": ProverEnvironment(
        title={language: f"torch 2.13.0, {text}" for language, text in _NOTHING.items()},
        installs=[["torch==2.13.0"]],
    ),
    "transformers": ProverEnvironment(
        title=dict.fromkeys(
            ("en", "zh"), "torch 2.13.0, transformers 4.57.6, accelerate 1.15.0, deepspeed, lightning"
        ),
        installs=[
            ["torch==2.13.0"],
            ["transformers==4.57.6", "accelerate==1.15.0", "setuptools", "wheel"],
            ["--no-build-isolation", "deepspeed==0.19.3"],
            ["--no-deps", "lightning"],
        ],
    ),
    "oldest": ProverEnvironment(
        title={language: f"torch 2.4.1, {text}" for language, text in _NOTHING.items()},
        installs=[["torch==2.4.1"]],
    ),
}


def make(name: str, wheel: Path) -> Path:
    """Make an environment, and return its Python."""
    folder = ROOT / "build" / f"prove-{name}"
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    for install in ENVIRONMENTS[name].installs:
        subprocess.run([*pip, *install], check=True, env={**os.environ, "DS_BUILD_OPS": "0"})
    subprocess.run([*pip, "--force-reinstall", "--no-deps", str(wheel)], check=True)
    subprocess.run([*pip, str(wheel)], check=True)
    return python


def run_zoo(python: Path) -> Mapping[str, Any]:
    """The zoo's counts in an environment."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seen.json"
        subprocess.run([str(python), str(ROOT / "tools/zoo.py"), "--json", str(file)], cwd=folder, env=environ)
        seen = json.loads(file.read_text(encoding="utf-8"))
    faults = [each for each in seen if each["wanted"]["kind"] is not None]
    right = [each for each in seen if each["wanted"]["kind"] is None]
    every = [*ROOT.glob("zoo/fault_*.py"), *ROOT.glob("zoo/right_*.py")]
    return {
        "found": [sum(each["kind"] is not None for each in faults), len(faults)],
        "named": [sum(each["kind"] == each["wanted"]["kind"] for each in faults), len(faults)],
        "right": len(right),
        "wrong": sum(each["kind"] is not None or each["refused"] is not None for each in right),
        "left": len(every) - len(seen),
    }


def write(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the table into both pages."""
    for language, page in PAGES.items():
        cells = [
            [
                ENVIRONMENTS[name].title[language],
                "{} / {}".format(*row["found"]),
                "{} / {}".format(*row["named"]),
                str(row["right"]),
                str(row["wrong"]),
                str(row["left"]),
            ]
            for name in ENVIRONMENTS
            if (row := rows.get(name)) is not None
        ]
        write_parts(page, {PART: markdown_table(TITLES[language], cells)})


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the zoo by the prover's wheel alone.")
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help=f"of {', '.join(ENVIRONMENTS)}")
    names = parser.parse_args().names or [*ENVIRONMENTS]
    if unknown := [name for name in names if name not in ENVIRONMENTS]:
        parser.error(f"{unknown[0]} is no environment; there are {', '.join(ENVIRONMENTS)}")
    rows = json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.exists() else {}
    with tempfile.TemporaryDirectory() as dist:
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", dist, str(ROOT / "packages/prove")]
        subprocess.run(build, check=True)
        (wheel,) = Path(dist).glob("*.whl")
        for name in names:
            rows[name] = run_zoo(make(name, wheel))
            print(name, rows[name], flush=True)
            ROWS.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    write(rows)


if __name__ == "__main__":
    main()
