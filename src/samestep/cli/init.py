"""Write a job to start from into an empty folder: a job file, sample data, a task of your own."""

import argparse

from samestep.errors import UserError
from samestep.input_files import path_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("template", nargs="?", metavar="TEMPLATE", help="what to start from: see --list")
    parser.add_argument("folder", nargs="?", type=path_option, metavar="FOLDER", help="empty, or not there yet")
    parser.add_argument("--list", action="store_true", help="print the templates")


def run(options: argparse.Namespace) -> int:
    from samestep import scaffold

    if options.list:
        if options.template is not None:
            raise UserError(f'--list prints all templates and takes none; remove "{options.template}", or --list')
        for name, template in scaffold.templates().items():
            print(f"{name:<12} {template.summary}")
        return 0
    if options.template is None or options.folder is None:
        raise UserError(
            "init needs a template and a folder; use samestep init text my-job/ or see samestep init --list"
        )
    job, *others = scaffold.write(options.template, options.folder)
    print(job)
    shown = [file for file in others if len(file.relative_to(options.folder).parts) < 3]
    for file in shown:
        print(file)
    if len(shown) < len(others):
        print(f"and {len(others) - len(shown)} files of data")
    print(f"\nsamestep train {job}\nsamestep verify {job}")
    return 0
