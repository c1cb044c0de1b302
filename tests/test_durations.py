"""Times that users write: the same ones in job files, in options of a launch, in drills and in each --time-limit."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import samestep
from samestep import jobfile
from samestep.cli import comm, compare, doctor, drill, launch_options, tune, verify_script
from samestep.cli.main import main
from samestep.drill.soak import SoakSettings

pytestmark = pytest.mark.quick

WANTED = "seconds above 0, or a time such as 90s, 10m or 1h, from 1 ms to 366 days"

TIMES = {
    "90": 90.0,
    "0.5": 0.5,
    ".5": 0.5,
    "90s": 90.0,
    "90 s": 90.0,
    "1.5m": 90.0,
    "2h": 7200.0,
    "1e1s": 10.0,
    "1e+06": 1e6,
}
WRONG = [
    "soon",
    "0",
    "1e-9",
    "32000000",
    "9000h",
    "0s",
    "-1",
    "-1s",
    "inf",
    "infs",
    "nan",
    "1e999",
    "1e999h",
    "1d",
    "m",
    "",
    "1 0",
    "1_0s",
    "٣s",
]


def time_options() -> dict[str, tuple[Callable[[argparse.ArgumentParser], None], list[str], str]]:
    """What adds the options of a command, the words around the time, and the name of its value."""
    limit = ["--time-limit"]
    return {
        "comm": (comm.add_arguments, ["support", *limit], "time_limit"),
        "comm, seconds": (comm.add_arguments, ["--seconds"], "seconds"),
        "compare": (compare.add_arguments, ["job.yaml", *limit], "time_limit"),
        "doctor": (doctor.add_arguments, limit, "time_limit"),
        "drill": (drill.add_arguments, ["job.yaml", *limit], "time_limit"),
        "drill, between": (drill.add_arguments, ["job.yaml", "--between"], "between"),
        "launch": (launch_options.add_arguments, ["--start-timeout"], "start_timeout"),
        "tune": (tune.add_arguments, ["job.yaml", *limit], "time_limit"),
        "verify": (verify_script.add_arguments, limit, "time_limit"),
    }


@pytest.mark.parametrize("command", time_options())
def test_every_option_reads_the_same_times(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    add, words, name = time_options()[command]
    parser = argparse.ArgumentParser()
    add(parser)
    for text, seconds in TIMES.items():
        assert getattr(parser.parse_args([*words, text]), name) == seconds, text
    for text in WRONG:
        with pytest.raises(SystemExit):
            parser.parse_args([*words[:-1], f"{words[-1]}={text}"])
        assert f'argument {words[-1]}: "{text}" is no time; use {WANTED}\n' in capsys.readouterr().err


def test_a_wrong_time_limit_is_one_message_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["doctor"], ["comm", "support"], ["drill", "job.yaml"], ["tune", "job.yaml"]):
        assert main([*words, "--time-limit", "1d"]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f'samestep: argument --time-limit: "1d" is no time; use {WANTED}; ')


@pytest.mark.parametrize(("command", "default"), [("compare", 3600), ("tune", 600), ("drill", 600), ("doctor", None)])
def test_the_defaults_of_time_limits(command: str, default: float | None) -> None:
    add, words, name = time_options()[command]
    parser = argparse.ArgumentParser()
    add(parser)
    assert getattr(parser.parse_args(words[:-1]), name) == default


def load(folder: Path, key: str, value: str) -> Any:
    file = folder / "job.yaml"
    file.write_text(f"recipe: {{task: regression, batch: 8}}\nrun:\n  {key}: {value}\n", encoding="utf-8")
    return jobfile.load(file).job.run


@pytest.mark.parametrize("key", ["hang_limit", "grace_period"])
def test_a_job_file_reads_the_same_times(key: str, tmp_path: Path) -> None:
    for text, seconds in TIMES.items():
        for value in (text, f'"{text}"'):
            assert getattr(load(tmp_path, key, value), key) == seconds, value
    wanted = WANTED.replace("1 ms", "100 ms")  # ranks publish where they are several times a second
    for value in (*(f'"{text}"' for text in WRONG), "0", "0.09", "50e-3s", "-1.5", ".inf", ".nan", f"1{'0' * 400}"):
        with pytest.raises(samestep.UserError, match=rf"job.yaml:3: run.{key} is .*; it should be {wanted}$"):
            load(tmp_path, key, value)


def test_the_interval_of_checkpoints_is_steps_or_a_time_with_its_unit(tmp_path: Path) -> None:
    for given, expected in (("10", 10), ('"10"', 10), ("10m", "10m"), ("1e1s", "1e1s")):
        assert load(tmp_path, "checkpoint", f"{{every: {given}}}").checkpoint.every == expected
    for wrong in ("soon", "0s", "infs", '"1.5"', "0", "-1", "yes"):
        with pytest.raises(samestep.UserError, match=r"run.checkpoint.every is .* a time such as 90s, 10m or 1h$"):
            load(tmp_path, "checkpoint", f"{{every: {wrong}}}")


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan])
def test_seconds_that_python_gives_are_above_0(wrong: float) -> None:
    for name in ("between", "time_limit"):
        more: dict[str, Any] = {name: wrong}
        with pytest.raises(samestep.UserError, match=rf"{name} is {wrong:g}; use a number of seconds above 0"):
            SoakSettings(faults=1, kinds=("kill",), **more)
    assert SoakSettings(faults=1, kinds=("kill",), time_limit=math.inf).time_limit == math.inf
