"""Show who holds what under a layout, and who talks to whom: a table, a picture, a file. Nothing is started."""

import argparse
import json
from pathlib import Path

from samestep.cli import job_options
from samestep.layout import Layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layout", metavar="LAYOUT", help='such as "pp2 dp2 tp2", fsdp4, or a preset such as ddp')
    parser.add_argument("--processes", type=int, help="number of processes, for a layout without a size")
    parser.add_argument("--batch", type=int, help="samples of a global batch, to see which of them a rank takes")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture to a file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that is shown to a file")


def run(options: argparse.Namespace) -> int:
    layout = Layout.parse(options.layout, options.processes)
    job_options.check("--svg", options.svg)
    job_options.check("--json", options.json)

    from samestep.display.layout import holdings, print_holdings
    from samestep.display.layout_svg import draw

    shown = holdings(layout, options.batch)
    if options.svg is not None:
        options.svg.write_text(draw(shown), encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps(shown.to_json(), indent=2) + "\n", encoding="utf-8")
    print_holdings(shown)
    return 0
