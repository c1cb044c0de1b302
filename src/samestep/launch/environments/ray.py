"""Ray: a cluster's live nodes, and a start by an actor on each of the job's nodes, which holds its remote agent.

`python -m samestep.launch.environments.ray ADDRESS HOST` is the process behind which one such agent stands.
"""

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from io import FileIO
from typing import Any

from samestep import environment
from samestep.errors import UserError
from samestep.extras import is_installed
from samestep.launch.environments.base import Cluster, FoundCluster, Host, PlaceInputs, Read, which
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import LaunchOptions
from samestep.launch.starter import AgentCommand, Starter, agent_command

_PATIENCE = 5.0  # seconds for a connection


class Ray:
    """The nodes of the cluster whose address the user, or RAY_ADDRESS, names."""

    name = "ray"
    sign = "--ray ADDRESS or RAY_ADDRESS"
    everywhere = False
    allocates = False

    def named(self, inputs: PlaceInputs) -> bool:
        return inputs.ray is not None

    def there(self, inputs: PlaceInputs) -> bool:
        return bool(inputs.environ.get("RAY_ADDRESS"))

    def find(self, inputs: PlaceInputs) -> FoundCluster:
        """The live nodes of a Ray cluster, with their GPUs as slots, or their CPUs where none has a GPU."""
        source, address = (
            ("--ray", inputs.ray) if inputs.ray else ("RAY_ADDRESS", inputs.environ.get("RAY_ADDRESS", ""))
        )
        assert address is not None
        if not is_installed("ray"):
            raise UserError(f"{source} is {address}, and Ray is not installed; use pip install ray")
        _check_answers(source, address)
        nodes = [node for node in _nodes(source, address) if node.get("Alive")]
        accelerated = inputs.device != "cpu" and any(node["Resources"].get("GPU", 0) >= 1 for node in nodes)
        kind = "GPU" if accelerated else "CPU"
        hosts = [
            Host(name=node["NodeManagerAddress"], slots=int(node["Resources"].get(kind, 0)))
            for node in sorted(nodes, key=_order)
        ]
        hosts = [host for host in hosts if host.slots]
        if not hosts:
            raise UserError(f"{source} is {address}, a Ray cluster without a live node that has a CPU")
        return FoundCluster(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(hosts),
                this=which([host.name for host in hosts], inputs.host.name),
            ),
            read=(Read(source=source, value=address), *(_read(node) for node in nodes)),
            slots_from="accelerators" if accelerated else "cores",
        )


def _check_answers(source: str, address: str) -> None:
    """Raise UserError if no process listens there; Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        return  # auto, or another form that Ray accepts
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"{source} is {address}, where nothing answers: {error}; ray start --head says its address"
        ) from None


def _nodes(source: str, address: str) -> list[dict[str, Any]]:
    """List the cluster's nodes; connects to Ray and disconnects, unless already connected."""
    import ray  # pyright: ignore[reportMissingImports]

    ours = not ray.is_initialized()
    try:
        if ours:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        return ray.nodes()
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"{source} is {address}, where no Ray cluster answers: {error}; ray start --head makes one"
        ) from None
    finally:
        if ours:
            ray.shutdown()


def _order(node: dict[str, Any]) -> tuple[bool, str]:
    """Sort the head node first, then by address, so that hosts are numbered the same each time."""
    return "node:__internal_head__" not in node["Resources"], node["NodeManagerAddress"]


def _read(node: dict[str, Any]) -> Read:
    """Return the resources of a node that are used, for display."""
    resources = node["Resources"]
    return Read(
        source=f"node {node['NodeManagerAddress']}",
        value=", ".join(f"{kind} {resources[kind]:g}" for kind in ("CPU", "GPU") if kind in resources),
    )


_MODULE = "samestep.launch.environments.ray"
# seconds that one request for output waits


def _agent_commands(specs: Sequence[NodeSpec], options: LaunchOptions) -> list[AgentCommand]:
    """Build the command for each node's agent: an actor, except for this host's agent."""
    return [
        AgentCommand(
            command=tuple(agent_command([sys.executable]))
            if spec.node_rank == options.this
            else (sys.executable, "-m", _MODULE, options.ray or "auto", spec.host),
            specs=(spec,),
        )
        for spec in specs
    ]


class AgentOnNode:
    """Actor on a node: runs the remote agent, and passes its input and output on."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            agent_command([sys.executable]), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._printed: queue.Queue[tuple[int, bytes] | None] = queue.Queue()
        for number, stream in ((1, self._process.stdout), (2, self._process.stderr)):
            threading.Thread(target=self._read, args=(number, stream), daemon=True).start()

    def _read(self, number: int, stream: Any) -> None:
        """Thread of the actor: reads one stream's lines; None marks its end."""
        for line in stream:
            self._printed.put((number, line))
        self._printed.put(None)

    def write(self, data: bytes) -> None:
        """Write to the agent's input; no data closes it."""
        assert self._process.stdin is not None
        if data:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        else:
            self._process.stdin.close()

    def printed(self) -> list[tuple[int, bytes] | None]:
        """Return the new output, waiting some seconds at most; None marks the end of each stream."""
        try:
            lines = [self._printed.get(timeout=_PATIENCE)]
            while not self._printed.empty():
                lines.append(self._printed.get())
        except queue.Empty:
            return []
        return lines

    def ended(self) -> int:
        """Return the agent's exit code, after its streams have ended."""
        return self._process.wait()


def main(arguments: Sequence[str]) -> int:
    """Start the actor on the host's node, and connect its input and output with this process's."""
    ray: Any = import_module("ray")  # ray is an optional package
    scheduling: Any = import_module("ray.util.scheduling_strategies")
    address, host = arguments
    here = environment.snapshot()
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        node = next(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == host)
        # No resources: the node's are for the agent's ranks. Concurrent calls: one thread reads while another writes.
        actor = ray.remote(AgentOnNode).options(
            num_cpus=0,
            max_concurrency=4,
            scheduling_strategy=scheduling.NodeAffinitySchedulingStrategy(node, soft=False),
            # Ray's dashboard shows these variables to everyone, so pass only what is needed to import this module.
            runtime_env={"env_vars": {name: here[name] for name in ("PYTHONPATH",) if name in here}},
        )
        there = actor.remote()
        threading.Thread(target=_pass_input, args=(ray, there), daemon=True).start()
        _pass_output(ray, there)
        return ray.get(there.ended.remote())
    except StopIteration:
        print(f"Ray has no live node {host}", file=sys.stderr)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError) as error:
        print(str(error).strip().partition("\n")[0], file=sys.stderr)
    return 1


def _pass_input(ray: Any, there: Any) -> None:
    """Thread: passes orders from standard input to the agent."""
    for line in FileIO(0, closefd=False):
        ray.get(there.write.remote(line))
    ray.get(there.write.remote(b""))


def _pass_output(ray: Any, there: Any) -> None:
    """Pass the agent's output to standard output and error until both have ended."""
    ends = 0
    while ends < 2:
        for printed in ray.get(there.printed.remote()):
            if printed is None:
                ends += 1
            else:
                number, line = printed
                os.write(number, line)


STARTER = Starter(agent_commands=_agent_commands)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
