"""The pages docs/models.md and docs/zh/models.md, and what is printed at the end of a run."""

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from page_parts import markdown_table, write_parts

from model_table import libraries, result, second_look, shares
from model_table.drawing import drawn, population
from model_table.entry import Half
from model_table.result import Result, Verdict
from model_table.second_look import MARK

ROOT = Path(__file__).resolve().parent.parent.parent
TWIN = ROOT / "docs" / "models.json"  # each pair's verdict, difference, seconds and reason
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
_SHARES = {
    "en": (
        "**{value} %** of possible pairs of drawn types take the same step\n"
        "(95 % interval {low} to {high} %, of types),\n"
        "weighted by how many of the {population} types of these kinds each stands for. For {whole} of {count}\n"
        "types every possible pair does ({types_low} to {types_high} % of types). Handing over and the contract\n"
        "took {median} s in the median, {most} s at most, on shared cores. {missing} of {drawn} could not be made."
    ),
    "zh": (
        "抽出的类型中，可能的组合有 **{value} %** 走出相同的一步（按类型的 95 % 区间：{low} 至 {high} %），"
        "按每个类型在其种类中所代表的类型数（共 {population} 种）加权。"
        "{count} 种类型中有 {whole} 种所有可能的组合都如此（占类型的 {types_low} 至 {types_high} %）。\n"
        "交出模型和检查契约的时间：中位数 {median} 秒，最多 {most} 秒（与其他任务共用的核）。\n"
        "{drawn} 种类型中有 {missing} 种无法建得很小。"
    ),
}
_UNMEASURED = {
    "en": "Drawn and not measured yet, so that the share says nothing of their kinds ({strata}): {types}.",
    "zh": "已抽出而尚未测量，因此这个比例与它们的种类（{strata}）无关：{types}。",
}
_OF_LIBRARIES = {
    "en": (
        "Of {all} models of libraries {count} are measured. {same} of {possible} possible pairs take the same step\n"
        "({value} %). For {whole} of them every measured pair does (95 % interval {low} to {high} % of models)."
    ),
    "zh": (
        "{all} 个库模型中已测量 {count} 个。{possible} 个可能的组合中有 {same} 个走出相同的一步"
        "（{value} %）。其中 {whole} 个模型测量过的组合全部如此（占模型的 95 % 区间：{low} 至 {high} %）。"
    ),
}
_NOT_MADE = {"en": ("type", "kind", "why not"), "zh": ("类型", "种类", "为何不能")}
_LOOKED = {
    "en": ("pairs", "reason", "models", "without the cause"),
    "zh": ("组合数", "原因", "模型", "去掉原因之后"),
}
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
    """Put the tables of those halves that were measured between the markers of both pages, and keep the twin."""
    known = {each.pair: each for each in results}
    plain = second_look.settled([each for each in results if MARK not in each.model], known)
    for language, file in PAGES.items():
        write_parts(file, _parts(plain, known, language))
    result.write(TWIN, results)


def _parts(results: Sequence[Result], known: Mapping[tuple[str, str], Result], language: str) -> Mapping[str, str]:
    chosen, random, library = ([each for each in results if each.half == half] for half in get_args(Half))
    parts: dict[str, str] = {}
    if chosen:
        made = (make(chosen, language) for make in (_rate, table, misses, impossible))
        parts |= {f"part {number}": part for number, part in enumerate(made, 1)}
    if random:
        parts |= {"drawn shares": share_of_drawn(random, language), "drawn table": table(_made(random), language)}
        parts |= {"drawn misses": looked_at(random, known, language), "drawn not made": not_made(random, language)}
        parts["drawn impossible"] = impossible(_made(random), language)
    if library:
        parts |= {"library share": _share_of_libraries(library, language), "library table": table(library, language)}
        parts["library misses"] = looked_at(library, known, language)
    return parts


def _made(results: Sequence[Result]) -> Sequence[Result]:
    return [each for each in results if each.verdict != "not made"]


def share_of_drawn(results: Sequence[Result], language: str) -> str:
    """The share of all types that the drawn ones speak for."""
    measured = {each.model for each in results}
    strata = {each.stratum for each in drawn() if each.type in measured}
    of_draw = {
        stratum: len(kinds) / sum(each.type in measured for each in kinds)
        for stratum in strata
        if (kinds := [each for each in drawn() if each.stratum == stratum])
    }
    share = shares.of_pairs(results, of_draw=of_draw)
    whole, count, of_types = shares.of_types(results)
    seconds = [group[0].prepared for group in shares.by_model(results).values() if group[0].prepared]
    text = _SHARES[language].format(
        **_percent(share),
        population=sum(len(types) for stratum, types in population().items() if stratum in strata),
        whole=whole,
        count=count,
        types_low=_percent(of_types)["low"],
        types_high=_percent(of_types)["high"],
        median=round(statistics.median(seconds), 1),
        most=round(max(seconds), 1),
        missing=len({each.model for each in results if each.verdict == "not made"}),
        drawn=len({each.model for each in results}),
    )
    left = ", ".join(each.type for each in drawn() if each.type not in measured)
    missing = ", ".join(stratum for stratum in population() if stratum not in strata) or "–"
    unmeasured = _UNMEASURED[language].format(types=left, strata=missing)
    return f"{text}\n\n{unmeasured}" if left else text


def _share_of_libraries(results: Sequence[Result], language: str) -> str:
    same, possible = result.rate(results)
    whole, count, of_models = shares.of_types(results)
    bounds = {name: value for name, value in _percent(of_models).items() if name != "value"}
    numbers = {"same": same, "possible": possible, "whole": whole, "count": count, "all": len(libraries.entries())}
    return _OF_LIBRARIES[language].format(**numbers, value=f"{100 * same / possible:.1f}", **bounds)


def _percent(share: shares.Share) -> Mapping[str, str]:
    return {name: f"{100 * value:.1f}" for name, value in vars(share).items()}


def looked_at(results: Sequence[Result], known: Mapping[tuple[str, str], Result], language: str) -> str:
    """What does not work though it could, by its reason, and what came of a second look."""
    lines: list[Sequence[str]] = []
    for _, group in result.misses_by_reason(results):
        looks = dict.fromkeys(second_look.verdict(each, known) for each in group)
        models = ", ".join(dict.fromkeys(each.model for each in group))
        lines.append([str(len(group)), _reason(group[0]), models, ", ".join(looks)])
    return markdown_table(_LOOKED[language], lines, align="rl")


def not_made(results: Sequence[Result], language: str) -> str:
    """Types that could not be built tiny or for which no rows could be made."""
    known = {each.model: each for each in results if each.verdict == "not made"}
    lines = [[each.model, each.kind, _escaped(each.reason)] for each in known.values()]
    return markdown_table(_NOT_MADE[language], lines, align="l")


def _reason(of: Result) -> str:
    return f"{_SIGNS[of.verdict]} {_escaped(of.reason)}"


def _escaped(reason: str) -> str:
    """A reason as a cell of a table, without the places of installed packages."""
    text = re.sub(r"/\S*/site-packages/", "", reason)[:300]
    return text.replace("|", "\\|").replace("<", "&lt;")


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
        lines.append([str(len(group)), _reason(group[0]), ", ".join(dict.fromkeys(each.model for each in group))])
    return markdown_table(_MISSES[language], lines, align="rl")


def impossible(results: Sequence[Result], language: str) -> str:
    """The pairs that no layout could make, with their reasons."""
    groups: dict[tuple[str, str], list[str]] = {}
    for each in results:
        if not each.possible and not each.miss:
            groups.setdefault((each.model, each.impossible or ""), []).append(f"`{each.layout}`")
    lines = [[model, ", ".join(which), why] for (model, why), which in groups.items()]
    return markdown_table(_REASONS[language], lines, align="l")
