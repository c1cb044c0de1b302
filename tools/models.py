"""Many kinds of models under many layouts, each held against one process in float64: the table of docs/models.md.

    python tools/models.py [--halves H ...] [--models M ...] [--layouts "dp2, tp2"] [--json FILE] [--resume] [--docs]

40 chosen types of transformers and models of other kinds, 60 types drawn at random from transformers' registries, and
models of other libraries, all tiny. What has been measured is kept in the file as it comes; --resume goes on from it,
and --again measures again what came to some verdicts. --second-look removes the stated cause of each refusal and
tries the pair again. --as-run measures nothing for the table: it prints where `samestep check` says anything else of
a layout than a training under it does.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from model_table import as_run, measure, page, result, second_look
from model_table.declared import LAYOUTS, LAYOUTS_OF_DRAWN
from model_table.entry import Entry, Half
from model_table.result import Result, Verdict
from model_table.zoo import entries, entry_of
from rich.console import Console
from rich.progress import Progress

from samestep.verification.matrix import layouts_of


def main() -> None:
    options = _options()
    chosen = [
        entry
        for entry in entries().values()
        if (not options.models or entry.name in options.models)
        and (not options.kinds or entry.kind in options.kinds)
        and (not options.halves or entry.half in options.halves)
    ]
    if options.as_run:
        _as_run(chosen, options)
        return
    known = result.read(options.json) if options.resume and options.json is not None else {}
    pairs = {entry.name: _layouts(entry, options) for entry in chosen}
    # Of models and layouts that were not chosen, what is known stays.
    known = {
        pair: each
        for pair, each in known.items()
        if each.verdict not in options.again or each.layout not in pairs.get(_base(each), ())
    }
    _measure(chosen, pairs, known, options)
    of_interest = [known[entry.name, layout] for entry in chosen for layout in pairs[entry.name]]
    if options.second_look:
        tried = second_look.pairs(of_interest)
        _measure([entry_of(name) for name in tried], tried, known, options)
    print(page.summary(of_interest))
    if options.docs:
        page.write(list(_in_order(known)))


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(entries()), default=[], metavar="MODEL")
    parser.add_argument("--kinds", nargs="*", choices=sorted({e.kind for e in entries().values()}), default=[])
    parser.add_argument(
        "--halves", nargs="*", choices=get_args(Half), default=[], help="the table's parts (default: all)"
    )
    parser.add_argument("--layouts", help='a list, such as "dp2, fsdp2 tp2" (default: those of the table)')
    parser.add_argument("--steps", type=int, default=3, help="steps that are compared (default: 3)")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds that a pair may take (default: 90)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results are kept as they come")
    parser.add_argument("--resume", action="store_true", help="measure only what FILE does not have")
    parser.add_argument(
        "--again", nargs="*", choices=get_args(Verdict), default=[], help="with --resume: these verdicts again"
    )
    parser.add_argument("--second-look", action="store_true", help="try what is refused without the stated cause")
    parser.add_argument("--as-run", action="store_true", help="hold samestep check beside trainings, two steps each")
    parser.add_argument("--docs", action="store_true", help="write docs/models.md and docs/zh/models.md")
    return parser.parse_args()


def _layouts(entry: Entry, options: Any) -> Sequence[str]:
    """The layouts that were asked for, or those of an entry's half."""
    if options.layouts is not None:
        return layouts_of(options.layouts)
    return LAYOUTS if entry.half == "chosen" else LAYOUTS_OF_DRAWN


def _as_run(chosen: Sequence[Entry], options: Any) -> None:
    """Print each pair, and how many were alike."""
    measure.prepare()
    found: list[as_run.Compared] = []
    for entry in chosen:
        for each in as_run.compare(entry, _layouts(entry, options)):
            found.append(each)
            print(each.words(), flush=True)
    print(f"alike: {sum(each.alike for each in found)} of {len(found)}")


def _measure(
    chosen: Sequence[Entry], pairs: Mapping[str, Sequence[str]], known: dict[tuple[str, str], Result], options: Any
) -> None:
    """Measure what is not known yet, and write it down."""
    measure.prepare()
    total = sum(map(len, pairs.values()))
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("models", total=total)
        for entry in chosen:
            layouts = pairs[entry.name]
            left = [layout for layout in layouts if (entry.name, layout) not in known]
            progress.update(bar, description=entry.name, advance=len(layouts) - len(left))
            for each in measure.measure(entry, left, steps=options.steps, limit=options.limit) if left else ():
                known[each.pair] = each
                progress.advance(bar)
                if options.json is not None:
                    result.write(options.json, _in_order(known))


def _in_order(known: dict[tuple[str, str], Result]) -> list[Result]:
    """Models in the order of the table, and each one's layouts in theirs."""
    models, layouts = list(entries()), list(LAYOUTS)

    def place(each: Result) -> tuple[int, str, int, str]:
        layout = layouts.index(each.layout) if each.layout in layouts else len(layouts)
        return models.index(_base(each)), each.model, layout, each.layout

    return sorted((each for each in known.values() if _base(each) in models), key=place)


def _base(each: Result) -> str:
    """The model's name without its variant."""
    return each.model.partition(second_look.MARK)[0]


if __name__ == "__main__":
    main()
