"""Strangers that reach a job's store, from another user: nothing that they write there is run or believed."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import stranger
from elastic_agents import Agents, elastic_job
from launching import TOLD, free_port, started
from small_jobs import TESTS, losses_alone, losses_in, steps_in, wait_until
from stranger import GARBAGE, NOBODY, RAN, put
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from samestep.errors import HostLostError, StartError, UserError
from samestep.launch.failure import Failure
from samestep.launch.handshake import Handshake
from samestep.launch.job_secret import VARIABLE, JobSecret
from samestep.launch.network import LOOPBACK, reach, store_client
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import LaunchTimeouts
from samestep.launch.rendezvous import BACKEND, MultiNodeRendezvous, RoundPost

pytestmark = pytest.mark.timeout(240)

TRAIN = ["-m", "samestep", "train", "job.yaml"]
SECRET = "of-the-users-0123456789"
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
# What an agent says of such a value, and no traceback of Python's.
SAID = re.compile(r'a value of key "[^"]+" in the job\'s store at \S+ was not written by a host of this job: ')
LIMITS = LaunchTimeouts(start_timeout=1.0, heartbeat_timeout=2.0, join_timeout=0.5, later_join_timeout=0.3)


class TwoHosts:
    """The agents' parts of two hosts, in this process: they have agreed, and met for a round."""

    def __init__(self, secret: JobSecret | None) -> None:
        self.secret, self.port = secret, free_port()
        self.handshakes = [Handshake(self.spec(node), secret) for node in (0, 1)]
        self._in_both(lambda node: self.handshakes[node].agree())
        self.hosts = [MultiNodeRendezvous(self.parameters(node), secret) for node in (0, 1)]
        self._in_both(lambda node: self.hosts[node].next_rendezvous())
        for host in self.hosts:
            assert host.round is not None
            host.heartbeat.enter(host.round.number, host.peers(), dict)
        self.handshakes[0].tell_failure(
            Failure(host="host-0", rank=0, exit_code=1, reason="it raised", log="rank-0.err", at=1.0)
        )
        self.handshakes[0].tell_success()

    def spec(self, node: int) -> NodeSpec:
        return NodeSpec(
            job="one",
            host=f"host-{node}",
            node_rank=node,
            fewest=2,
            most=2,
            num_procs=1,
            command=("x",),
            address=LOOPBACK,
            port=self.port,
            serves=node == 0,
            timeouts=LIMITS,
        )

    def parameters(self, node: int) -> RendezvousParameters:
        meeting: dict[str, Any] = {"node_rank": node, "name": f"host-{node}", "timeouts": LIMITS}
        at = f"{LOOPBACK}:{self.port}"
        return RendezvousParameters(BACKEND, at, "one", 1, 2, local_addr=LOOPBACK, **meeting)

    def _in_both(self, work: Any) -> None:
        threads = [threading.Thread(target=work, args=(node,), daemon=True) for node in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

    def believe(self) -> list[str]:
        """Read all that the second host's agent reads of the store; return the errors that it ends with."""
        said: list[str] = []
        host, handshake = self.hosts[1], self.handshakes[1]
        readings = (
            lambda: Handshake(self.spec(1), self.secret).agree(),
            handshake.ended,
            handshake.failures,
            lambda: handshake.succeeded(0.0),
            host.heartbeat.lost,
            lambda: host._membership.number_waiting(),
            lambda: host.posted("round/0", RoundPost),
            lambda: host._membership.closed,
        )
        for read in readings:
            try:
                read()
            except (UserError, StartError, HostLostError) as error:
                said.append(str(error))
        return said

    def close(self) -> None:
        for host in self.hosts:
            host.shutdown()
        self.handshakes[0].leave(0.1)


@pytest.fixture(params=["a secret", pytest.param("no secret", marks=pytest.mark.slow)])
def two_hosts(request: pytest.FixtureRequest) -> Iterator[TwoHosts]:
    both = TwoHosts(JobSecret.made() if request.param == "a secret" else None)
    yield both
    both.close()


def keys_of(store: TCPStore) -> list[str]:
    return [key for key in store.list_keys() if not key.startswith("init/")]


def test_no_value_of_a_strangers_is_believed_or_a_traceback(
    two_hosts: TwoHosts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every key, with every kind of garbage, and with what another key has."""
    store = store_client(LOOPBACK, two_hosts.port, answer_within=10.0)
    keys = keys_of(store)
    assert {key.rpartition("samestep/")[2] for key in keys} >= {
        *("identity", "first", "complete", "succeeded", "ended", "failed/0", "node/0", "node/1"),
        *("one/meeting", "one/alive/0", "one/alive/1", "one/round/0"),
    }
    first: Mapping[str, bytes] = dict(zip(keys, map(store.get, keys), strict=True))
    kinds: dict[str, bytes | None] = {**GARBAGE}
    del kinds["large"]  # seconds in all; tests/test_signed_store.py has it
    if two_hosts.secret is not None:
        kinds["another key's"] = None
        for name in ("wrong types", "a number", "deep"):  # as the truncated one, they have no signature to look at
            del kinds[name]
    for name, value in kinds.items():
        for number, key in enumerate(keys):
            content = value if value is not None else first[keys[number - 1]]
            before = store.get(key)
            put(store, key, content)
            began = time.monotonic()
            said = two_hosts.believe()
            assert time.monotonic() - began < 5, (name, key)
            assert all(SAID.search(line) for line in said), (name, key, said)
            # To claim a key counts an empty value as none, and writes over it.
            if key.endswith("meeting") or (key.endswith(("identity", "first", "node/1")) and content):
                assert said, (name, key)
            if "alive" not in key:  # which its host has written since
                put(store, key, before)
    assert two_hosts.believe() == []
    assert SAID.search(capsys.readouterr().err)
    assert [host.lost() for host in two_hosts.hosts] == [None, None]


def attacked(port: int, folder: Path, kind: str, seconds: float) -> subprocess.Popen[str]:
    folder.chmod(0o777)
    words = [sys.executable, str(TESTS / "stranger.py"), str(port), str(folder), kind, str(seconds)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@NEEDS_ROOT
def test_no_agent_runs_what_another_user_wrote(tmp_path: Path) -> None:
    both = TwoHosts(None)  # also without a secret
    host = both.hosts[0]
    told, _ = attacked(both.port, tmp_path, "pickles", 0.2).communicate(timeout=180)
    seen = json.loads(told)
    assert seen["user"] == NOBODY
    assert {"torch.rendezvous.one", "samestep/one/meeting"} <= set(seen["keys"])
    assert SAID.search(" ".join(both.believe()))
    with pytest.raises(HostLostError, match=SAID):
        host.next_rendezvous()
    host.num_nodes_waiting()
    host.shutdown()
    both.close()
    assert not (tmp_path / RAN).exists()


def test_the_pickles_of_these_tests_do_run_where_they_are_read(tmp_path: Path) -> None:
    import pickle

    pickle.loads(stranger.pickles(str(tmp_path))[0])
    assert (tmp_path / RAN).read_text(encoding="utf-8").strip() == str(os.getuid())


@NEEDS_ROOT
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pickles", *GARBAGE])
@pytest.mark.parametrize("at", ["the start", "the third step"])
def test_a_job_whose_store_is_written_full_goes_on_or_says_so(tmp_path: Path, kind: str, at: str) -> None:
    elastic_job(tmp_path, steps=20, seconds=0.1)
    file = tmp_path / "secret"
    file.write_text(SECRET, encoding="utf-8")
    file.chmod(0o600)
    options = ["--max-restarts", "1", "--secret-file", str(file), "--start-timeout", "30s"]
    with Agents(tmp_path, TRAIN, "1:2", options) as agents:
        both = agents.start(0), agents.start(1)
        if at == "the third step":
            agents.wait_for(lambda: steps_in(tmp_path / "run") > 3)
        else:
            agents.wait_for(lambda: listens(agents.port))
        with attacked(agents.port, tmp_path, kind, 30.0) as attacker:
            codes = [agent.wait(90) for agent in both]
            attacker.communicate(timeout=120)
    assert not (tmp_path / RAN).exists()
    for code, agent in zip(codes, both, strict=True):
        assert code in (0, 1, 2), agent.text
        # A rank whose store PyTorch can't read any more ends as any failing rank does, with its traceback.
        own = [line for line in agent.text.splitlines() if not line.startswith("[vm ")]
        assert "Traceback" not in "\n".join(own)
        assert code == 0 or SAID.search(agent.text) or "lost the job's store" in agent.text, agent.text
    if steps_in(tmp_path / "run") == 20:
        assert losses_in(tmp_path / "run") == pytest.approx(losses_alone(steps=20), rel=1e-9)


def listens(port: int) -> bool:
    return reach(LOOPBACK, port, within=1.0) == "answers"


@pytest.mark.slow
@pytest.mark.usefixtures("folder_of_its_own")
def test_no_rank_has_the_secret_in_its_command_or_variables() -> None:
    port = free_port()
    with_all = ["--no-ssh", "--num-nodes", "2", "--num-procs", "1", "--master-addr", LOOPBACK]
    words = [*with_all, "--master-port", str(port), "--node-rank"]
    with (
        started(*words, "0", "--", TOLD, "wait", "here", **{VARIABLE: SECRET}) as one,
        started(*words, "1", "--", TOLD, "wait", "here", **{VARIABLE: SECRET}) as other,
    ):
        wait_until(lambda: all(Path(f"here-{rank}").exists() for rank in (0, 1)), 60.0)
        below = [each for agent in (one, other) for each in psutil.Process(agent.pid).children(recursive=True)]
        assert len(below) >= 2
        for process in below:
            assert SECRET not in " ".join(process.cmdline())
            assert process.environ().get("RANK") is None or VARIABLE not in process.environ()
            assert SECRET not in " ".join(process.environ().values())
        for agent in (one, other):
            agent.terminate()
        texts = [text for agent in (one, other) for text in agent.communicate(timeout=60)]
    logs = [file.read_text(encoding="utf-8") for file in Path("runs").rglob("*") if file.is_file()]
    assert logs
    assert not any(SECRET in text for text in (*texts, *logs))
