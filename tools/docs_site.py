"""What the site has beside the pages of docs/: linked files, the reference, and a navigation for each language.

A hook of MkDocs (mkdocs.yml names it). The pages are written for a viewer of the repository, and stay as they are:

- A link to a file outside of docs/, such as an example, leads to a page of the site that shows the file.
- The reference is made of the docstrings of every name that `samestep` exports.
- A page shows the navigation and the words of its own language, and leads to the same page in the other one.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
SHOWN = "files"  # the folder of the site with the files outside of docs/
CHINESE = "zh/"
LANGUAGES = {"en": "English", "zh": "中文"}

_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
# A line that ends in Chinese, is no heading and no row of a table, and is continued in Chinese on the next line. A
# browser would show the line break between them as a space.
_CONTINUED = re.compile(
    r"^(?![#|])(.*[\u3000-\u30ff\u4e00-\u9fff\uff00-\uffef])\n[ ]*(?=[\u3000-\u9fff\uff00-\uffef])", re.MULTILINE
)

# The public names in the order in which one meets them; the others follow under the last heading.
_GROUPS = (
    ("Jobs", ("train", "verify", "dry_run", "check", "compare", "evaluate", "load_model")),
    (
        "Recipes",
        ("Recipe", "AdamW", "SGD", "NamedOptimizer", "Group", "Schedule", "Average", "Evaluation", "EarlyStop"),
    ),
    ("Runs", ("Layout", "Run", "Job", "Checkpointing", "LoRA")),
    ("Tasks", ("Task", "Batch", "Samples", "Work", "InTurns", "Turn", "Gather", "alone")),
    ("Loops of one's own", ("session", "Session")),
    ("Results", ("TrainResult", "Proof", "CheckResult", "Comparison", "Usage")),
    ("Errors", ()),
)
_REFERENCE = "# Reference\n\nThe public names of the package, from its docstrings.\n\n"
_CHINESE_REFERENCE = "# 参考\n\n这个包的公开名称；说明取自文档字符串，是英文的。\n\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference in both languages, and a page for each file outside of docs/ that is linked to."""
    files.append(File.generated(config, "reference.md", content=_REFERENCE + _reference()))
    files.append(File.generated(config, f"{CHINESE}reference.md", content=_CHINESE_REFERENCE + _names()))
    waiting = list(DOCS.rglob("*.md"))
    seen: set[Path] = set()
    while waiting:
        page = waiting.pop()
        for target in _outside(page):
            if target not in seen:
                seen.add(target)
                waiting += [target] if target.suffix == ".md" else []
                name, content = _name_of(target), _shown(target)
                files.append(File.generated(config, name, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that only hold in the repository to pages of the site."""
    here = page.file.src_uri
    origin = ROOT / here.removeprefix(f"{SHOWN}/").removesuffix(".page.md") if here.startswith(SHOWN) else DOCS / here
    if not origin.is_file() or (here.startswith(SHOWN) and origin.suffix != ".md"):
        return markdown

    def turned(found: re.Match[str]) -> str:
        start, link, end = found.groups()
        target = _target(origin, link)
        if target is None or (target.is_relative_to(DOCS) and origin.is_relative_to(DOCS)):
            return found[0]
        return start + _relative(here, _name_of(target)) + end

    parts = _split(markdown)
    return "".join(part if fenced else _joined(_LINK.sub(turned, part)) for part, fenced in parts)


def on_page_context(context: dict[str, Any], *, page: Page, config: MkDocsConfig, nav: Navigation) -> dict[str, Any]:
    """Show the navigation of the page's language, its words, and a link to the page in the other language."""
    language = "zh" if page.file.src_uri.startswith(CHINESE) or "zh-CN" in page.file.src_uri else "en"
    config.theme["language"] = language
    sections = {"en": nav.items[0], "zh": nav.items[1]}
    section = sections[language]
    assert isinstance(section, Section)
    shown = Navigation(section.children, nav.pages)
    shown.homepage = section.children[0] if isinstance(section.children[0], Page) else nav.homepage
    context["nav"] = shown
    by_uri = {each.file.src_uri: each for each in nav.pages}
    uri = page.file.src_uri.removeprefix(CHINESE)
    there = {name: by_uri.get(folder + uri) for name, folder in (("en", ""), ("zh", CHINESE))}
    homes = {"en": "", "zh": CHINESE}
    config.extra["alternate"] = [
        {"name": title, "lang": name, "link": found.url if (found := there[name]) is not None else homes[name]}
        for name, title in LANGUAGES.items()
    ]
    return context


def _reference() -> str:
    """A heading for each group of public names, and under it what mkdocstrings puts in place of a name."""
    return "".join(
        f"## {title}\n\n" + "".join(f"::: {home}.{name}\n\n" for name, home in homes.items())
        for title, homes in _groups()
    )


def _names() -> str:
    """A line for each group of public names, each of which leads to its place in the reference."""
    return "\n".join(
        "- " + ", ".join(f"[{name}](../reference.md#{home}.{name})" for name, home in homes.items())
        for _, homes in _groups()
    )


def _groups() -> Iterator[tuple[str, Mapping[str, str]]]:
    """The title of each group, and its names with their modules."""
    homes = _homes()
    placed = {name for _, names in _GROUPS for name in names}
    for title, names in _GROUPS:
        yield title, {name: homes[name] for name in (names or sorted(set(homes) - placed))}


def _homes() -> Mapping[str, str]:
    """The module of each public name, read without importing the package."""
    tree = ast.parse((ROOT / "src" / "samestep" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
            return ast.literal_eval(node.value)
    raise LookupError("src/samestep/__init__.py has no table _HOME of the public names")


def _joined(markdown: str) -> str:
    """Join the lines of Chinese paragraphs, in which words have no spaces between them."""
    before = ""
    while markdown != before:  # a match ends where the next one may begin
        before, markdown = markdown, _CONTINUED.sub(r"\1", markdown)
    return markdown


def _outside(page: Path) -> Iterator[Path]:
    """The files outside of docs/ that a page links to."""
    for part, fenced in _split(page.read_text(encoding="utf-8")):
        for _, link, _ in [] if fenced else _LINK.findall(part):
            target = _target(page, link)
            if target is not None and not target.is_relative_to(DOCS):
                yield target


def _target(origin: Path, link: str) -> Path | None:
    """The file of the repository that a link leads to; None where it leads elsewhere."""
    if "://" in link or link.startswith("mailto:"):
        return None
    target = (origin.parent / link).resolve()
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def _name_of(target: Path) -> str:
    """Where a file of the repository stands in the site."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    name = f"{SHOWN}/{target.relative_to(ROOT).as_posix()}"
    return name if target.suffix == ".md" and target.name != "README.md" else f"{name}.page.md"


def _shown(target: Path) -> str:
    text = target.read_text(encoding="utf-8")
    if target.suffix == ".md":
        return text
    language = {".py": "python", ".yaml": "yaml", ".json": "json"}.get(target.suffix, "text")
    return f"# {target.relative_to(ROOT).as_posix()}\n\n```{language}\n{text.rstrip()}\n```\n"


def _relative(here: str, there: str) -> str:
    up = len(PurePosixPath(here).parent.parts)
    return "../" * up + there


def _split(markdown: str) -> Iterator[tuple[str, bool]]:
    """The parts of a page, and whether each is a fenced block."""
    end = 0
    for found in _FENCED.finditer(markdown):
        yield markdown[end : found.start()], False
        yield found[0], True
        end = found.end()
    yield markdown[end:], False
