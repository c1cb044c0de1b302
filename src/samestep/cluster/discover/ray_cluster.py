"""A Ray cluster: its live nodes, by the addresses under which they reach each other."""

import importlib.util
import logging
import socket
from typing import Any

from samestep.cluster.cluster import Cluster, Host
from samestep.cluster.discover.place import Found, Given, Read
from samestep.cluster.discover.who_am_i import which
from samestep.errors import UserError

_PATIENCE = 5.0  # seconds for a connection


class Ray:
    """The nodes of the cluster whose address the user, or RAY_ADDRESS, names."""

    name = "ray"
    sign = "--ray ADDRESS or RAY_ADDRESS"
    everywhere = False
    allocates = False

    def named(self, given: Given) -> bool:
        return given.ray is not None

    def there(self, given: Given) -> bool:
        return bool(given.environ.get("RAY_ADDRESS"))

    def find(self, given: Given) -> Found:
        source, address = ("--ray", given.ray) if given.ray else ("RAY_ADDRESS", given.environ.get("RAY_ADDRESS", ""))
        assert address is not None
        if importlib.util.find_spec("ray") is None:
            raise UserError(f"{source} is {address}, and Ray is not installed; pip install ray would do")
        _check_answers(source, address)
        nodes = [node for node in _nodes(source, address) if node.get("Alive")]
        accelerated = given.device != "cpu" and any(node["Resources"].get("GPU", 0) >= 1 for node in nodes)
        kind = "GPU" if accelerated else "CPU"
        hosts = [
            Host(name=node["NodeManagerAddress"], slots=int(node["Resources"].get(kind, 0)))
            for node in sorted(nodes, key=_order)
        ]
        hosts = [host for host in hosts if host.slots]
        if not hosts:
            raise UserError(f"{source} is {address}, a Ray cluster without a live node that has a CPU")
        return Found(
            cluster=Cluster(
                place=self.name,
                hosts=tuple(hosts),
                this=which([host.name for host in hosts], given.host.name),
            ),
            read=(Read(source=source, value=address), *(_read(node) for node in nodes)),
            slots_from="accelerators" if accelerated else "cores",
        )


def _check_answers(source: str, address: str) -> None:
    """Raise UserError where nobody listens; Ray itself would go on trying for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        return  # auto, or what else Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"{source} is {address}, where nothing answers: {error}; ray start --head says its address"
        ) from None


def _nodes(source: str, address: str) -> list[dict[str, Any]]:
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
    """The head node first, then by address, so that every look at the cluster numbers its hosts alike."""
    return "node:__internal_head__" not in node["Resources"], node["NodeManagerAddress"]


def _read(node: dict[str, Any]) -> Read:
    resources = node["Resources"]
    return Read(
        source=f"node {node['NodeManagerAddress']}",
        value=", ".join(f"{kind} {resources[kind]:g}" for kind in ("CPU", "GPU") if kind in resources),
    )
