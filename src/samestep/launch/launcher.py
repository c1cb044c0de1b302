"""Launcher: turns the hosts found and the user's options into a NodeSpec for each host, and starts the agents."""

import re
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, chdir
from dataclasses import replace
from datetime import UTC, datetime

from samestep import environment
from samestep.errors import UserError
from samestep.host_names import check_host
from samestep.launch import ssh
from samestep.launch.environments import ray, slurm
from samestep.launch.environments.base import Cluster, FoundCluster, Host
from samestep.launch.failure import JobOutcome
from samestep.launch.forwarded_env import ForwardedVariables
from samestep.launch.job_secret import OPTION, JobSecret
from samestep.launch.node_spec import NodeSpec
from samestep.launch.options import LaunchRequest
from samestep.launch.starter import Starter

STARTERS: Mapping[str, Starter] = {
    "slurm": slurm.STARTER,
    "ray": ray.STARTER,
}


def starter_of(place: str) -> Starter:
    """Return the starter of agents in an environment: its own, else SSH."""
    return STARTERS.get(place, ssh.STARTER)


def node_rank_of(found_cluster: FoundCluster, node_rank: int | None, most: int, *, named: bool) -> int:
    """Return this host's node rank among `most` hosts: as `node_rank` by the user, else as the environment has it.

    Raises UserError if neither is known, and for a host that the job leaves out.
    """
    if node_rank is not None:
        if not 0 <= node_rank < most:
            there = f"{most} hosts have the ranks 0 to {most - 1}; use one of them"
            ranks = "1 host has the rank 0; use that" if most == 1 else there
            raise UserError(f"--node-rank is {node_rank}, and {ranks}, or more hosts by --num-nodes")
        return node_rank
    this = found_cluster.cluster.this
    if this is not None and this < most and (named or most == 1):
        return this
    if found_cluster.on_every_host or most == 1 or (this is not None and this >= most):
        names = ", ".join(host.name for host in found_cluster.cluster.hosts[:most])
        raise UserError(
            f"this host, {socket.gethostname()}, is none of the job's: {names}; leave it out of the start, "
            "change --include, --exclude or --num-nodes, or say by --node-rank which it is"
        )
    raise UserError(f"which of the {most} hosts is this? use --node-rank 0 to {most - 1}")


# The commands of launchers that are not called as they are in `Launcher`.
_STARTED_BY = {"open-mpi": "mpirun", "pmi": "mpirun", "slurm": "srun"}


def check_one_a_host() -> None:
    """Raise UserError if a launcher started several of this process on a host, since each would start all ranks."""
    ranks = environment.ranks()
    # If the launcher doesn't give the number on this host, each may be on a host of its own.
    unsaid = ranks is not None and ranks.local_world_size == ranks.world_size and not ranks.one_host
    if ranks is None or ranks.local_world_size < 2 or unsaid:
        return
    launcher = _STARTED_BY.get(ranks.launcher, ranks.launcher)
    raise UserError(
        f"{launcher} started {ranks.local_world_size} processes on this host, and each would start all of its ranks; "
        "use one a host (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node, torchrun --nproc-per-node 1), or the "
        "command without samestep launch"
    )


DEFAULT_PORT = 29500  # PyTorch's

_ID = re.compile(r"[\w.-]{1,128}", re.ASCII)
_NOT_OF_AN_ID = re.compile(r"[^\w.-]", re.ASCII)


def launch(
    found_cluster: FoundCluster,
    request: LaunchRequest,
    variables: ForwardedVariables,
    secret: JobSecret | None = None,
) -> JobOutcome:
    """Run a job to its end. `variables` go to every host. Raises UserError before anything is started.

    `secret`: the one that the user gave for the job's hosts. Hosts that are started from here get one in any case.
    """
    check_one_a_host()
    found_cluster = first_hosts(found_cluster, request)
    spec = part_here(found_cluster, request)
    if spec is None:
        return _from_here(found_cluster, request, variables, secret or JobSecret.made())
    if spec.most > 1 and secret is None:
        _tell_unsigned(spec)
    with environment.quiet_import():
        from samestep.launch import agent
    with ExitStack() as stack:
        stack.enter_context(environment.given(variables.values))
        try:
            stack.enter_context(chdir(request.chdir))
        except OSError as error:
            raise UserError(f"the folder {request.chdir}: {error.strerror}; use --chdir FOLDER") from None
        return agent.run(spec, secret)


def first_hosts(found_cluster: FoundCluster, request: LaunchRequest) -> FoundCluster:
    """Drop hosts beyond the most that the job takes; this machine may not be among the others.

    All hosts are kept if the same command is started on every host, since each must know of all.
    """
    if request.nodes is None or request.no_ssh or found_cluster.on_every_host:
        return found_cluster
    cluster, most = found_cluster.cluster, _nodes(request, None)[1]
    this = cluster.this if cluster.this is not None and cluster.this < most else None
    return replace(found_cluster, cluster=replace(cluster, hosts=cluster.hosts[:most], this=this))


def part_here(found_cluster: FoundCluster, request: LaunchRequest) -> NodeSpec | None:
    """Return this host's part of the job; None if this process starts agents on other hosts."""
    cluster = found_cluster.cluster
    if request.no_ssh or found_cluster.on_every_host:
        return _one_of_many(found_cluster, request)
    if request.node_rank is not None:
        raise UserError("--node-rank goes with --no-ssh, by which each host is started by itself")
    if len(cluster.hosts) == 1 and cluster.this == 0:
        if request.nodes is not None and request.nodes != (1, 1):
            raise UserError(
                f"--nodes {request.nodes[0]}:{request.nodes[1]}, and there is this host alone; "
                "--hostfile names others, or --no-ssh starts one host after another"
            )
        return _spec(request, _job_of(found_cluster, request), cluster, 0)
    return None


def world_of(found_cluster: FoundCluster, request: LaunchRequest) -> tuple[int, int]:
    """Return the largest world size of a job, and the ranks on its first host."""
    hosts = found_cluster.cluster.hosts
    if request.no_ssh and len(hosts) == 1:  # assume that the others are like this one
        return hosts[0].slots * _nodes(request, None)[1], hosts[0].slots
    most = _nodes(request, len(hosts))[1]
    return sum(host.slots for host in hosts[:most]), hosts[0].slots


def _one_of_many(found_cluster: FoundCluster, request: LaunchRequest) -> NodeSpec:
    """Return this host's part of a job whose command is started on every host."""
    cluster, named = found_cluster.cluster, found_cluster.on_every_host or len(found_cluster.cluster.hosts) > 1
    fewest, most = _nodes(request, len(cluster.hosts) if named else None)
    node_rank = node_rank_of(found_cluster, request.node_rank, most, named=named)
    address = request.master_addr or (found_cluster.main_address or cluster.hosts[0].name if named else None)
    if request.master_addr is None and found_cluster.no_address is not None and most > 1:
        raise UserError(found_cluster.no_address)
    if address is None and most > 1:
        raise UserError(
            f"{most} hosts must know where they meet; "
            "use --master-addr and the address of the host with --node-rank 0, the same on all"
        )
    port = request.master_port or found_cluster.main_port or _port_of(found_cluster)
    host = cluster.hosts[node_rank] if named else replace(cluster.hosts[0], name=socket.gethostname())
    job = _job_of(found_cluster, request, default=f"{address}-{port}" if most > 1 else None)
    spec = _spec(request, job, replace(cluster, hosts=(host,)), 0)
    if most == 1:
        return spec
    return replace(
        spec,
        node_rank=node_rank,
        hosts=tuple(host.name for host in cluster.hosts) if named else (),
        fewest=fewest,
        most=most,
        must_match=len({host.slots for host in cluster.hosts}) == 1,
        address=address,
        port=port,
        serves=node_rank == 0,
    )


def _port_of(found_cluster: FoundCluster) -> int:
    """Return the store's port: derived from the environment's job id if it has one, else the default."""
    if not found_cluster.on_every_host or found_cluster.cluster.job is None:
        return DEFAULT_PORT
    with environment.quiet_import():
        from samestep.launch.rank_rendezvous import ports_of
    return ports_of(found_cluster.cluster.job)[0]


def _tell_unsigned(spec: NodeSpec) -> None:
    """Print that strangers can change what the hosts tell each other."""
    print(
        f"samestep: {spec.host}: the hosts' store at {spec.address}:{spec.port} is not authenticated: who reaches "
        f"that port can change what the hosts believe; {OPTION} FILE, the same secret on all hosts, prevents it",
        file=sys.stderr,
    )


def _from_here(
    found_cluster: FoundCluster, request: LaunchRequest, variables: ForwardedVariables, secret: JobSecret
) -> JobOutcome:
    """Serve the job's store, and start the agents of all hosts from here."""
    with environment.quiet_import():
        from samestep.launch import store_address
        from samestep.launch.controller import Controller
        from samestep.launch.network import address_towards, store_at
        from samestep.launch.signed_store import open_to_hosts
    cluster = found_cluster.cluster
    fewest, most = _nodes(request, len(cluster.hosts))
    job = _job_of(found_cluster, request)
    kept_back = (*variables.kept_back, *variables.unknown)
    options = replace(request.reach, ray=request.hosts.ray, this=cluster.this, kept_back=kept_back)
    starter = starter_of(cluster.place)
    others = [host.name for number, host in enumerate(cluster.hosts) if number != cluster.this]
    try:
        if request.master_addr is not None:
            address = store_address.to_meet_at(
                request.master_addr, (starter.resolve(host, options) for host in others)
            )
        else:
            address = address_towards(starter.resolve(others[0], options))
        store = store_at(address, request.master_port or 0)
    except OSError as error:
        raise UserError(_no_store(request, others[0], error)) from None
    open_to_hosts(store, secret)
    specs = [
        replace(
            _spec(request, job, cluster, number),
            fewest=fewest,
            most=most,
            must_match=False,
            address=address,
            port=store.port,
            controlled=True,
        )
        for number in range(len(cluster.hosts))
    ]
    _tell_what_stays(variables, starter.kept_back)
    commands = starter.agent_commands(specs, options)
    controller = Controller(
        commands,
        request.chdir,
        variables.values,
        grace_period=request.ranks.grace_period,
        elastic=fewest != most,
        secret=secret,
    )
    return controller.run()


def _tell_what_stays(variables: ForwardedVariables, what: str) -> None:
    """Name the variables that no host of the job gets; `what`: what happens to them."""
    reasons = {"since it may be secret": variables.kept_back, "since samestep doesn't know it": variables.unknown}
    for reason, names in reasons.items():
        if names:
            print(f"samestep: {what}, {reason}: {', '.join(names)}; --pass NAME does", file=sys.stderr)


def _no_store(request: LaunchRequest, other: str, error: OSError) -> str:
    """Explain why the job's store can't be served at that address."""
    from samestep.launch.network import why_not

    if request.master_port is not None and (why := why_not(request.master_port, error)) is not None:
        return f"--master-port {request.master_port} {why}; without it a free one is taken"
    if request.master_addr is not None:
        return (
            f"--master-addr {request.master_addr} is no address of this machine, where the hosts meet: "
            f"{error.strerror}"
        )
    return (
        f"the address of this machine towards {other} can't be found: {error.strerror}; use "
        "--master-addr and an address of this machine that the hosts reach"
    )


def _spec(request: LaunchRequest, job: str, cluster: Cluster, number: int) -> NodeSpec:
    """Build one host's part of the job."""
    host: Host = cluster.hosts[number]
    return NodeSpec(
        job=job,
        host=host.name,
        node_rank=number,
        hosts=tuple(host.name for host in cluster.hosts),
        num_procs=host.slots,
        chosen=host.chosen,
        command=request.command,
        run=request.run,
        ranks=request.ranks,
        timeouts=request.timeouts,
    )


def check_size(request: LaunchRequest) -> None:
    """Raise UserError for an impossible number of hosts, or a place to meet that is no host."""
    if request.master_addr is not None:
        check_host(request.master_addr, "--master-addr")
    if request.nodes is not None and request.hosts.num_nodes is not None:
        raise UserError("--nodes and --num-nodes are both given; --nodes 1:4 is for a job that may shrink and grow")
    if request.hosts.num_nodes is not None and request.hosts.num_nodes < 1:
        raise UserError(f"--num-nodes is {request.hosts.num_nodes}; it should be 1 or more")


def _nodes(request: LaunchRequest, there: int | None) -> tuple[int, int]:
    """Return the fewest and most hosts; `there`: the number that the environment offers, if known."""
    check_size(request)
    if request.nodes is None and request.hosts.num_nodes is None and there is None:
        raise UserError("--no-ssh needs to know how many hosts there are; use --num-nodes 2, the same on all")
    fewest, most = request.nodes or ((request.hosts.num_nodes or there or 1),) * 2
    if there is not None and most > there:
        words = f"--nodes {fewest}:{most}" if request.nodes is not None else f"--num-nodes is {most}"
        raise UserError(
            f"{words}, and there {'is 1 host; use 1' if there == 1 else f'are {there} hosts; use {there} or fewer'}"
        )
    return fewest, most


def _job_of(found_cluster: FoundCluster, request: LaunchRequest, default: str | None = None) -> str:
    """Return the job's id: the given one, the environment's, or a new one."""
    if request.job_id:
        if not _ID.fullmatch(request.job_id):
            raise UserError(f'--job-id is "{request.job_id}"; use letters, digits, dots, dashes and underscores')
        return request.job_id
    job = found_cluster.cluster.job or default
    if job is None:
        job = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
    return _NOT_OF_AN_ID.sub("-", job)[:128]  # Open MPI 5 calls a job prterun-head-17@1


def parse_command(words: Sequence[str]) -> tuple[str, ...]:
    """Return the command after the options of a launch, with or without -- before it. Raises UserError."""
    command = tuple(words[1:] if words[:1] == ["--"] else words)
    if not command:
        raise UserError("there is no command to start; write it after --, such as -- train.py --lr 3e-4")
    return command
