"""Figures of the source for ARCHITECTURE, beside those of an earlier revision.

    python tools/source_figures.py [--before REVISION] [--write]

Counted are the Python files under src/samestep: those of the working tree, and those of the revision, by default the
one before the modules got their present places and names. A line of code holds a token that belongs to no comment, no
docstring and no import. Files from `train` to `backward` are those of samestep on the stack when a training in one
process calls `Tensor.backward`.
"""

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tarfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from page_parts import markdown_table, write_parts

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "16dd66b^"
PAGES = {"en": ROOT / "ARCHITECTURE.md", "zh": ROOT / "ARCHITECTURE.zh-CN.md"}
WORDS = {
    "en": (
        "files",
        "of them with 40 lines or fewer",
        "lines of code",
        "lines of code a file",
        "comments and docstrings, of all lines that aren't blank",
        "files from `train` to `backward`",
    ),
    "zh": (
        "文件",
        "其中不超过 40 行的",
        "代码行",
        "每个文件的代码行",
        "注释和 docstring 占非空行",
        "从 `train` 到 `backward` 的文件",
    ),
}
HEADS = {"en": ("", "before", "today"), "zh": ("", "以前", "现在")}
_BLANK = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}

# Prints samestep's files on the stack of the last backward, from the outermost. Earlier ones are those of checks, and
# of the step whose memory and messages are measured.
_TRACE = """
import json, os, sys, torch, samestep
found, own = [], torch.Tensor.backward
def backward(*arguments, **keywords):
    frame = sys._getframe()
    found.clear()
    while frame is not None:
        name = frame.f_code.co_filename
        if "/src/samestep/" in name and name not in found:
            found.insert(0, name)
        frame = frame.f_back
    return own(*arguments, **keywords)
torch.Tensor.backward = backward
recipe = samestep.Recipe(task="regression", batch=8, steps=5, optimizer=samestep.AdamW(lr=0.01))
samestep.train(recipe, layout="single")
print(json.dumps(found), flush=True)
"""


class Figures(NamedTuple):
    """What is counted of a source tree."""

    files: int
    short: int
    code: int
    comments: float  # share of the lines that aren't blank
    stack: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default=BEFORE, metavar="REVISION")
    parser.add_argument("--write", action="store_true", help="write the table into ARCHITECTURE")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", options.before, "src"], cwd=ROOT, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        before, today = (figures(each, len(stack(each))) for each in (Path(folder) / "src", ROOT / "src"))
    for language, page in PAGES.items():
        rows = [[name, *pair] for name, *pair in zip(WORDS[language], shown(before), shown(today), strict=True)]
        text = markdown_table(HEADS[language], rows)
        if options.write:
            write_parts(page, {"tools/source_figures.py": text})
        elif language == "en":
            print(text)


def shown(found: Figures) -> list[str]:
    a_file = f"{found.code / found.files:.0f}"
    return [
        *(f"{number:,}" for number in (found.files, found.short, found.code)),
        a_file,
        f"{found.comments:.1%}",
        str(found.stack),
    ]


def figures(source: Path, on_the_stack: int) -> Figures:
    texts = [path.read_text(encoding="utf-8") for path in sorted((source / "samestep").rglob("*.py"))]
    code = comments = lines = short = 0
    for text in texts:
        mine, said = counted(text)
        code, comments = code + mine, comments + said
        lines += sum(1 for line in text.splitlines() if line.strip())
        short += len(text.splitlines()) <= 40
    return Figures(len(texts), short, code, comments / lines, on_the_stack)


def counted(text: str) -> tuple[int, int]:
    """Lines of code, and lines that hold a comment or belong to a docstring."""
    tree = ast.parse(text)
    docstrings = {line for node in _docstrings(tree) for line in _lines(node)}
    imports = {
        line for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom)) for line in _lines(node)
    }
    written = [bool(line.strip()) for line in text.splitlines()]
    code, comments = set[int](), {line for line in docstrings if written[line - 1]}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        where = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            comments.update(where)
        elif token.type not in _BLANK:
            code.update(line for line in where if line not in docstrings and line not in imports)
    return len(code), len(comments)


def _docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            yield node.body[0]


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def stack(source: Path) -> list[str]:
    """The files of samestep on the stack of a step's backward."""
    environ = {**os.environ, "PYTHONPATH": str(source), "PYTHONWARNINGS": "ignore"}
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _TRACE], cwd=folder, env=environ, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"the training of {source} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
