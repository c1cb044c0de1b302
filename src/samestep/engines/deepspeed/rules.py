"""Rules of DeepSpeed: which layouts, and which parts of a job or a ds_config.json, do not go together."""

from collections.abc import Sequence
from dataclasses import replace

from samestep.engines.deepspeed.config import Config
from samestep.errors import LayoutError, UserError
from samestep.layout import Layout


def check_layout(layout: Layout, stage: int | None) -> None:
    """Refuse what DeepSpeed's ZeRO stages don't have."""
    stage = layout.zero if stage is None else stage
    if layout.pipeline > 1 and stage > 1:
        ranks = layout.data_ranks
        fix = f"pp{layout.pipeline} zero1x{ranks}" if ranks > 1 else f"pp{layout.pipeline} zero1x2"
        raise LayoutError(
            f'layout "{layout}": DeepSpeed\'s pipeline goes with ZeRO 1 alone, which shards no gradients; '
            f'"{fix}" would do'
        )
    if layout.replicate > 1 and layout.shard > 1:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed shards over all ranks; '
            f'"{replace(layout, replicate=1, shard=layout.data_ranks)}" would do'
        )
    if layout.offloads("optimizer-disk") and stage != 3:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed offloads to disk at ZeRO 3 alone; fsdp2 offload=optimizer-disk would do'
        )
    if layout.offloads("optimizer") and stage == 0:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed offloads the optimizer from ZeRO 1 on; zero1x2 offload=optimizer would do'
        )
    if layout.offloads("parameters") and stage != 3:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed offloads parameters at ZeRO 3 alone; fsdp2 offload=parameters would do'
        )


def check_pipeline(layout: Layout, precision: str) -> None:
    """Refuse what DeepSpeed's pipeline doesn't have."""
    if layout.schedule != "1f1b" or layout.stages > 1:
        raise LayoutError(
            f'layout "{layout}": DeepSpeed\'s pipeline has one schedule, 1f1b, of one stage a rank; '
            f'"{replace(layout, schedule="1f1b", stages=1)}" would do, or engine native'
        )
    if layout.balance != "speed":
        raise LayoutError(
            f'layout "{layout}": DeepSpeed\'s pipeline cuts by the number of parameters alone; '
            f'"{replace(layout, balance="speed")}" would do, or engine native'
        )
    if layout.offload != "none":
        raise LayoutError(
            f'layout "{layout}": engine deepspeed has no offload in a pipeline; '
            f'"{replace(layout, offload="none")}" would do'
        )
    if precision != "fp32":
        raise UserError(
            f'layout "{layout}": recipe.precision is {precision}, in which DeepSpeed\'s pipeline has an optimizer '
            "with gradients that can't be weighed by a count that is known after backward; fp32 would do"
        )


def check_pipeline_asked(given: Config, cut_at: Sequence[str]) -> None:
    """Refuse what a job or a configuration can say of pipelines and can't have here."""
    if cut_at:
        raise UserError(
            "run.cut_at names pipeline stages, and engine deepspeed cuts by the number of parameters; no cut_at "
            "would do, or engine native"
        )
    section = given.get("pipeline")
    if isinstance(section, dict) and section.get("activation_checkpoint_interval"):
        raise UserError(
            "the DeepSpeed configuration has pipeline.activation_checkpoint_interval "
            f"{section['activation_checkpoint_interval']}: DeepSpeed would compute layers again with other dropout; "
            "0 would do, or engine native, with recompute=full"
        )
