"""The documentation: links lead somewhere, commands are real ones, every key is described, both languages agree."""

import ast
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args

import engine_table
import pytest
import yaml
from page_parts import read_part

import samestep
from samestep import launchers, layout
from samestep.cli.main import COMMANDS, _parser
from samestep.data.text import READERS, known_suffixes
from samestep.data.text import SOURCES as SOURCES_OF_TEXTS
from samestep.engines import ENGINES
from samestep.engines.registry import resolve
from samestep.job import Run
from samestep.launch.environments.base import ClusterEnvironment
from samestep.launch.environments.registry import PLACES

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
AT_THE_ROOT = ("README", "ARCHITECTURE", "CONTRIBUTING", "SECURITY")  # each with its twin NAME.zh-CN.md
PAGES = sorted([*(page for name in AT_THE_ROOT for page in ROOT.glob(f"{name}*.md")), *DOCS.rglob("*.md")])
PAIRS = [
    *((ROOT / f"{name}.md", ROOT / f"{name}.zh-CN.md") for name in AT_THE_ROOT),
    *(
        (page, DOCS / "zh" / page.relative_to(DOCS))
        for page in PAGES
        if page.is_relative_to(DOCS) and "zh" not in page.parts
    ),
]
RECIPE, RUN, LAYOUTS = ([DOCS / name, DOCS / "zh" / name] for name in ("recipe.md", "run.md", "layout-syntax.md"))

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path) -> list[tuple[str, str]]:
    """The language and the content of each fenced block."""
    return BLOCK.findall(read(page))


def prose(page: Path) -> str:
    return BLOCK.sub("", read(page))


def headings(page: Path) -> list[str]:
    """The headings, each with its number signs."""
    return re.findall(r"^#+ .*$", prose(page), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link to a heading is called, as the usual viewers make it: small letters, dashes, no punctuation."""
    texts = [heading.lstrip("#").strip().lower() for heading in headings(page)]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


def needs_its_twin(page: Path, other: Path) -> str | None:
    """What to do where one of two pages isn't there; None where both are."""
    for here, missing in ((page, other), (other, page)):
        if not missing.is_file():
            return f"{name_of(here)} needs its twin {name_of(missing)}"
    return None


def test_the_pages_are_there_in_both_languages() -> None:
    assert {page.stem for page, _ in PAIRS} >= {
        "README",
        "promise",
        "recipe",
        "run",
        "layout-syntax",
        "own-tasks",
        "contract",
        "layouts",
    }
    chinese = [page for page in PAGES if page.is_relative_to(DOCS / "zh")]
    pairs = [*PAIRS, *((DOCS / page.relative_to(DOCS / "zh"), page) for page in chinese)]
    assert [told for pair in pairs if (told := needs_its_twin(*pair)) is not None] == []


def test_a_missing_twin_is_named() -> None:
    page, none = DOCS / "faults.md", DOCS / "zh" / "none.md"
    assert needs_its_twin(page, none) == "docs/faults.md needs its twin docs/zh/none.md"
    assert needs_its_twin(none, page) == "docs/faults.md needs its twin docs/zh/none.md"
    assert needs_its_twin(page, page) is None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(file), target


@pytest.mark.parametrize(("page", "other"), PAIRS, ids=lambda page: name_of(page))
def test_both_languages_have_the_same_tables_lists_and_blocks(page: Path, other: Path) -> None:
    assert needs_its_twin(page, other) is None
    assert blocks(page) == blocks(other)
    rows = [len(re.findall(r"^\|", prose(each), re.MULTILINE)) for each in (page, other)]
    assert rows[0] == rows[1]
    items = [len(re.findall(r"^(?:- |\d\. )", prose(each), re.MULTILINE)) for each in (page, other)]
    assert items[0] == items[1]


# Words that were given up, so that each term has one; what stands in their place.
GIVEN_UP = {
    "任务文件": "作业文件 (job file); a task is 任务, and a job 作业",
    "约定": "契约 (contract), or 惯例 (convention)",
}
CHINESE = [*(other for _, other in PAIRS), *(ROOT / "src" / "samestep" / "templates").rglob("*.zh-CN.md")]


@pytest.mark.parametrize("page", CHINESE, ids=name_of)
def test_each_term_has_one_chinese_word(page: Path) -> None:
    text = read(page)
    assert {word: instead for word, instead in GIVEN_UP.items() if word in text} == {}


CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
PLACEHOLDER = re.compile(r"<[^<>]+>")


def inline_code(text: str) -> set[str]:
    """What stands as code within paragraphs, lists and tables, without the line breaks inside it.

    What a placeholder such as `<name>` is called is left out: it is a word of the page's language.
    """
    return {PLACEHOLDER.sub("<>", " ".join(code.split())) for _, code in CODE.findall(text)}


@pytest.mark.parametrize(("page", "other"), PAIRS, ids=lambda page: name_of(page))
def test_both_languages_have_the_same_code_in_their_sentences(page: Path, other: Path) -> None:
    here, there = (inline_code(prose(each)) for each in (page, other))
    assert (here - there, there - here) == (set(), set())


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a `dp2` and `` `x` ``, `dp2` again", {"dp2", "`x`"}),
        ("`train a\n  job`, `logs/<名字>/a`", {"train a job", "logs/<>/a"}),
        ("no code", set()),
    ],
)
def test_code_in_sentences_is_found(text: str, code: set[str]) -> None:
    assert inline_code(text) == code


def commands(page: Path) -> Iterator[list[str]]:
    """The words after `samestep` of each command shown, also of those that torchrun starts."""
    for language, content in blocks(page):
        if language != "sh":
            continue
        for line in content.replace("\\\n", " ").splitlines():
            words = shlex.split(line.partition(" > ")[0], comments=True)
            if words[:1] == ["samestep"]:
                yield words[1:]
            elif "samestep" in words and words[words.index("samestep") - 1] == "-m":
                yield words[words.index("samestep") + 1 :]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_parse_and_name_job_files_that_are_there(page: Path) -> None:
    for words in commands(page):
        options = _parser().parse_args(words)
        if getattr(options, "job", None) is not None and options.job.parts[0] == "examples":
            assert (ROOT / options.job).is_file(), words


def test_commands_are_found() -> None:
    assert sum(1 for page in PAGES for _ in commands(page)) > 10


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_scripts_and_examples_that_are_shown_are_there(page: Path) -> None:
    for path in re.findall(r"\b(?:examples|benchmarks)/[\w/.-]*\w", read(page)):
        assert (ROOT / path).exists(), path


EXAMPLES = {read(file).splitlines()[0]: file for file in sorted((ROOT / "examples").glob("*.*"))}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_an_example_that_is_shown_whole_is_the_one_that_is_there(page: Path) -> None:
    for _, content in blocks(page):
        file = EXAMPLES.get(content.partition("\n")[0])
        if file is not None:
            assert content == read(file), file.name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_and_yaml_that_is_shown_can_be_read(page: Path) -> None:
    for language, content in blocks(page):
        if language == "python":
            compile(content, name_of(page), "exec")
        if language == "yaml":
            assert isinstance(yaml.safe_load(content), dict)


# A step of samestep may take as much of the same step in a hand-written loop.
MOST_OVERHEAD = 1.05

SOURCES = [page for page in PAGES if page.stem.partition(".")[0] in ("ARCHITECTURE", "CONTRIBUTING")]


@pytest.mark.parametrize("page", SOURCES, ids=name_of)
def test_files_of_the_source_that_are_named_are_there_with_their_tables(page: Path) -> None:
    text = read(page)
    named = set(re.findall(r"`([\w/.-]+(?:\.py|\.md|/))`", text))
    assert len(named) > 10
    for path in (each for each in named if "NAME" not in each):
        assert (ROOT / path).exists() or (ROOT / "src" / "samestep" / path).exists(), path
    tables = re.findall(r"`([A-Z]{3,})` in `(src/[^`]+)`|`(src/[^`]+)` [里的]+ ?`([A-Z]{3,})`", text)
    for name, path, path_before, name_after in tables:
        source = read(ROOT / (path or path_before))
        assert re.search(rf"^{name or name_after}\b", source, re.MULTILINE), (name or name_after, path)
    assert len(tables) >= 3


@pytest.mark.parametrize("page", [page for page in SOURCES if page.name.startswith("ARCH")], ids=name_of)
def test_every_package_stands_on_the_map(page: Path) -> None:
    packages = {path.parent.name for path in (ROOT / "src" / "samestep").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"`(\w+)/`", read(page)))


@pytest.mark.parametrize("page", LAYOUTS, ids=name_of)
def test_every_option_of_a_layout_is_described(page: Path) -> None:
    text = prose(page)
    for field in fields(layout.Layout):
        if field.name in layout._OPTIONS or field.name in ("stages", "order"):
            assert f"`{field.name}=`" in text
        elif field.name != "zero":
            assert f"| {field.name} |" in text
    for choices in (
        layout.Schedule,
        layout.Recompute,
        layout.Offload,
        layout.SequenceOption,
        layout.AttentionOption,
        layout.Balance,
    ):
        for choice in get_args(choices):
            assert f"`{choice}`" in text
    for preset in layout.PRESETS:
        assert f"`{preset}`" in text


def in_both_languages(name: str) -> list[Path]:
    return [DOCS / name, DOCS / "zh" / name]


def first_cells(page: Path, columns: int) -> list[str]:
    """What stands as code, linked or not, in the first cell of each row of the tables with so many columns."""
    rows = re.findall(r"^\| (?:\[)?`([\w.-]+)`(.*)\|$", prose(page), re.MULTILINE)
    return [name for name, rest in rows if rest.count(" | ") == columns - 1]


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_called_by_its_key(name: str) -> None:
    assert resolve(name).name == name


@pytest.mark.parametrize("language", engine_table.PAGES)
def test_the_tables_of_engines_are_made_of_their_abilities(language: str) -> None:
    """After a change: python tools/engine_table.py."""
    page = engine_table.PAGES[language]
    assert read_part(page, engine_table.ENGINE_PART) == engine_table.engine_rows(language)
    assert read_part(page, engine_table.PART) == engine_table.ability_table(language)
    compared = engine_table.METHOD_PAGES[language]
    assert read_part(compared, engine_table.METHOD_PART) == engine_table.method_table(language)


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_message_that_lists_the_sources_of_texts_lists_all(page: Path) -> None:
    shown = "\n".join(content for _, content in blocks(page))
    (told,) = re.findall(r'source is "review"; .* known: (.*)$', shown, re.MULTILINE)
    assert told == f"{', '.join(sorted(SOURCES_OF_TEXTS))}, or a path to a {known_suffixes()} file"


@pytest.mark.parametrize("page", in_both_languages("places.md"), ids=name_of)
def test_every_place_stands_in_the_table_in_its_order(page: Path) -> None:
    assert first_cells(page, columns=3) == [place.name for place in PLACES]


# Of each place that is found by variables: how they look, and what else in `launchers` reads them than the functions
# that the place's module imports.
VARIABLES = {
    "torchrun": (r"RANK|WORLD_SIZE|(LOCAL|GROUP|MASTER|TORCHELASTIC)_[A-Z_]+", ()),
    "open-mpi": (r"(OMPI|PMIX)_\w+", ()),
    "sagemaker": (r"(SM|SAGEMAKER|TRAINING)_[A-Z_]+", ("sagemaker_interface",)),
    "pytorchjob": (r"RANK|WORLD_SIZE|(MASTER|PET|KUBERNETES)_[A-Z_]+", ()),
    "slurm": (r"SLURM_[A-Z_]+", ()),
    "lsf": (r"LSB_[A-Z_]+", ()),
    "ray": (r"RAY_[A-Z_]+", ()),
}


def readers(names: Iterable[str]) -> list[ast.AST]:
    """The functions of `launchers` with these names, and those that they call."""
    tree = ast.parse(inspect.getsource(launchers))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: dict[str, ast.AST] = {}
    left = [name for name in names if name in functions]
    while left:
        name = left.pop()
        found[name] = functions[name]
        used = {each.id for each in ast.walk(functions[name]) if isinstance(each, ast.Name)}
        left += [each for each in used if each in functions and each not in found]
    return list(found.values())


def variables_read(place: ClusterEnvironment) -> set[str]:
    """The names of variables that a place's module reads, or what `launchers` does for it."""
    look, others = VARIABLES[place.name]
    module = inspect.getmodule(type(place))
    assert module is not None
    tree = ast.parse(inspect.getsource(module))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == launchers.__name__]
    names = {alias.name for node in imports for alias in node.names} | {*others}
    # A module's constants also name what it doesn't read, such as what is kept from others.
    own = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    literals = [each for node in [*own, *readers(names)] for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return {each.value for each in literals if isinstance(each.value, str) and re.fullmatch(look, each.value)}


@pytest.mark.parametrize("page", in_both_languages("places.md"), ids=name_of)
def test_every_variable_that_a_place_reads_stands_in_its_row(page: Path) -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*?) \| [^|]* \|$", prose(page), re.MULTILINE))
    by_variables = {place.name for place in PLACES} - {"hostfile", "this-machine"}
    assert sorted(VARIABLES) == sorted(by_variables), "add the pattern of the place's variables to VARIABLES above"
    for place in PLACES:
        if place.name in VARIABLES:
            told = [re.sub("^_", "OMPI_COMM_WORLD_", name) for name in re.findall(r"`(\w+)`", rows[place.name])]
            assert sorted(told) == sorted(variables_read(place)), place.name


# The pages of what works, in English and in Chinese, and places that they call by what people know.
WHAT_WORKS = (DOCS / "what-works.md", DOCS / "zh" / "what-works.md")
KNOWN_AS = {"pytorchjob": ("Kubernetes", "Kubernetes"), "this-machine": ("local processes", "本机多进程")}


@pytest.mark.parametrize("language", [0, 1], ids=["en", "zh"])
def test_every_place_stands_in_the_row_of_starts(language: int) -> None:
    rows = [re.findall(r"^\| (?:start|启动) \|(.*?)\|", read(page), re.MULTILINE) for page in WHAT_WORKS]
    (row,) = rows[language]
    for place in PLACES:
        name = KNOWN_AS.get(place.name, (place.name, place.name))[language]
        assert re.search(name.replace("-", ".?"), row, re.IGNORECASE), name


@pytest.mark.parametrize("page", RECIPE, ids=name_of)
def test_every_source_and_format_of_texts_is_described(page: Path) -> None:
    text = prose(page)
    (row,) = re.findall(r"^\| `recipe\.data\.source` .*`debian-packages`.*$", text, re.MULTILINE)
    listed = re.findall(r"^- (?:a )?`([\w.-]+)`.*$", text, re.MULTILINE)
    for name in (*SOURCES_OF_TEXTS, *READERS):
        assert f"`{name}`" in row, name
        assert name in listed, name


def test_every_page_stands_in_the_navigation_of_the_site() -> None:
    _, _, navigation = read(ROOT / "mkdocs.yml").partition("\nnav:\n")
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    generated = {"reference.md", "zh/reference.md"}  # tools/docs_site.py makes them
    assert set(re.findall(r"[\w/-]+\.md", navigation)) == pages | generated


def test_the_reference_of_the_site_has_every_public_name_once() -> None:
    pytest.importorskip("mkdocs")
    from docs_site import _groups

    names = [name for _, homes in _groups() for name in homes]
    assert sorted(names) == sorted(samestep.__all__)


def test_the_site_joins_the_lines_of_chinese_paragraphs_alone() -> None:
    pytest.importorskip("mkdocs")
    from docs_site import _joined

    paragraphs = "# 标题\n先说，\n再说\n完了。\n\n- 甲\n  续\n- 乙\n\n| 表 |\n| 行 |\nPyTorch 的\nDDP\n"
    assert _joined(paragraphs) == "# 标题\n先说，再说完了。\n\n- 甲续\n- 乙\n\n| 表 |\n| 行 |\nPyTorch 的\nDDP\n"


@pytest.mark.slow
@pytest.mark.processes
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "samestep.api.train" in (tmp_path / "site" / "reference" / "index.html").read_text(encoding="utf-8")


def test_the_overhead_that_the_pages_show_is_within_its_limit() -> None:
    """tests/test_measured_tables.py compares the tables in the pages with this file."""
    rows = json.loads(read(ROOT / "benchmarks" / "measured" / "overhead.json"))["result"]
    assert len(rows) == 4
    for row in rows:
        assert row["least"] <= row["ratio"] <= row["most"]
        assert row["ratio"] <= MOST_OVERHEAD


@pytest.mark.parametrize("page", WHAT_WORKS, ids=name_of)
def test_what_works_names_every_command(page: Path) -> None:
    row = next(line for line in read(page).splitlines() if line.startswith(("| commands |", "| 命令 |")))
    assert re.findall(r"`(\w+)`", row) == [command.__name__.rpartition(".")[2] for command in COMMANDS]


def test_the_options_of_a_session_have_the_defaults_of_a_runs_keys() -> None:
    keys = {each.name: each.default for each in fields(Run)}
    options = inspect.signature(samestep.session).parameters
    shared = options.keys() & keys.keys() - {"layout"}  # "ddp" is as many replicas as torchrun has started
    assert len(shared) >= 14
    assert {name: options[name].default for name in shared} == {name: keys[name] for name in shared}


@pytest.mark.processes  # griffe asks git for the repository
def test_the_reference_shows_a_session_with_its_keywords(tmp_path: Path) -> None:
    """mkdocstrings reads sources without running them; a copy of the few that matter takes less time."""
    griffe = pytest.importorskip("griffe")
    (listed,) = re.findall(r"^ {12}extensions: \[(.*)\]", read(ROOT / "mkdocs.yml"), re.MULTILINE)
    extensions = [str(ROOT / name) if "/" in name else name for name in listed.split(", ")]
    for name in ("__init__.py", "options.py", "training/__init__.py", "training/session.py"):
        file = tmp_path / "samestep" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "src/samestep" / name, file)
    package = griffe.load("samestep", search_paths=[tmp_path], extensions=griffe.load_extensions(*extensions))
    shown = [parameter.name for parameter in package["training.session.session"].parameters]
    assert shown == [*inspect.signature(samestep.session).parameters]


def test_the_reference_of_train_names_every_key_of_a_run() -> None:
    reference = samestep.train.__doc__ or ""
    keys = re.findall(r"[a-z0-9_]+", reference.partition("section:")[2].partition(".")[0])
    assert sorted(keys) == sorted(field.name for field in fields(Run) if field.name != "layout")
