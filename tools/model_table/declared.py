"""The layouts of the table, and which pairs of a model and a layout are impossible, with the reason.

A pair is impossible where no layout of that kind could exist for the model, whoever wrote it. Whatever samestep
refuses of the others is a miss.
"""

from samestep.layout import Layout

LAYOUTS = (
    "dp2",
    "dp3",
    "zero1x2",
    "zero2x2",
    "fsdp2",
    "dp2 fsdp2",
    "tp2",
    "tp2 sequence=split",
    "dp2 tp2",
    "fsdp2 tp2",
    "pp2",
    "pp4",
    "pp2 dp2",
    "pp2 fsdp2",
    "pp2 tp2",
    "cp2",
    "dp2 cp2",
    "fsdp2 cp2",
    "cp2 tp2",
    "dp2 fsdp2 tp2",
    "pp2 fsdp2 tp2",
)

# Of the types that were drawn and of libraries: one of each axis and two hybrids.
LAYOUTS_OF_DRAWN = (
    "dp2",
    "zero1x2",
    "fsdp2",
    "tp2",
    "tp2 sequence=split",
    "pp2",
    "cp2",
    "fsdp2 tp2",
    "pp2 dp2",
)


def impossible(stages: int, declared: dict[str, str], layout: str) -> str | None:
    """Why a model of so many stages, of which something is declared, can't have a layout; None where it can.

    `declared` goes from an axis to the reason: tp, pp, cp, or tokens for sequence=split.
    """
    parsed = Layout.parse(layout)
    axes = {
        "tp": parsed.tensor > 1,
        "pp": parsed.pipeline > 1,
        "cp": parsed.context > 1,
        "tokens": parsed.sequence == "split",
    }
    for axis, used in axes.items():
        if used and axis in declared:
            return declared[axis]
    if parsed.pipeline > stages:
        return f"its parts make {stages} stages, one behind the other"
    return None
