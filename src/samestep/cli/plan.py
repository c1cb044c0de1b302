"""Plan which layouts of a model fit on a cluster and how fast each will be, or check the planner against rows."""

import argparse
from typing import TYPE_CHECKING

from samestep import output_files
from samestep.cli import job_options, plan_job
from samestep.errors import UserError, closest
from samestep.input_files import path_option
from samestep.limits import MOST_LENGTH, MOST_RANKS, MOST_REPEATS, MOST_WIDTH, WholeNumber

if TYPE_CHECKING:
    from samestep.planning.hardware import ClusterSpec
    from samestep.planning.price import Price
    from samestep.planning.stage_time import PlannedJob

_PRECISIONS = ("bf16", "fp16", "fp32", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Options that the plan itself decides, and options that don't affect it.
    without = ("layout", "processes", "engine", "device", "checkpoint-every", "max-restarts", "folder")
    job_options.add_arguments(parser, without=without, job=False)
    parser.add_argument(
        "--measure",
        nargs="?",
        type=WholeNumber(most=MOST_REPEATS),
        const=3,
        metavar="N",
        help="with a job file: take a few steps of the best N layouts (3) here, and correct the plan by them",
    )
    parser.add_argument(
        "--comm", type=path_option, metavar="FILE", help="with a job file: what samestep comm --json measured here"
    )
    parser.add_argument("--model", metavar="NAME", help="such as llama-3-8b; an unknown name lists the known ones")
    parser.add_argument("--gpu", metavar="NAME", help="such as a100, h100, h200, b200")
    parser.add_argument("--devices", type=WholeNumber(most=MOST_RANKS), metavar="N", help="how many of them")
    parser.add_argument(
        "--node-size",
        type=WholeNumber(most=MOST_RANKS),
        metavar="N",
        help="devices of a node (default: as usually built)",
    )
    parser.add_argument(
        "--link", metavar="NAME", help="inside a node: nvlink4, pcie5, ... (default: as usually built)"
    )
    parser.add_argument("--network", metavar="NAME", help="between nodes: ndr, ethernet-100, ... (default: likewise)")
    parser.add_argument(
        "--seq", type=WholeNumber(most=MOST_LENGTH), metavar="N", help="tokens of a sample (default: the model's)"
    )
    parser.add_argument(
        "--adapter",
        type=WholeNumber(least=0, most=MOST_WIDTH),
        default=0,
        metavar="RANK",
        help="fine-tune adapters of this rank, with frozen weights",
    )
    parser.add_argument(
        "--global-batch", type=WholeNumber(), metavar="N", help="samples of a step (default: 4 or 16 Mi tokens)"
    )
    parser.add_argument("--precision", choices=_PRECISIONS, help="of matrix products (default: bf16)")
    parser.add_argument("--program", metavar="NAME", help="samestep (default) or megatron-core")
    parser.add_argument(
        "--top", type=WholeNumber(most=MOST_REPEATS), default=10, metavar="N", help="layouts to show (default: 10)"
    )
    parser.add_argument("--minimum", action="store_true", help="the fewest devices that hold the model, by lever")
    parser.add_argument("--price", metavar="PRICE", help='of one device, such as "2.5 USD/hour"')
    output_files.add_arguments(parser, json="write everything that is shown to a file", report="write a page of HTML")
    parser.add_argument(
        "--rows", type=path_option, metavar="FILE", help="published steps, JSON or CSV, to predict and compare"
    )


def run(options: argparse.Namespace) -> int:
    output_files.check(options, "json", "report")
    if options.job is not None:
        return job_options.print_config(job_options.load(options)) if options.print_config else plan_job.run(options)
    _check_no_job(options)
    if options.rows is not None:
        _check_rows(options)
        return _rows(options)
    from samestep.planning.price import Price

    price = Price.parse(options.price) if options.price is not None else None
    for flag in ("model", "gpu") if options.minimum else ("model", "gpu", "devices"):
        if getattr(options, flag) is None:
            raise UserError(f"--{flag} is missing; such as samestep plan --model llama-3-8b --gpu h100 --devices 8")
    if options.minimum:
        _check_minimum(options)
    job, cluster = _job_and_cluster(options)
    return _minimum(options, job, cluster) if options.minimum else _plan(options, job, cluster, price)


def _check_no_job(options: argparse.Namespace) -> None:
    """Raise UserError for options that say something of a job file that is not there."""
    for name in ("measure", "comm", "set", "micro_batch", "threads", "print_config"):
        if getattr(options, name):
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} goes with a job file; such as samestep plan JOB.yaml --{flag} ...")


def _check_rows(options: argparse.Namespace) -> None:
    """Raise UserError for options that say something of a model or a cluster, which the rows name themselves."""
    names = ("model", "devices", "node_size", "link", "network", "seq", "adapter", "global_batch")
    for name in (*names, "precision", "program", "minimum", "price", "report"):
        if getattr(options, name):
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} does not go with --rows, whose rows say it or don't use it; leave it out")


def _check_minimum(options: argparse.Namespace) -> None:
    """Raise UserError for options that would have nothing to show."""
    for name in ("price", "report"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} is of steps, which --minimum does not time; leave --{name} out")


def _job_and_cluster(options: argparse.Namespace) -> "tuple[PlannedJob, ClusterSpec]":
    from samestep.planning.hardware import cluster_of
    from samestep.planning.search import usual_batch
    from samestep.planning.shapes import known_model
    from samestep.planning.software import PLANNED
    from samestep.planning.stage_time import PlannedJob

    model = known_model(options.model, seq=options.seq, adapter=options.adapter)
    devices = options.devices if options.devices is not None else 1
    cluster = cluster_of(
        options.gpu, devices, node_size=options.node_size, inside=options.link, between=options.network
    )
    precision, program = options.precision or "bf16", options.program or "samestep"
    if precision not in cluster.device.flops:
        raise UserError(
            f"--precision is {precision}, which {cluster.device.name} does not have; "
            f"{closest(precision, cluster.device.flops)}"
        )
    if program not in PLANNED:
        raise UserError(f'--program is "{program}"; {closest(program, PLANNED)}')
    batch = options.global_batch if options.global_batch is not None else usual_batch(model, devices)
    job = PlannedJob(model=model, global_batch=batch, precision=precision, software=PLANNED[program])
    return job, cluster


def _plan(options: argparse.Namespace, job: "PlannedJob", cluster: "ClusterSpec", price: "Price | None") -> int:
    from samestep.display.plan import print_plan
    from samestep.planning.price import cost_of
    from samestep.planning.search import plan
    from samestep.progress import phases

    with phases.status(lambda: f"searching layouts of {cluster.devices} devices"):
        cluster_plan = plan(job, cluster, most=options.top)
    costs = [cost_of(job, cluster, candidate.time.seconds, price) for candidate in cluster_plan.candidates]
    output_files.write_json(
        options.json,
        {
            "model": job.model.name,
            "parameters": job.model.parameters,
            "gpu": cluster.device.name,
            "devices": cluster.devices,
            "global_batch": job.global_batch,
            "seq": job.model.seq,
            "adapter": job.model.adapter,
            "precision": job.precision,
            "tried": cluster_plan.tried,
            "too_large": cluster_plan.too_large,
            "layouts": [
                {**candidate.to_json(job, cluster), **cost.to_json()}
                for candidate, cost in zip(cluster_plan.candidates, costs, strict=True)
            ],
        },
    )
    if options.report is not None:
        from samestep.display.plan_page import page

        output_files.write(options.report, page(cluster_plan, price))
    print_plan(cluster_plan, price)
    return 0


def _minimum(options: argparse.Namespace, job: "PlannedJob", cluster: "ClusterSpec") -> int:
    from samestep.display.plan import print_minimum
    from samestep.planning.search import minimum

    levers = minimum(job, cluster)
    output_files.write_json(
        options.json, {"model": job.model.name, "gpu": cluster.device.name, "levers": [e.to_json() for e in levers]}
    )
    print_minimum(job.model.name, cluster.device.name, levers)
    return 0


def _rows(options: argparse.Namespace) -> int:
    from samestep.display.plan import print_errors
    from samestep.planning.accuracy import table
    from samestep.planning.published import predict, read_rows

    rows = read_rows(options.rows, options.gpu)
    predicted = [predict(row) for row in rows]
    groups = table(predicted)
    output_files.write_json(
        options.json,
        {
            "errors": [group.to_json() for group in groups],
            "rows": [row.to_json() for row in predicted],
        },
    )
    print_errors(groups)
    return 0
