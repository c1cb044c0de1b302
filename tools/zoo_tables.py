"""The zoo's tables in docs/is-my-training-right.md, in both languages, between markers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from page_parts import markdown_table, write_parts

if TYPE_CHECKING:
    from zoo import Seen

# Where a fault stands, by its kind: the name of the group in both languages.
GROUPS: Sequence[tuple[tuple[str, str], tuple[str, ...]]] = (
    (
        ("samples and resumption", "样本与恢复"),
        (
            *("same-samples", "padded-sampler", "lost-samples", "leftover-carried", "data-differs"),
            *("repeated-samples", "same-order-each-epoch", "resume-repeats", "resume-skips", "resume-other-order"),
            *("optimizer-state-lost", "optimizer-state-differs", "scaler-state-lost", "random-states-equal"),
            *("ends-early", "steps-differ"),
            *("step-skipped", "step-not-skipped"),
        ),
    ),
    (
        ("weights, buffers and draws", "权重、buffer 与随机数"),
        (
            *("weights-not-broadcast", "weights-not-sent", "weights-changed", "weights-averaged", "local-steps"),
            *(
                "other-initial-weights",
                "not-initialised",
                "other-dtype",
                "further-parameters",
                "ranks-differ",
                "weights-drift",
            ),
            *("buffers-differ", "buffer", "copies-differ", "copy-differs", "copy-not-updated", "copy-lost"),
            *("equal-draws", "own-draws"),
        ),
    ),
    (
        ("gradients", "梯度"),
        (
            *("summed", "divided-twice", "accumulation-divisor", "lost-micro-batches", "lost-targets"),
            *("mean-of-means", "loss-of-own-rows", "parts-weighted", "local-batch-statistics", "padding-matters"),
            *("not-reduced", "parameter-not-reduced", "missing-gradient", "reduced-otherwise", "zero-alone"),
            *("zero-split", "gradients-scaled", "some-gradients-scaled", "forward-differs", "backward-differs"),
            "gradients-differ",
        ),
    ),
    (
        ("clipping", "裁剪"),
        ("clip-before-reduction", "clip-local-norm", "clip-each-micro-batch", "not-clipped"),
    ),
    (
        ("learning rate, decay and update", "学习率、权重衰减与更新"),
        (
            *(
                "schedule-steps",
                "schedule-length",
                "learning-rate",
                "learning-rate-scaled",
                "learning-rate-differs",
                "settings-differ",
            ),
            *("weight-decay", "optimizer-setting", "other-group", "not-in-optimizer", "other-shape"),
            *("update-differs", "weights-differ", "scaler-differs"),
        ),
    ),
    (
        ("evaluation", "评估"),
        (
            *("evaluation-repeats", "evaluation-loses", "evaluation-joined", "evaluation-own-share"),
            *("evaluation-differs", "loss-differs"),
        ),
    ),
)
_RIGHT = ("right scripts", "正确的脚本")
_ALL = ("all faults", "全部错误")
_HEADS = (
    ("", "scripts", "found", "kind named right", "module named right", "the loss curve would show it"),
    ("", "脚本数", "找出", "类别正确", "模块正确", "损失曲线能看出"),
)
_COLUMNS = (
    ("script", "fault", "report", "found as", "where", "shown by the loss"),
    ("脚本", "错误（英文）", "报告", "判为", "位置", "损失可见"),
)
_YES = (("yes", "no"), ("是", "否"))


def write(root: Path, seen: Sequence["Seen"]) -> None:
    """Write the summary, and below it every fault."""
    for language, docs in enumerate(("docs", "docs/zh")):
        parts = {"zoo": summary(seen, language), "zoo-faults": faults(seen, language)}
        write_parts(root / docs / "is-my-training-right.md", parts)


def summary(seen: Sequence["Seen"], language: int) -> str:
    """A row for each group of faults, and one for the right scripts."""
    wrong = [each for each in seen if not each.animal.right]
    rows = [(name[language], [each for each in wrong if each.animal.kind in kinds]) for name, kinds in GROUPS]
    lines: list[Sequence[str]] = []
    for name, group in (*rows, (_ALL[language], wrong)):
        placed = [each for each in group if each.animal.module is not None]
        lines.append(
            [
                name,
                str(len(group)),
                str(sum(each.found for each in group)),
                str(sum(each.kind_right for each in group)),
                f"{sum(each.found and each.module_right for each in placed)} / {len(placed)}" if placed else "",
                str(sum(each.shown is True for each in group)),
            ]
        )
    right = [each for each in seen if each.animal.right]
    alarms = sum(each.found or each.refused is not None for each in right)
    lines.append([_RIGHT[language], str(len(right)), str(alarms), "", "", ""])
    return markdown_table(_HEADS[language], lines)


def faults(seen: Sequence["Seen"], language: int) -> str:
    """A row for each fault."""
    lines: list[Sequence[str]] = []
    for each in seen:
        if each.animal.right:
            continue
        found = f"`{each.kind}`" if each.kind is not None else "-"
        loss = "" if each.shown is None else _YES[language][not each.shown]
        name = each.animal.name.removeprefix("fault_")
        module = f"`{each.module}`" if each.module else ""
        lines.append([f"`{name}`", each.animal.title, each.animal.report or "", found, module, loss])
    return markdown_table(_COLUMNS[language], lines, align="l")
