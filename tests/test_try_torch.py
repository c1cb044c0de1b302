"""The table of PyTorch's versions in docs/tested.md: made from its file, the newest first, in both languages."""

import json

import pytest
import try_torch
from page_parts import read_part

pytestmark = pytest.mark.quick

OLD = {
    "torch": "2.9.1",
    "python": "3.11.7",
    "day": "2026-01-02",
    "private": {"passed": 40, "failed": 1},
    "proved": ["dp2"],
    "layouts": 8,
    "quick": None,
    "failed": ["tests/test_torch_internals.py::test_process_groups"],
}
NEW = {**OLD, "torch": "2.14.1", "quick": {"passed": 2645, "skipped": 9}, "failed": []}


def test_the_newest_version_comes_first_and_what_did_not_run_is_said() -> None:
    lines = try_torch.table([OLD, NEW], "en").splitlines()
    assert lines[2] == "| 2.14.1 | 3.11.7 | 2026-01-02 | 40 of 41 | 1 of 8 | 2,645 of 2,645 |  |"
    assert lines[3].startswith("| 2.9.1 | 3.11.7 | 2026-01-02 | 40 of 41 | 1 of 8 | not run | `tests/")
    assert len(try_torch.table([OLD, NEW], "zh").splitlines()) == 4


def test_pytests_last_line_is_read() -> None:
    output = "..F\nFAILED tests/a.py::b[1] - assert 1 in 2\n1 failed, 2645 passed, 8 skipped in 743.73s (0:12:23)\n"
    assert try_torch.counts(output) == {"failed": 1, "passed": 2645, "skipped": 8}
    assert try_torch.failures(output) == ["tests/a.py::b"]
    assert try_torch.counts("no tests ran") == {}


def test_again_runs_the_files_that_failed_and_counts_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, ...]] = []

    def run_tests(*words: str) -> tuple[dict[str, int], list[str]]:
        ran.append(words)
        return {"failed": 1, "passed": 30}, ["tests/test_docs.py::still"]

    monkeypatch.setattr(try_torch, "run_tests", run_tests)
    before = {**NEW, "quick": {"passed": 90, "failed": 10, "skipped": 5}, "failed": ["tests/test_docs.py::a"]}
    counts, failures = try_torch.run_quick(before)
    assert [word for word in ran[0] if word.endswith(".py")] == ["tests/test_docs.py"]
    assert counts == {"failed": 1, "passed": 99, "skipped": 5}
    assert failures == ["tests/test_docs.py::still"]
    counts, failures = try_torch.run_quick({**before, "failed": []})
    assert (len(ran), failures) == (1, [])


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_pages_have_the_table_of_the_file(language: str) -> None:
    rows = json.loads(try_torch.ROWS.read_text(encoding="utf-8"))
    assert read_part(try_torch.PAGES[language], try_torch.PART) == try_torch.table(rows, language)
