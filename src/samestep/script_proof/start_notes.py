"""Notes of a verdict on how its runs were started and ended: what the script got otherwise, and what wasn't seen."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from samestep.display.page import Words
from samestep.recording.record import RunRecord
from samestep.recording.store import events
from samestep.script_proof import tiny
from samestep.script_proof.children import LAUNCHER
from samestep.script_proof.settings import FEWER_DEVICES, SETTINGS, RecordSettings

_PLACES_SHOWN = 4


def start_notes(alone: Path, split: Path) -> Iterator[Words]:
    """The notes on a run alone and a split run, by their folders."""
    yield from _own_ranks(alone, split)
    if (alone.parent / FEWER_DEVICES).is_dir():
        yield _FEWER_DEVICES
    yield from _copies((alone, split))
    yield from _turned((split, alone))
    yield from _shrunk((split, alone))


_FEWER_DEVICES = Words(
    "alone the script failed with as many accelerators as the split run has, and was told of one for each of its "
    "ranks",
    "单独运行时，如果加速器和切分运行一样多，脚本会失败；因此告诉它每个 rank 只有一个",
)


def group_note(split: Path, kind: str | None) -> Iterator[Words]:
    """Why ranks may train as if each were alone: none has joined a process group."""
    ranks = sorted(split.glob("rank-*/"))
    joined = any(event["event"] == "joined" for rank in ranks for event in events(rank))
    if kind in _OF_LONE_RANKS and len(ranks) > 1 and not joined:
        yield Words(
            "no rank has joined a process group, so none knew of the others; without accelerators Accelerate "
            'joins one with the variable ACCELERATE_USE_CPU, as in --script "ACCELERATE_USE_CPU=true train.py"',
            "没有 rank 加入进程组，因此互不知道对方；没有加速器时，Accelerate 要有变量 ACCELERATE_USE_CPU 才会加入，"
            '例如 --script "ACCELERATE_USE_CPU=true train.py"',
        )


_OF_LONE_RANKS = frozenset({"same-samples", "repeated-samples", "not-reduced", "weights-not-broadcast"})


def _own_ranks(alone: Path, split: Path) -> Iterator[Words]:
    """A script that starts its ranks itself: how many, and how there came to be one alone."""
    if not (split / LAUNCHER).is_dir():
        return
    ranks = len(list(split.glob("rank-*/")))
    yield Words(
        "the script starts its ranks itself: {ranks} in the split run",
        "脚本自己启动 rank：切分运行中有 {ranks} 个",
    ).format(ranks=ranks)
    fewer = [
        event
        for place in (alone / LAUNCHER, alone / "rank-0")
        for event in events(place)
        if event["event"] == "fewer"
    ]
    if not fewer:
        return
    words = _ARGUMENT if any(event["argument"] for event in fewer) else _NO_ARGUMENT
    yield words.format(given=fewer[0]["given"], ranks=fewer[0]["ranks"])


_ARGUMENT = Words(
    "alone it would have started {given} as well: {ranks} was started, and the argument of its function that is "
    "{given} was {ranks}",
    "单独运行时它同样会启动 {given} 个：只启动了 {ranks} 个，其函数中值为 {given} 的参数改成了 {ranks}",
)
_NO_ARGUMENT = Words(
    "alone it would have started {given} as well: its process group was made of {ranks}; a number of ranks that it "
    "has from elsewhere is still {given}, and --alone can name arguments for {ranks}",
    "单独运行时它同样会启动 {given} 个：其进程组只有 {ranks} 个；它从别处得到的 rank 数仍是 {given}，可以用 --alone "
    "给出 {ranks} 个的参数",
)


def _copies(places: Sequence[Path]) -> Iterator[Words]:
    """DataParallel without accelerators is the module alone."""
    copies = [event["place"] for place in places for event in events(place / "rank-0") if event["event"] == "copies"]
    if copies:
        yield Words(
            "DataParallel ({where}) splits a batch over accelerators; without them it calls the module with the "
            "whole batch, so nothing of it was compared",
            "DataParallel（{where}）把批切分到多个加速器；没有加速器时它用整个批调用模块，因此没有比较到它",
        ).format(where=copies[0])


def _turned(places: Sequence[Path]) -> Iterator[Words]:
    """What named an accelerator, with the lines that did."""
    on = _settings(places[0]).on
    if on is None:
        return
    lines: dict[str, dict[str, None]] = {}
    for event in (one for place in places for one in events(place / "rank-0") if one["event"] == "turned"):
        lines.setdefault(event["what"], {})[event["place"]] = None
    if lines:
        yield Words(
            "--on {on} changed what the script names of an accelerator: {what}",
            "--on {on} 改变了脚本中指定加速器的地方：{what}",
        ).format(on=on, what="; ".join(f"{what} ({_shown(list(places_of))})" for what, places_of in lines.items()))
    else:
        yield Words(
            "--on {on} changed nothing: the script named no accelerator in what was run",
            "--on {on} 没有改变任何东西：运行到的部分没有指定加速器",
        ).format(on=on)


def _shrunk(places: Sequence[Path]) -> Iterator[Words]:
    """The models that were made smaller."""
    if not _settings(places[0]).tiny:
        return
    sizes = {
        f"{event['config']} {event['key']} {event['layers']}": None
        for place in places
        for event in events(place / "rank-0")
        if event["event"] == "shrunk"
    }
    if sizes:
        yield Words(
            "--tiny made models of transformers with {layers} layers, instead of: {what}",
            "--tiny 让 transformers 的模型只有 {layers} 层，原来是：{what}",
        ).format(layers=tiny.LAYERS, what=", ".join(sizes))
    else:
        yield Words(
            "--tiny changed nothing: no model of transformers with more than {layers} layers was made",
            "--tiny 没有改变任何东西：没有建出多于 {layers} 层的 transformers 模型",
        ).format(layers=tiny.LAYERS)


def _settings(place: Path) -> RecordSettings:
    file = place / SETTINGS
    return RecordSettings.read(file) if file.is_file() else RecordSettings(folder="", steps=None)


def _shown(places: Sequence[str]) -> str:
    return ", ".join(places[:_PLACES_SHOWN]) + (", ..." if len(places) > _PLACES_SHOWN else "")


def no_evaluation(split: RunRecord) -> Words:
    """That none was seen; where the proof stopped the script, with the steps by which it may see one."""
    end = split.ranks[0].end.get("how")
    passed = _steps_of_a_pass(split)
    if end != "stopped" or passed is None:
        return Words("no evaluation was seen", "没有看到评估")
    return Words(
        "no evaluation was seen before the script was stopped, after {steps} steps; one pass over its samples has "
        "{passed}: --steps {more} sees an evaluation that follows it",
        "脚本在 {steps} 步后被停下，此前没有看到评估；遍历一次样本需要 {passed} 步：--steps {more} 能看到随后的评估",
    ).format(steps=split.steps, passed=passed, more=passed + 1)


def _steps_of_a_pass(split: RunRecord) -> int | None:
    """Steps of a pass over the data set of the DataLoader that was trained on, if the proof stopped within one."""
    folder = split.ranks[0].steps[0].folder if split.steps else None
    recorded = list(events(folder)) if folder is not None else []
    trained = {event["iteration"] for event in recorded if event["event"] == "iteration trains"}
    size = next((event["size"] for event in recorded if event.get("iteration") in trained and "size" in event), None)
    rows = sum(forward["batch"] or 0 for step in (split.step(0) if split.steps else ()) for forward in step.forwards)
    passed = -(-size // rows) if size and rows else 0
    return passed if passed >= split.steps else None


def not_compared(folder: Path, split: RunRecord) -> list[Words]:
    """What a proof that found the same step says nothing about."""
    settings = _settings(folder)
    ranks = split.ranks
    stopped = any(rank.end.get("how") == "stopped" for rank in ranks)
    missing = [
        (stopped, Words("steps after {steps}", "第 {steps} 步之后的步骤")),
        (settings.every > 1, Words("tensors between each {every} steps", "每 {every} 步之间的张量")),
        (settings.modules is not None, Words("parameters other than {modules}", "{modules} 以外的参数")),
        (not any(rank.evaluations for rank in ranks), Words("an evaluation", "评估")),
        (not any(rank.loaded for rank in ranks), Words("a resumption", "恢复训练")),
        (_drops(split) and not settings.dropout, Words("dropout", "dropout")),
        (settings.tiny, Words("layers that --tiny left out", "--tiny 略去的层")),
        (settings.on is not None, Words("the accelerator's own arithmetic", "加速器自己的运算")),
    ]
    facts = {"steps": split.steps, "every": settings.every, "modules": settings.modules}
    return [words.format(**facts) for applies, words in missing if applies]


def _drops(split: RunRecord) -> bool:
    return split.steps > 0 and any(step.values["dropout"] for step in split.step(0))
