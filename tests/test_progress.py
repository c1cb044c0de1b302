"""Lines of progress where standard error is no terminal: their order, their interval, and what they never do."""

import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samestep.cli.main import main
from samestep.environment import given, progress_every
from samestep.errors import UserError
from samestep.progress import phases
from samestep.progress.bars import Bar

pytestmark = [pytest.mark.quick, pytest.mark.timeout(30)]


@pytest.fixture(autouse=True)
def lines_are_written() -> Iterator[None]:
    with progress_every("30s"):
        yield


Printed = Callable[[], list[str]]


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """The lines on standard error since the last call; each is whole, and drawn without a terminal's codes."""

    def lines() -> list[str]:
        text = capsys.readouterr().err
        assert text == "" or text.endswith("\n")
        assert not re.search(r"[\r\x1b]", text)
        return text.splitlines()

    return lines


def test_a_phase_has_a_line_at_its_beginning_with_the_title_of_the_work(printed: Printed) -> None:
    with phases.running("train"):
        assert printed() == []
        with phases.phase("reading the data"):
            assert printed() == ["train: reading the data"]
        with phases.running("train dp2"), phases.phase("first\nstep"):
            assert printed() == ["train dp2: first step"]
        with phases.command("verify"), phases.phase("again"):
            assert printed() == ["train: again"]
    with phases.phase("nothing runs"):
        assert printed() == []


def test_phases_that_come_often_have_a_line_an_interval(printed: Printed) -> None:
    with progress_every("0.2s"), phases.running("train"):
        for number in range(5):
            with phases.phase(f"evaluating after step {number}", once="evaluation"):
                pass
        assert printed() == ["train: evaluating after step 0"]
        time.sleep(0.17)
        with phases.phase("evaluating after step 6", once="evaluation"):
            pass
        assert "train: evaluating after step 6" in printed()


def test_a_long_phase_is_named_again_every_interval(printed: Printed) -> None:
    with progress_every("0.2s"), phases.running("train"), phases.phase("waiting for hosts"):
        time.sleep(0.9)
    first, *others = printed()
    assert first == "train: waiting for hosts"
    assert 2 <= len(others) <= 4
    assert all(re.fullmatch(r"train: still waiting for hosts \([01] s\)", line) for line in others)


def test_the_thread_ends_with_the_work() -> None:
    with phases.running("train"):
        assert "progress" in {thread.name for thread in threading.enumerate()}
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_work_without_a_phase_has_lines_too(printed: Printed) -> None:
    with progress_every("0.1s"), phases.running("hosts"):
        time.sleep(0.25)
        assert printed()[0] == "hosts: still starting (0 s)"


def test_steps_have_a_line_first_and_last_and_rarely_between(printed: Printed) -> None:
    with phases.running("train dp2"), Bar("train dp2", 1000, unit="step") as bar:
        for step in range(1000):
            bar.step(loss=2.5 - step / 1000, lr=0.1, samples=8, terms={"ce": 1.0} if step == 0 else {})
    first, *_, last = lines = printed()
    assert re.fullmatch(
        r"train dp2: step 1/1,000, loss 2\.5000 \(ce 1\.0000\), [\d,.]+ samples/s, 0:00 elapsed", first
    )
    assert re.fullmatch(r"train dp2: step 1,000/1,000, loss 1\.5010, [\d,]+ samples/s, 0:0\d elapsed", last)
    assert len(lines) <= 4


def test_steps_come_soon_then_every_interval_with_what_is_left(printed: Printed) -> None:
    with progress_every("0.1s"), Bar("train", 40, unit="step") as bar:
        for _ in range(20):
            time.sleep(0.02)
            bar.step(loss=1.0, lr=0.1, samples=1)
    first, *later = (line for line in printed() if "still in step" not in line)  # on a machine that is full
    assert first.startswith("train: step 1/40, ")
    assert 2 <= len(later) <= 8
    assert all(re.search(r"elapsed, 0:0\d left$", line) for line in later), later


def test_a_loss_that_is_not_finite_is_shown_when_it_comes(printed: Printed) -> None:
    with Bar("train", 1000, unit="step") as bar:
        for loss in (1.0, 2.0, float("nan"), float("nan"), float("inf"), 3.0):
            bar.step(loss=loss, lr=0.1, samples=1)
    lines = printed()
    assert [re.sub(r"^train: (.*?), [\d,.]+ samples.*", r"\1", line) for line in lines] == [
        "step 1/1,000, loss 1.0000",
        "step 3/1,000, loss nan",
    ]


def test_a_training_that_goes_on_counts_from_its_step(printed: Printed) -> None:
    with Bar("train", 100, first=60, unit="step") as bar:
        bar.step(loss=1.0, lr=0.1, samples=1)
    assert printed()[0].startswith("train: step 61/100, loss 1.0000, ")


def test_a_step_that_takes_long_is_named(printed: Printed) -> None:
    with progress_every("0.2s"), Bar("train", 9, unit="step") as bar:
        bar.step(loss=1.0, lr=0.1, samples=1)
        time.sleep(0.3)
        with bar.part("evaluate", 30) as advance:
            advance()
            time.sleep(0.3)
    lines = printed()
    assert "train: still in step 2/9 (0 s)" in lines
    assert "train: still at evaluate 1/30 (0 s)" in lines


@pytest.mark.parametrize("text", ["none", "0.1", "30s", "1.5m", "24h"])
def test_the_interval_is_a_time_or_none(text: str) -> None:
    assert (phases.interval(text) is None) == (text == "none")


@pytest.mark.parametrize("text", ["", "0", "0.01s", "25h", "inf", "1d", "-1", "off", "1e400", "nan"])
def test_another_interval_is_refused_with_its_limits(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", "dp2", "--batch", "8", f"--progress={text}"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f'samestep: argument --progress: "{text}": use none, or a time from 0.1s to 24h')
    assert told.count("\n") == 1


def test_a_wrong_interval_in_the_environment_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_every("soon"):
        assert main(["layout", "dp2", "--batch", "8"]) == 2
        with pytest.raises(UserError, match="SAMESTEP_PROGRESS"), phases.running("train"):
            pass
    told = capsys.readouterr().err
    assert told == 'samestep: SAMESTEP_PROGRESS is "soon"; use none, or a time from 0.1s to 24h\n'


def test_the_option_counts_for_a_command_inside_another(printed: Printed) -> None:
    with given({}):
        assert main(["checkpoint", "--progress", "none", "list", "nowhere"]) == 2
        assert main(["checkpoint", "list", "nowhere", "--progress", "none"]) == 2
        assert main(["comm", "support", "--progress=1d"]) == 2
    assert [line.partition(";")[0] for line in printed()[2:]] == [
        'samestep: argument --progress: "1d": use none, or a time from 0.1s to 24h'
    ]


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
        | {
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        {"SAMESTEP_PROGRESS": "none"},
        {"SAMESTEP_BAR_FILE": "bar", "SAMESTEP_BAR_COLUMNS": "80"},
    ],
)
def test_another_rank_and_one_with_a_bar_say_nothing(variables: dict[str, str], printed: Printed) -> None:
    with given(variables), phases.running("train"), phases.phase("reading the data"):
        assert phases.writer() is None
    assert printed() == []


def test_rank_0_says_it(printed: Printed) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    with given(variables), phases.running("train"), phases.phase("reading the data"):
        assert printed() == ["train: reading the data"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("term", "says"), [("xterm", False), ("dumb", True)])
def test_a_terminal_that_draws_nothing_has_lines(term: str, says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with given({"TERM": term}), phases.running("train"), phases.phase("reading the data"):
        pass
    assert stream.getvalue() == ("train: reading the data\n" if says else "")


def test_another_thread_says_nothing(printed: Printed) -> None:
    with phases.running("train"):
        thread = threading.Thread(target=lambda: phases.say("from elsewhere"))
        thread.start()
        thread.join()
    assert printed() == []


def test_what_is_muted_still_runs(printed: Printed, tmp_path: Path) -> None:
    with (
        (tmp_path / "err").open("wb") as file,
        progress_every("0.1s"),
        phases.running("compare"),
        phases.phase("dp2, repeat 1"),
        phases.muted(file.fileno()),
        phases.running("train"),
        phases.phase("reading the data"),
        Bar("train", 1, unit="step") as bar,
    ):
        bar.step(loss=1.0, lr=0.1, samples=1)
        time.sleep(0.25)
    assert printed() == ["compare: dp2, repeat 1"]
    assert "compare: still dp2, repeat 1 (0 s)\n" in (tmp_path / "err").read_text(encoding="utf-8")


def test_a_starting_process_leaves_the_word_to_its_ranks(printed: Printed) -> None:
    with progress_every("0.3s"), phases.running("train"), phases.status(lambda: "running 2 ranks", others=True):
        for number in range(10):  # a rank's lines, a little late
            time.sleep(0.1)
            if number % 4 == 0:
                phases.heard()
        assert printed() == []
        time.sleep(0.8)
        assert re.fullmatch(r"train: still running 2 ranks \([12] s\)", printed()[0])


def stderr_at(monkeypatch: pytest.MonkeyPatch, descriptor: int) -> None:
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.FileIO(descriptor, "wb", closefd=False)))


def test_a_full_disk_a_closed_file_and_a_gone_or_slow_reader_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    reader, gone = os.pipe()
    os.close(reader)
    kept, slow = os.pipe()
    os.set_blocking(slow, False)
    while True:  # nobody reads
        try:
            os.write(slow, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(slow, True)
    for descriptor in (full, gone, slow):
        stderr_at(monkeypatch, descriptor)
        with phases.running("train"), phases.phase("reading the data"):
            pass
        sys.stderr.flush()  # nothing is left there that fails later
        os.close(descriptor)
    os.close(kept)
    closed = io.StringIO()
    closed.close()
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stderr", stream)
        with phases.running("train"), phases.phase("reading the data"), Bar("train", 2) as bar:
            bar.advance("one")


def test_a_forked_process_says_nothing_of_its_parents_work(printed: Printed) -> None:
    with phases.running("train"):
        child = os.fork()
        if child == 0:
            os._exit(0 if phases.writer() is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        phases.say("the parent")
        assert printed() == ["train: the parent"]


def test_a_step_costs_microseconds() -> None:
    """Of tiny steps of a millisecond less than a hundredth."""
    with phases.running("train"), Bar("train", 10**6, unit="step") as bar:
        began = time.perf_counter()
        for _ in range(10_000):
            bar.step(loss=1.0, lr=0.1, samples=1)
        seconds = (time.perf_counter() - began) / 10_000
    assert seconds < 1e-4, seconds  # 3 microseconds on a busy machine
