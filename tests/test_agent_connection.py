"""The connection to a remote agent: what comes from it, and that nothing of it stays open."""

import json
import sys
import time
from queue import SimpleQueue

from samestep.launch.controller import AgentConnection, AgentEnded, AgentMessage, Event, Line
from samestep.launch.node_spec import NodeSpec
from samestep.launch.remote_agent import MARK
from samestep.launch.starter import AgentCommand

FAR = """
import sys
words = sys.stdin.readline().strip()
sys.stdout.buffer.write({mark!r} + b'{{"host": "b"}}\\n')
print("asked for", words, flush=True)
print("a warning", file=sys.stderr, flush=True)
assert sys.stdin.readline() == "kill\\n"
"""


def open_connection(*command: str) -> tuple[AgentConnection, "SimpleQueue[Event]"]:
    events: SimpleQueue[Event] = SimpleQueue()
    spec = NodeSpec(job="one", host="b", num_procs=1, command=("x",))
    return AgentConnection(
        AgentCommand(command=command, specs=(spec,)), json.dumps("this").encode() + b"\n", events
    ), events


def test_a_link_tells_all_and_leaves_no_pipe_open() -> None:
    connection, events = open_connection(sys.executable, "-c", FAR.format(mark=MARK))
    came = [events.get(timeout=30) for _ in range(3)]
    connection.order("kill")
    assert isinstance(events.get(timeout=30), AgentEnded)
    assert [event.values for event in came if isinstance(event, AgentMessage)] == [{"host": "b"}]
    assert {event.text for event in came if isinstance(event, Line)} == {b'asked for "this"', b"a warning"}
    process = connection._process
    assert process is not None
    streams = [stream for stream in (process.stdin, process.stdout, process.stderr) if stream is not None]
    until = time.monotonic() + 5
    while not all(stream.closed for stream in streams):
        assert time.monotonic() < until, streams
        time.sleep(0.01)
    connection.order("kill")  # it has ended, and is told nothing more


def test_a_process_that_reads_nothing_leaves_no_pipe_open_either() -> None:
    connection, events = open_connection("true")
    assert isinstance(events.get(timeout=30), AgentEnded)
    assert connection.why(["b"]) == "b can't be reached: no message (true ended with exit code 0)"
    process = connection._process
    assert process is not None
    assert process.stdin is not None
    until = time.monotonic() + 5
    while not process.stdin.closed:
        assert time.monotonic() < until
        time.sleep(0.01)
