"""Start a script or a program as ranks: on this machine, on the hosts of a file over SSH, or as one host of many."""

import argparse
import sys

from samestep.cli import launch_options
from samestep.errors import USERS_MISTAKE, UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    launch_options.add_arguments(parser)
    kubernetes = parser.add_argument_group("Kubernetes")
    kubernetes.add_argument("--k8s", action="store_true", help="print a PyTorchJob that runs this launch, and stop")
    kubernetes.add_argument("--image", metavar="IMAGE", help="of its containers; samestep is installed in it")
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="train.py --lr 3e-4, or -m package.module, or any program, with its arguments",
    )


def run(options: argparse.Namespace) -> int:
    try:
        return _launch(options)
    except UserError as error:
        # Printed here: in a pod, variables make this process a rank, and `main` prints on rank 0 only.
        print(f"samestep: {error}", file=sys.stderr)
        return USERS_MISTAKE


def _launch(options: argparse.Namespace) -> int:
    if options.print_variables:
        return launch_options.print_variables(options)

    from samestep.launch.launcher import parse_command

    command = parse_command(options.command)
    if options.k8s:
        return _manifest(options, command)
    if options.image is not None:
        raise UserError("--image goes with --k8s")
    request = launch_options.request_from(options, command)
    return launch_options.launch(options, launch_options.found_from(request), request)


def _manifest(options: argparse.Namespace, command: tuple[str, ...]) -> int:
    """Print the PyTorchJob whose pods run this launch, each for its own host."""
    from samestep.launch.environments.kubernetes import PyTorchJobSpec, manifest
    from samestep.launch.launcher import check_size

    if options.image is None:
        raise UserError("--k8s needs --image, the image of the pods' containers")
    if named := [flag for flag in launch_options.named_hosts(options) if flag not in ("--num-nodes", "--num-procs")]:
        raise UserError(f"--k8s names no hosts, which Kubernetes chooses; leave {' and '.join(named)} out")
    request = launch_options.request_from(options, command)
    launch_options.check(request)
    check_size(request)
    fewest, most = request.nodes or (request.hosts.num_nodes or 1,) * 2
    wish = PyTorchJobSpec(
        name=request.job_id or "samestep",
        image=options.image,
        fewest=fewest,
        most=most,
        num_procs=request.hosts.num_procs,
        device=request.ranks.device,
        command=("samestep", "launch", *launch_options.words_in_a_pod(options), "--", *command),
    )
    sys.stdout.write(manifest(wish))
    return 0
