"""Hosts whose clocks differ are told so as they meet, and nothing else changes for them."""

import re
import threading
import time
from collections.abc import Callable

import pytest

from samestep.launch import clock_skew
from samestep.launch.clock_skew import Difference
from samestep.launch.handshake import Handshake
from samestep.launch.network import store_at
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import LaunchTimeouts

pytestmark = pytest.mark.quick


def host(number: int, port: int, **values: object) -> NodeSpec:
    known = {"job": "one", "fewest": 2, "most": 2, "num_procs": 1, "command": ("x",)}
    where = {"address": "127.0.0.1", "port": port, "node_rank": number, "limits": LaunchTimeouts(start_timeout=20.0)}
    return NodeSpec(**{"host": f"host-{'ab'[number]}", **known, **where, **values})  # pyright: ignore


def ahead(seconds: float) -> Callable[[], float]:
    return lambda: time.time() + seconds


def meet(seconds: float) -> None:
    """Two hosts meet, of which the second's clock is so much ahead."""
    store = store_at("127.0.0.1")
    first = Handshake(host(0, store.port))
    thread = threading.Thread(target=first.agree)
    thread.start()
    while not first._there("samestep/node/0"):
        pass
    Handshake(host(1, store.port), clock=ahead(seconds)).agree()
    thread.join()


@pytest.mark.parametrize(("seconds", "where"), [(5.0, "ahead of"), (-5.0, "behind")])
def test_clocks_that_differ_are_told_once_with_what_would_do(
    seconds: float, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    meet(seconds)
    err = capfd.readouterr().err
    found = re.fullmatch(
        rf"samestep: the clock of host-b is (\d\.\d) s {where} that of host-a \(give or take (\d\.\d) s\): another "
        r"rank than the first may be named .*; use NTP \(chrony, systemd-timesyncd\) on both\n",
        err,
    )
    assert found is not None, err
    assert abs(float(found[1]) - 5) <= float(found[2]) + 0.1


def test_clocks_that_agree_are_not_told(capfd: pytest.CaptureFixture[str]) -> None:
    meet(0.5)
    assert capfd.readouterr().err == ""


def test_a_host_that_joins_later_is_told_too(capfd: pytest.CaptureFixture[str]) -> None:
    store = store_at("127.0.0.1")
    first = Handshake(host(0, store.port, fewest=1))
    first.agree()
    over = threading.Event()

    def while_its_ranks_run() -> None:
        while not over.wait(0.05):
            first.tell_time()

    thread = threading.Thread(target=while_its_ranks_run)
    thread.start()
    Handshake(host(1, store.port, fewest=1), clock=ahead(-60)).agree()
    over.set()
    thread.join()
    err = capfd.readouterr().err
    found = re.search(r"host-b is (\d+\.\d) s behind that of host-a \(give or take (\d+\.\d) s\)", err)
    assert found is not None
    assert abs(float(found[1]) - 60) <= float(found[2]) + 0.1


def test_where_nobody_answers_the_job_begins_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clock_skew, "_PATIENCE", 0.2)
    store = store_at("127.0.0.1")
    Handshake(host(0, store.port, fewest=1)).agree()
    Handshake(host(1, store.port, fewest=1), clock=ahead(60)).agree()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("least", "most", "told"),
    [(1.1, 1.3, True), (-1.3, -1.1, True), (0.9, 1.3, False), (-1.3, -0.9, False), (-30.0, 30.0, False)],
)
def test_what_a_slow_answer_leaves_open_is_not_told(least: float, most: float, told: bool) -> None:
    assert Difference(host="host-a", least=least, most=most).too_large is told
