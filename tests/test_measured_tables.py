"""Tables of measurements in the pages: each is the one that its command makes of the figures that are kept."""

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import page_parts
import pytest
import source_figures
from page_parts import MEASURED, MeasuredTable, read_part

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def modules() -> Iterator[Mapping[str, ModuleType]]:
    """The benchmarks that have such a table, by name."""
    before = list(sys.path)
    sys.path += [str(ROOT), str(BENCHMARKS)]
    found: dict[str, ModuleType] = {}
    for file in sorted(BENCHMARKS.glob("*.py")):
        if "MeasuredTable(" in file.read_text(encoding="utf-8"):
            spec = importlib.util.spec_from_file_location(f"table_of_{file.stem}", file)
            assert spec is not None
            assert spec.loader is not None
            # Classes of tasks are looked up in their module, also on ranks.
            found[file.stem] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found[file.stem])
    yield found
    sys.path[:] = before
    for module in found.values():
        del sys.modules[module.__name__]


@pytest.fixture(scope="module")
def tables(modules: Mapping[str, ModuleType]) -> Sequence[MeasuredTable]:
    return [
        table
        for module in modules.values()
        for table in ([module.TABLE] if hasattr(module, "TABLE") else module.TABLES.values())
    ]


@pytest.mark.quick
def test_every_kept_result_has_a_table_and_the_other_way_round(tables: Sequence[MeasuredTable]) -> None:
    assert len(tables) > 10
    assert sorted(table.name for table in tables) == sorted(file.stem for file in MEASURED.iterdir())


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(file.stem for file in MEASURED.iterdir()))
def test_the_page_has_the_table_of_the_kept_result(tables: Sequence[MeasuredTable], name: str) -> None:
    (table,) = (each for each in tables if each.name == name)
    for language, page in table.pages.items():
        assert read_part(page, table.part) == table.section(language), f"{page}: write it by its command"


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(file.stem for file in MEASURED.iterdir()))
def test_both_languages_have_the_same_numbers(tables: Sequence[MeasuredTable], name: str) -> None:
    (table,) = (each for each in tables if each.name == name)
    english, chinese = (
        [numbers(line) for line in table.text(table.kept(), language).splitlines()[2:]] for language in ("en", "zh")
    )
    assert english == chinese


def numbers(line: str) -> list[str]:
    """The numbers in a line, sorted as text; Chinese counts 1.3 million as 130 times 10,000."""
    line = re.sub(r"(\d+) 万", lambda found: f"{int(found[1]) / 100:g}", line)
    return sorted(re.findall(r"\d[\d,.]*\d|\d", line))


@pytest.mark.quick
@pytest.mark.parametrize("json_file", [[], ["--json", "own/some.json"], ["--json=own/some.json"]])
def test_what_is_kept_is_written_with_its_command_and_day(
    json_file: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_parts, "ROOT", tmp_path)
    monkeypatch.setattr(page_parts, "MEASURED", tmp_path)
    words = ["--runs", "3", *json_file, "--docs"]
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "benchmarks" / "some.py"), *words])
    (tmp_path / "docs" / "zh").mkdir(parents=True)
    pages = [tmp_path / "docs" / "page.md", tmp_path / "docs" / "zh" / "page.md"]
    for page in pages:
        page.write_text("<!-- some -->\nold\n<!-- end -->\n", encoding="utf-8")
    table = MeasuredTable(
        name="some", part="some", page="docs/page.md", text=lambda rows, language: f"{language} {sum(rows)}"
    )
    table.keep([1, 2], date="2026-01-02", torch="2.0", cores=3)
    told = [page.read_text(encoding="utf-8").splitlines()[2:5] for page in pages]
    command = "python benchmarks/some.py --runs 3 --docs"
    assert told[0] == ["en 3", "", f"Measured on 2026-01-02 with PyTorch 2.0 on 3 cores: `{command}`."]
    assert told[1][0] == "zh 3"
    assert told[1][2].startswith("2026-01-02 ")
    assert f"`{command}`" in told[1][2]
    assert table.kept() == [1, 2]
    replace(table, dated_rows=True).write()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert command in text
        assert "2026" not in text


@pytest.mark.quick
@pytest.mark.parametrize(("kind", "ratio"), [("short", 2.0), ("peers", 1.5)])
def test_a_comparison_s_ratios_are_of_repeats_or_of_medians(
    modules: Mapping[str, Any], kind: str, ratio: float
) -> None:
    def method(name: str, seconds: Sequence[float], difference: float | None) -> dict[str, Any]:
        held = None if difference is None else {"difference": difference, "precision": "fp64"}
        figures = {"metric": 0.5, "sent_bytes": 2e6, "same_step": held, "repeats": [{"seconds": s} for s in seconds]}
        return {"method": name, "status": "measured", **figures}

    rows = [method("dp2", [2.0, 1.0, 4.0], 1e-16), method("ddp", [3.0, 2.0, 8.0], None)]
    table = modules["compare_tables"]
    found = table.rows_of({"rows": [*rows, {"method": "horovod", "status": "not installed"}]}, table.KINDS[kind])
    assert [row["method"] for row in found] == ["dp2", "ddp"]
    assert found[1]["ratio"] == ratio
    *_, line = table.markdown(found, "en", kind=table.KINDS[kind]).splitlines()
    sent = " 2.00 |" if kind == "short" else ""
    assert line == f"| `ddp` | 3.0 (2.0-8.0) | {ratio:.2f} |{sent} 50.00 % | asynchronous |"


@pytest.mark.quick
def test_the_rows_of_replicas_join_files_of_one_job(modules: Mapping[str, Any]) -> None:
    def file(hosts: int, faster: float) -> dict[str, Any]:
        ways = {
            way: {"seconds": seconds, "usage": {"sent": {"gradients": sent, "others": 10}}}
            for way, seconds, sent in (("dense", [faster, 2 * faster], 38_399_990), ("rows", [1.0, 2.0], 289_990))
        }
        return {"job": "recommender", "hosts": hosts, "ways": ways}

    table = modules["replicas_tables"]
    rows = table.rows_of([file(1, 1.21), file(2, 6.3), file(1, 1.0)])
    assert rows[0]["one_host"] == [1.21, 1.0]
    (*_, line) = table.rows_text(rows, "en").splitlines()
    assert line.endswith("| 38.4 MB | 0.29 MB | 6.3 | 1 to 1.21 |")


@pytest.mark.quick
def test_a_new_run_of_a_public_script_takes_the_place_of_the_old_one_and_its_remark(
    modules: Mapping[str, Any],
) -> None:
    table = modules["public_scripts"]
    curve = [{"gradient": 1e-7, "gradient_noise": 3e-7}, {"gradient": 2e-7, "gradient_noise": None}]
    proof = {"processes": 2, "steps": 2, "same_step": True, "kind": None, "first_difference": None, "curve": curve}
    before = table.TABLE.kept()
    after = table.merged(before, [table.row_of("accelerate-nlp", proof)])
    assert [(row["script"], row["ranks"]) for row in after] == [(row["script"], row["ranks"]) for row in before]
    assert [row for row in after if row not in before] == [
        {
            "script": "accelerate-nlp",
            "ranks": 2,
            "same_step": True,
            "steps": 2,
            "gradients": 2e-7,
            "noise": 3e-7,
            "kind": None,
            "first_step": None,
        }
    ]
    assert "| the same step: 2 steps, gradients within 2.0e-7, noise 3.0e-7 |" in table.markdown(after, "en")


@pytest.mark.quick
def test_jobs_that_were_not_measured_keep_their_rows(modules: Mapping[str, Any]) -> None:
    table = modules["shipped"]
    kept = table.TABLE.kept()
    digits = {"job": "digits", "score": 0.9876, "seconds": 3.4, "date": "2026-01-02"}
    rows = table.merged(kept, [digits])
    assert [row["job"] for row in rows] == list(table.JOBS)
    assert [row for row in rows if row not in kept] == [digits]
    assert "| accuracy 98.8 % | 3 s | 2026-01-02 |" in table.markdown(rows, "en")


def test_the_bytes_of_logits_in_chunks_are_those_of_a_fresh_run(modules: Mapping[str, Any]) -> None:
    kept = modules["loss_chunk"].TABLE.kept()
    fresh = modules["loss_chunk"].measured([row["chunk"] for row in kept if row["chunk"]])
    assert [row["chunk"] for row in fresh] == [row["chunk"] for row in kept]
    for mine, theirs in zip(fresh, kept, strict=True):
        assert mine["activations"] == pytest.approx(theirs["activations"], rel=1e-3)


@pytest.mark.slow
def test_fractions_of_mistakes_in_the_native_engine_are_those_of_a_fresh_run(modules: Mapping[str, Any]) -> None:
    """The large ones; what rounding makes of a right step differs from processor to processor."""
    proofs = modules["float32_proofs"]
    kept = [row for row in proofs.TABLES["fp32"].kept() if row["engine"] == "native"]
    fresh = proofs.rows_of("native", "fp32")
    assert [row["mistake"] for row in fresh] == [row["mistake"] for row in kept]
    for mine, theirs in zip(fresh, kept, strict=True):
        assert mine["same"] is theirs["same"] is (not mine["mistake"])
        for name in proofs.FIGURES:
            assert (mine[name] < 1) is (theirs[name] < 1), (mine, name)
            assert theirs[name] < 10 or mine[name] == pytest.approx(theirs[name], rel=0.1), (mine, name)


@pytest.mark.slow
@pytest.mark.quick
def test_the_figures_of_the_source_are_near_a_fresh_count() -> None:
    """Near, so that not every commit has to write them again."""
    fresh = source_figures.figures(ROOT / "src", on_the_stack=0)
    counts = [fresh.files, fresh.short, fresh.code, fresh.code / fresh.files, 100 * fresh.comments]
    for language in source_figures.PAGES:
        (*committed, _) = today(language)
        assert committed == [pytest.approx(count, rel=0.03, abs=1.0) for count in counts], (
            "tools/source_figures.py --write"
        )


@pytest.mark.slow
def test_as_many_files_lie_between_train_and_backward_as_the_table_says() -> None:
    assert len(source_figures.stack(ROOT / "src")) == today("en")[-1] == today("zh")[-1]


def today(language: str) -> list[Any]:
    """The last column of the table in ARCHITECTURE."""
    _, _, *rows = read_part(source_figures.PAGES[language], "tools/source_figures.py").splitlines()
    cells = [row.split("|")[-2].strip() for row in rows]
    return [int(cell.replace(",", "")) if "%" not in cell else float(cell.rstrip("%")) for cell in cells]
