"""Talk to a chat model that was trained: its template, the likeliest answer, as it is written."""

import argparse
import sys
from collections.abc import Iterator

from samestep.errors import UserError
from samestep.input_files import path_option
from samestep.limits import MOST_LENGTH, WholeNumber


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=path_option, metavar="RUN", help="a run's folder, or a checkpoint")
    parser.add_argument(
        "--job", dest="job_file", type=path_option, metavar="JOB.yaml", help="its job, where RUN has no checkpoint"
    )
    parser.add_argument(
        "--once", metavar="TEXT", help="print the answer to this alone (default: read from the input)"
    )
    parser.add_argument("--system", metavar="TEXT", help="the message of the system at the beginning")
    parser.add_argument(
        "--new-tokens",
        type=WholeNumber(least=1, most=MOST_LENGTH),
        default=256,
        metavar="N",
        help="most tokens of an answer (default: 256)",
    )


def run(options: argparse.Namespace) -> int:
    if options.once is not None and not options.once.strip():
        raise UserError("--once is empty; give it what the user says")

    from samestep import jobfile
    from samestep.inference import conversation

    job = None if options.job_file is None else jobfile.load(options.job_file).job
    messages = [{"role": "system", "content": options.system}] if options.system else []
    with conversation(options.run_folder, job) as answer:
        for line in [options.once] if options.once is not None else _lines():
            messages.append({"role": "user", "content": line})
            written = ""
            for piece in answer(messages, options.new_tokens):
                print(piece, end="", flush=True)
                written += piece
            print(flush=True)
            messages.append({"role": "assistant", "content": written})
    return 0


def _lines() -> Iterator[str]:
    """What is typed, or stands in the input, line by line until its end."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
