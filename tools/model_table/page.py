"""The pages docs/models.md and docs/zh/models.md, and what is printed at the end of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from page_parts import markdown_table, write_parts

from model_table import result
from model_table.result import Result, Verdict

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = {"en": ROOT / "docs" / "models.md", "zh": ROOT / "docs" / "zh" / "models.md"}
_SIGNS: Mapping[Verdict, str] = {
    "same step": "✓",
    "refused": "–",
    "NOT the same step": "**≠**",
    "crash": "**!**",
    "time limit": "**∞**",
    "not made": "?",
}
_IMPOSSIBLE = " "
_HEADS = {"en": ("model", "kind", "works"), "zh": ("模型", "种类", "可用")}
_MISSES = {"en": ("pairs", "reason", "models"), "zh": ("组合数", "原因", "模型")}
_REASONS = {"en": ("model", "layouts", "why none can exist"), "zh": ("模型", "布局", "为何不可能存在")}
_RATE = {
    "en": "{same} of {possible} possible pairs take the same step ({share:.1f} %), of {all} pairs in all.",
    "zh": "{possible} 个可能的组合中有 {same} 个走出相同的一步（{share:.1f} %）；全部组合共 {all} 个。",
}


def summary(results: Sequence[Result]) -> str:
    """Counts by verdict, the rate, and misses by reason."""
    lines = [", ".join(f"{name}: {count}" for name, count in sorted(result.counts(results).items()))]
    lines.append(_rate(results, "en"))
    for reason, group in result.misses_by_reason(results):
        models = ", ".join(dict.fromkeys(each.model for each in group))
        lines.append(f"{len(group):4d}  {reason}\n      {models}")
    return "\n".join(lines)


def write(results: Sequence[Result]) -> None:
    """Put the tables between the markers of both pages."""
    for language, file in PAGES.items():
        parts = (make(results, language) for make in (_rate, table, misses, impossible))
        write_parts(file, {f"part {number}": part for number, part in enumerate(parts, 1)})


def _rate(results: Sequence[Result], language: str) -> str:
    same, possible = result.rate(results)
    share = 100 * same / max(1, possible)
    return _RATE[language].format(same=same, possible=possible, share=share, all=len(results))


def table(results: Sequence[Result], language: str) -> str:
    """A line a model, a column a layout."""
    layouts = list(dict.fromkeys(each.layout for each in results))
    heads = [*_HEADS[language], *(f"`{layout}`" for layout in layouts)]
    lines: list[Sequence[str]] = []
    for model in dict.fromkeys(each.model for each in results):
        mine = {each.layout: each for each in results if each.model == model}
        same, possible = result.rate(list(mine.values()))
        signs = [_sign(mine.get(layout)) for layout in layouts]
        lines.append([model, next(iter(mine.values())).kind, f"{same}/{possible}", *signs])
    return markdown_table(heads, lines, align="llrc")


def _sign(found: Result | None) -> str:
    if found is None:
        return "?"
    return _SIGNS[found.verdict] if found.possible or found.miss else _IMPOSSIBLE


def misses(results: Sequence[Result], language: str) -> str:
    """What does not work though it could, by its reason."""
    lines: list[Sequence[str]] = []
    for _, group in result.misses_by_reason(results):
        reason = f"{_SIGNS[group[0].verdict]} {group[0].reason[:300]}".replace("|", "\\|").replace("<", "&lt;")
        lines.append([str(len(group)), reason, ", ".join(dict.fromkeys(each.model for each in group))])
    return markdown_table(_MISSES[language], lines, align="rl")


def impossible(results: Sequence[Result], language: str) -> str:
    """The pairs that no layout could make, with their reasons."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in results:
        if not each.possible and not each.miss:
            groups.setdefault((each.model, each.impossible or ""), []).append(f"`{each.layout}`")
    lines = [[model, ", ".join(which), why] for (model, why), which in groups.items()]
    return markdown_table(_REASONS[language], lines, align="l")
