"""What ranks of a training on this host write: kept in files, and shown as they write it."""

import os
import pty
import termios
from pathlib import Path

import pytest

from samestep import environment
from samestep.launch import logs
from samestep.launch.logs import Follower
from samestep.progress.bars import Bar
from samestep.run_folder import errors_of, output_of

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]


def test_lines_are_shown_whole_and_as_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Follower(prefixes=False, bars=True) as follower:
        assert follower.follow(tmp_path, {0: "[here 0] ", 1: "[here 1] "}) == {}  # standard error is no terminal
        output_of(tmp_path, 0).write_text("one\ntw", encoding="utf-8")
        errors_of(tmp_path, 1).write_text("10%\r20%\rdone\n", encoding="utf-8")
    assert capfd.readouterr() == ("one\ntw\n", "done\n")


def test_lines_say_who_wrote_them_where_that_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with Follower() as follower:
        follower.follow(tmp_path, {0: "[here 0] ", 1: "[here 1] "})
        output_of(tmp_path, 1).write_text("one\ntwo\n", encoding="utf-8")
    assert capfd.readouterr().out == "[here 1] one\n[here 1] two\n"


def test_a_terminal_shows_the_bar_of_rank_0_which_is_in_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    monkeypatch.setattr(logs, "_terminal", lambda number: os.fdopen(terminal, "wb", closefd=False))
    with Follower(prefixes=False, bars=True) as follower:
        told = follower.follow(tmp_path, {0: "", 1: ""})
        assert environment.bar_file(told) == (tmp_path / "rank-0.bar", 100)
        with environment.given(told), Bar("train dp2", 3) as bar:
            bar.advance("loss 0.5")
        errors_of(tmp_path, 0).write_text("a warning\n", encoding="utf-8")
        errors_of(tmp_path, 1).write_text("10%\r20%", encoding="utf-8")
    shown = b""
    while not shown.endswith(b"20%"):  # the system hands on what a terminal gets a moment later
        shown += os.read(seen, 1 << 16)
    assert [
        text for text in (b"train dp2", b"1/3", b"loss 0.5", b"a warning", b"10%\r20%") if text not in shown
    ] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.err", "rank-1.err"]
    os.close(seen)
    os.close(terminal)


def test_a_bar_does_not_fill_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.bar"
    told = environment.bar_at(file, 80)
    with environment.given(told), Bar("train dp2", 100_000) as bar:
        for _ in range(1000):
            bar._progress.refresh()
    assert file.stat().st_size < 100_000
