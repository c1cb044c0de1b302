"""The look for processes that a test leaves behind: which it finds, and which live as long as the tests."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

import psutil
import pytest
from launching import TOLD, assert_nothing_is_left, processes_alive
from small_jobs import wait_until

from samestep.launch.script_env import sidecar
from samestep.launch.starter import agent_command

pytestmark = [pytest.mark.quick, pytest.mark.processes]

ASLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


@contextmanager
def planted(command: Sequence[str], environ: Mapping[str, str] = os.environ) -> Iterator[subprocess.Popen[bytes]]:
    """A process that waits for its standard input, or sleeps; it ends with the block."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**environ}) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "command",
    [
        agent_command([sys.executable]),
        [sys.executable, "-m", sidecar.__name__, "127.0.0.1"],
        [sys.executable, "-m", "samestep", "launch", "--num-procs", "1", "--", TOLD, "wait"],
        ASLEEP,
    ],
    ids=["remote agent", "sidecar", "launch", "another program"],
)
def test_what_a_test_started_is_found(command: Sequence[str]) -> None:
    with planted(command) as process:
        # A program has no environment yet in the moment in which it begins.
        wait_until(lambda: process.pid in [each.pid for each in processes_alive()])
    assert process.pid not in [each.pid for each in processes_alive()]


def test_a_process_whose_parent_has_ended_is_found_killed_and_named() -> None:
    with planted([sys.executable, "-c", f"import subprocess; print(subprocess.Popen({ASLEEP}).pid)"]) as parent:
        assert parent.stdout is not None
        orphan = psutil.Process(int(parent.stdout.readline()))
        parent.wait()
        with pytest.raises(AssertionError, match=rf"{orphan.pid}: .* import time; time\.sleep\(60\)"):
            assert_nothing_is_left(limit=0)
        assert_nothing_is_left()  # it was killed


def test_processes_of_others_and_those_that_live_as_long_as_the_tests_are_not_found() -> None:
    forkserver.ensure_running()
    resource_tracker.ensure_running()
    unmarked = {name: value for name, value in os.environ.items() if name != "SAMESTEP_TEST"}
    with planted(ASLEEP, unmarked) as other:
        children = {each.pid for each in psutil.Process().children()}
        assert len(children) >= 3
        assert other.pid in children
        assert not children & {each.pid for each in processes_alive()}
