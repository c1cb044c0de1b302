"""Rules of pipelines: which rank holds which stage, how many micro-batches a step has, and what can't go together."""

from collections.abc import Mapping
from dataclasses import dataclass

from samestep.errors import LayoutError
from samestep.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a schedule asks for."""

    most_stages: int | None = None  # a rank; None: any number
    in_rounds: bool = False  # the micro-batches are a multiple of the pipeline ranks
    turns: bool = False  # the second half of the stages goes back over the ranks, like a V
    splits_backward: bool = False  # gradients of inputs first, those of weights when a rank would be idle


SCHEDULES: Mapping[str, Rules] = {
    "gpipe": Rules(most_stages=1),
    "1f1b": Rules(most_stages=1),
    "interleaved-1f1b": Rules(in_rounds=True),
    "interleaved-zero-bubble": Rules(in_rounds=True, splits_backward=True),
    "zbv-zero-bubble": Rules(most_stages=2, turns=True, splits_backward=True),
}


def owners(layout: Layout) -> list[int]:
    """The pipeline rank of each stage."""
    ranks = list(range(layout.pipeline))
    if SCHEDULES[layout.schedule].turns:
        return ranks + ranks[::-1]
    return ranks * layout.stages_a_rank


def micro_batches(layout: Layout, batch: int, micro_batch: int | None) -> int | None:
    """Into how many micro-batches every step is cut, the same on every rank; None: as the samples say.

    A pipeline's order of work is made for one number of them. Where a step has fewer samples, some are lent.
    """
    if layout.pipeline == 1:
        return None
    samples = -(-batch // layout.data_ranks)
    # With 2 p micro-batches, p - 1 of 3 p - 1 slots are idle: a third at most.
    wanted = -(-samples // micro_batch) if micro_batch else min(2 * layout.pipeline, samples)
    wanted = max(wanted, layout.pipeline)
    if SCHEDULES[layout.schedule].in_rounds:
        wanted = -(-wanted // layout.pipeline) * layout.pipeline
    return wanted


def check(layout: Layout, precision: str) -> None:
    """Raise LayoutError for what pipelines can't do. For layouts without one nothing is wrong."""
    if layout.pipeline == 1:
        return
    rules = SCHEDULES[layout.schedule]
    if rules.most_stages is not None and layout.stages_a_rank > rules.most_stages:
        fix = (
            "schedule=interleaved-1f1b would do"
            if rules.most_stages == 1
            else f"{rules.most_stages * layout.pipeline} stages over {layout.pipeline} ranks are what it is made for"
        )
        raise LayoutError(
            f'layout "{layout}": schedule {layout.schedule} runs {rules.most_stages} '
            f"stage{'s' if rules.most_stages > 1 else ''} a rank, not {layout.stages}; {fix}"
        )
    if precision == "fp16":
        # Whether a gradient overflowed is seen by the rank that holds that stage, and not by the others.
        raise LayoutError(f'layout "{layout}": recipe.precision is fp16, which pipelines do not have; bf16 would do')
    if layout.context > 1 or (layout.tensor > 1 and layout.sequence == "split"):
        what = "context parallel" if layout.context > 1 else "sequence=split"
        raise LayoutError(
            f'layout "{layout}": a stage learns how many tokens there are where they are split, at the first block, '
            f"so pipelines do not have {what} yet; fsdp2 cp2, or pp2 tp2, would do"
        )
    if rules.splits_backward:
        _check_split(layout)


def _check_split(layout: Layout) -> None:
    """A backward in two goes: what watches for the end of a backward sees the first go alone."""
    if layout.zero >= 2:
        raise LayoutError(
            f'layout "{layout}": schedule {layout.schedule} computes gradients of inputs and of weights apart, and '
            "shards of parameters would be put away in between; zero1, or schedule=1f1b, would do"
        )
    if layout.recompute != "none":
        raise LayoutError(
            f'layout "{layout}": schedule {layout.schedule} computes gradients of inputs and of weights apart, and '
            f"recompute={layout.recompute} would compute every block again for each; schedule=1f1b would do"
        )
