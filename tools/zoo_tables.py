"""The zoo's tables in docs/is-my-training-right.md, in both languages, between markers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from page_parts import markdown_table, write_parts

if TYPE_CHECKING:
    from zoo import Seen

# Where a fault stands, by its kind: the name of the group in both languages.
_GROUPS: Sequence[tuple[tuple[str, str], tuple[str, ...]]] = (
    (
        ("samples and resumption", "样本与恢复"),
        (
            "same-samples",
            "padded-sampler",
            "lost-samples",
            "repeated-samples",
            "same-order-each-epoch",
            "resume-repeats",
            "resume-skips",
            "resume-other-order",
            "optimizer-state-lost",
        ),
    ),
    (("weights and buffers", "权重与 buffer"), ("weights-not-broadcast", "buffers-differ", "equal-draws")),
    (
        ("gradients", "梯度"),
        (
            "summed",
            "divided-twice",
            "accumulation-divisor",
            "lost-micro-batches",
            "mean-of-means",
            "not-reduced",
            "parameter-not-reduced",
            "some-gradients-scaled",
            "local-batch-statistics",
            "gradients-differ",
        ),
    ),
    (
        ("clipping", "裁剪"),
        ("clip-before-reduction", "clip-local-norm", "clip-each-micro-batch", "not-clipped"),
    ),
    (
        ("learning rate and decay", "学习率与权重衰减"),
        ("schedule-steps", "learning-rate-scaled", "learning-rate-differs", "weight-decay"),
    ),
    (("evaluation", "评估"), ("evaluation-repeats", "evaluation-loses")),
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
    rows = [(name[language], [each for each in wrong if each.animal.kind in kinds]) for name, kinds in _GROUPS]
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
