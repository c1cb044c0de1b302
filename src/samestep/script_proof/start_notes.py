"""Notes of a verdict on how its runs were started: what the script asked for and got otherwise."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from samestep.display.page import Words
from samestep.recording.store import events
from samestep.script_proof.settings import SETTINGS, RecordSettings

_PLACES_SHOWN = 4


def start_notes(alone: Path, split: Path) -> Iterator[Words]:
    """The notes on a run alone and a split run, by their folders."""
    yield from _turned((split, alone))


def _turned(places: Sequence[Path]) -> Iterator[Words]:
    """What named an accelerator, with the lines that did."""
    on = RecordSettings.read(places[0] / SETTINGS).on if (places[0] / SETTINGS).is_file() else None
    if on is None:
        return
    lines: dict[str, dict[str, None]] = {}
    for event in (each for place in places for each in events(place / "rank-0") if each["event"] == "turned"):
        lines.setdefault(event["what"], {})[event["place"]] = None
    if lines:
        yield Words(
            "--on {on} changed what the script names of an accelerator: {what}",
            "--on {on} 改变了脚本中指定加速器的地方：{what}",
        ).format(on=on, what="; ".join(f"{what} ({_shown(list(found))})" for what, found in lines.items()))
    else:
        yield Words(
            "--on {on} changed nothing: the script named no accelerator in what was run",
            "--on {on} 没有改变任何东西：运行到的部分没有指定加速器",
        ).format(on=on)


def _shown(places: Sequence[str]) -> str:
    return ", ".join(places[:_PLACES_SHOWN]) + (", ..." if len(places) > _PLACES_SHOWN else "")
