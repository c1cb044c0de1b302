"""Show who holds what under a layout, and who talks to whom: a table, a picture, a file. Nothing is started."""

import argparse

from samestep import output_files
from samestep.layout import Layout
from samestep.limits import MOST_RANKS, WholeNumber


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layout", metavar="LAYOUT", help='such as "pp2 dp2 tp2", fsdp4, or a preset such as ddp')
    parser.add_argument(
        "--processes", type=WholeNumber(most=MOST_RANKS), help="number of processes, for a layout without a size"
    )
    parser.add_argument(
        "--batch", type=WholeNumber(), help="samples of a global batch, to see which of them a rank takes"
    )
    output_files.add_arguments(
        parser, svg="write a picture to a file", json="write everything that is shown to a file"
    )


def run(options: argparse.Namespace) -> int:
    layout = Layout.parse(options.layout, options.processes)
    output_files.check(options, "svg", "json")

    from samestep.display.layout import holdings, print_holdings
    from samestep.display.layout_svg import draw

    shown = holdings(layout, options.batch)
    if options.svg is not None:
        output_files.write(options.svg, draw(shown))
    output_files.write_json(options.json, shown.to_json())
    print_holdings(shown)
    return 0
