"""Every alteration of a checkpoint is noticed: `verify` names it, and a resume takes the checkpoint before it."""

import errno
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from small_tasks import Unscored
from unsafe import rewrite_info

import samestep
from samestep import CheckpointError
from samestep.checkpoint import info
from samestep.checkpoint.info import Info, read_info
from samestep.checkpoint.inspect import verify
from samestep.checkpoint.load import open_newest
from samestep.cli.main import main
from samestep.comm.mesh import new_group
from samestep.launch.world import join

Alteration = Callable[[Path], Any]  # of a checkpoint's folder

OLDER, NEWEST = 2, 3


def train(folder: Path, **checkpoint: Any) -> samestep.TrainResult:
    recipe = samestep.Recipe(task=Unscored(samples=20), batch=10, steps=NEWEST)
    return samestep.train(recipe, folder=folder, threads=1, check=False, log=(), checkpoint=checkpoint)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after two and three steps."""
    return train(tmp_path_factory.mktemp("altered") / "run", every=OLDER).folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


# -- what is done to a file


def flipped(file: Path, at: int | None = None) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def emptied(file: Path) -> None:
    os.truncate(file, 0)


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def linked(file: Path) -> None:
    """A symbolic link to the same bytes."""
    elsewhere = file.rename(file.parent.parent / f"elsewhere-{file.name}")
    file.symlink_to(elsewhere)


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def foldered(file: Path) -> None:
    file.unlink()
    file.mkdir()


def of_the_older(file: Path) -> None:
    shutil.copy(file.parent.with_name(f"step-{OLDER}") / file.name, file)


FILES = ("__0_0.distcp", ".metadata", "checkpoint.json")
OF_FILES = (flipped, cut, emptied, longer, linked, piped, foldered, Path.unlink, of_the_older)


def on(file: str, alter: Callable[[Path], Any]) -> Alteration:
    return lambda folder: alter(folder / file)


# -- what is done to the text of checkpoint.json, by one who makes no sum of it


def replaced(old: str, new: str) -> Alteration:
    def alter(folder: Path) -> None:
        file = folder / "checkpoint.json"
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new, 1), encoding="utf-8")

    return alter


def without_sum(folder: Path) -> None:
    file = folder / "checkpoint.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    del values["sum"]
    file.write_text(json.dumps(values), encoding="utf-8")


def in_bytes(content: bytes) -> Alteration:
    return lambda folder: (folder / "checkpoint.json").write_bytes(content)


TEXTS: dict[str, Alteration] = {
    "one bit of the step": replaced('"step": 3', '"step": 2'),
    "one space more": replaced('"step": 3', '"step":  3'),
    "the format of before": replaced('"format": 2', '"format": 1'),
    "another format": replaced('"format": 2', '"format": 3'),
    "no sum": without_sum,
    "a key twice": replaced('"step": 3,', '"step": 3, "step": 3,'),
    "not UTF-8": in_bytes(b'{"format": 2, "step": "\xff"}'),
    "a list": in_bytes(b"[]"),
    "null": in_bytes(b"null"),
    "nested without end": in_bytes(b"[" * 100_000),
    "a number without end": in_bytes(b'{"format": 2, "step": ' + b"9" * 100_000 + b"}"),
    "nothing but zeros": in_bytes(bytes(1000)),
}


# -- what is done to its values, by one who makes the sum fit


def valued(key: str, value: Any) -> Alteration:
    """A value in the place of another; `key`: a section, or section/name."""

    def change(values: dict[str, Any]) -> None:
        section, _, name = key.partition("/")
        if name:
            values[section][name] = value
        else:
            values[section] = value

    return lambda folder: rewrite_info(folder, change)


def dropped(key: str) -> Alteration:
    return lambda folder: rewrite_info(folder, lambda values: values.pop(key))


HALF = "\ud800"  # of a surrogate pair
NESTED: Any = []
for _ in range(300):
    NESTED = [NESTED]

VALUES: dict[str, tuple[Any, ...]] = {
    "step": ("3", 3.0, True, None, -1, 10**30, [3], float("nan"), 2),
    "epoch": ("1", -1, 0.5, {}),
    "layout": (None, 3, ["single"]),
    "processes": ("1", -1, 10**9, None),
    "engine": (None, {}),
    "recipe": (None, [], "steps", {"args": NESTED}),
    "scaler": (None, [], {"scale": "2"}, {"scale": None}),
    "metrics": ([], {"accuracy": "0.5"}, {"accuracy": [0.5]}),
    "extra": (None, []),
    "identity": ([], {}, {"train": {"samples": -1}}, {"train": {"samples": 1}, "code": {"a.py": 1}}),
    "base": ([], {}, {"left_out": "all", "fingerprint": "", "adapter": {}, "adapter_name": ""}),
    "tied": (None, {"head": 3}),
    "versions": ([], {"torch": None}),
    "saved_at": (3, None),
    "files": ({}, [], None, {".metadata": 3}, {".metadata": {"bytes": 1}}),
    "files/.metadata": ({"bytes": -1, "sha256": "0" * 64}, {"bytes": 1, "sha256": "x"}),
    "files/__0_0.distcp": ({"bytes": "1", "sha256": "0" * 64}, None),
    "files/../step-2/.metadata": ({"bytes": 1, "sha256": "0" * 64},),
    "something_else": (1,),
}


# -- what is done to the folder


def another_data_file(folder: Path) -> None:
    shutil.copy(folder / "__0_0.distcp", folder / "__7_0.distcp")


def index_without_a_sum(folder: Path) -> None:
    """The index says that tensors are in a file of which there is no sum."""
    file = folder / ".metadata"
    index = pickle.loads(file.read_bytes())
    for stored in index.storage_data.values():
        stored.relative_path = "weights.bin"
    file.write_bytes(pickle.dumps(index))
    (folder / "__0_0.distcp").rename(folder / "weights.bin")


def renamed(folder: Path) -> None:
    """The older checkpoint under the newest one's name."""
    shutil.rmtree(folder)
    shutil.copytree(folder.with_name(f"step-{OLDER}"), folder)


def in_its_place(folder: Path) -> None:
    """A file in the place of the folder."""
    shutil.rmtree(folder)
    folder.write_text("step 3", encoding="utf-8")


FOLDERS: dict[str, Alteration] = {
    "another data file": another_data_file,
    "an index of a file without a sum": index_without_a_sum,
    "another's name": renamed,
    "a file": in_its_place,
}

ALTERATIONS: dict[str, Alteration] = {
    **{f"{name} {alter.__name__}": on(name, alter) for name in FILES for alter in OF_FILES},
    **TEXTS,
    **{f"{key} {str(value)[:20]}": valued(key, value) for key, values in VALUES.items() for value in values},
    **{f"no {key}": dropped(key) for key in ("format", *VALUES) if "/" not in key and key != "something_else"},
    **FOLDERS,
}


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """The group of one rank, in which a resume opens checkpoints."""
    with join(alone=True, threads=1) as world:
        yield new_group(range(world.world_size), backend="gloo")


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS)
def test_an_alteration_is_noticed(run: Path, alter: Alteration, tmp_path: Path, group: dist.ProcessGroup) -> None:
    folder = run / "checkpoints" / f"step-{NEWEST}"
    alter(folder)
    file = tmp_path / "found.json"
    assert main(["checkpoint", "verify", str(run), "--json", str(file)]) == 1
    faults = {Path(each["path"]).name: each["fault"] for each in json.loads(file.read_text(encoding="utf-8"))}
    assert faults[f"step-{OLDER}"] is None
    fault = faults[folder.name]
    assert str(folder) in fault
    assert "\n" not in fault
    assert len(fault) < 600
    told: list[str] = []
    opened = open_newest((run,), group, told.append)
    assert opened is not None
    assert opened.info.step == OLDER
    assert len(told) == 1
    assert str(folder) in told[0]


TRIED = ("__0_0.distcp flipped", ".metadata piped", "checkpoint.json foldered", "one bit of the step", "files {}")


@pytest.mark.parametrize("name", TRIED)
def test_a_training_goes_on_from_the_one_before(run: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints" / f"step-{NEWEST}"
    ALTERATIONS[name](folder)
    assert train(run, resume="auto").first_step == OLDER
    assert f"{folder}" in capfd.readouterr().err
    assert main(["checkpoint", "verify", str(run)]) == 0  # the step was taken and saved again


COMMANDS = (["inspect"], ["convert", "--to", "safetensors"], ["export", "--to", "state-dict"])


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("name", ["checkpoint.json piped", "step -1", "recipe []", "nested without end", "no files"])
def test_other_commands_say_what_is_wrong_in_a_sentence(
    run: Path, tmp_path: Path, name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints" / f"step-{NEWEST}"
    ALTERATIONS[name](folder)
    command, *options = words
    assert main(["checkpoint", command, str(folder), *([str(tmp_path / "target")] if options else []), *options]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert str(folder) in told


def test_a_file_that_may_not_be_read_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run / "checkpoints" / f"step-{NEWEST}"
    opened = os.open

    def refused(path: Any, *arguments: Any, **keywords: Any) -> int:
        if Path(os.fspath(path)) == folder / "__0_0.distcp":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **keywords)

    monkeypatch.setattr(os, "open", refused)
    found = verify(folder)
    assert found.fault == f"{folder / '__0_0.distcp'} can't be read: Permission denied"


def of_before(folder: Path) -> None:
    """As samestep 0.1 wrote it: format 1, without a sum of itself."""
    file = folder / "checkpoint.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    del values["sum"], values["identity"]
    file.write_text(json.dumps({**values, "format": 1}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def test_a_checkpoint_of_before_is_read_and_verify_says_what_it_lacks(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints" / f"step-{NEWEST}"
    of_before(folder)
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert f"{folder}: whole; its checkpoint.json is of an earlier version" in capsys.readouterr().out
    assert train(run, resume="auto").first_step == NEWEST
    replaced('"step": 3', '"step": 2')(folder)
    with pytest.raises(CheckpointError, match="it says step 2, and its folder is called step-3"):
        read_info(folder)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"nested": NESTED}, "nested more than 200 deep; save flatter values as extra"),
        ({"text": "x" * 3000}, "extra"),
    ],
)
def test_what_could_not_be_read_again_is_not_saved(extra: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_MOST_BYTES", 2000)
    with pytest.raises(CheckpointError, match=said):
        Info(step=1, epoch=None, layout="", processes=1, engine="", recipe={}, extra=extra).to_json()


# -- values of a recipe, of which each version has its own

ODD: tuple[Any, ...] = (None, [], {}, {"a": {"b": 1}}, 10**40, -1, 0.5, float("nan"), "", "\x1b[31m" + "x" * 10**5)


def places_of(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places_of(value, (*path, key))


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 300))]
)
def test_a_recipe_of_odd_values_is_told_or_makes_no_difference(
    saved: Path, run: Path, seed: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """One message, the older checkpoint, or the same training: never a traceback, another one, or a wild terminal."""
    chance = random.Random(seed)
    shutil.rmtree(run / "checkpoints" / f"step-{NEWEST}")
    folder = run / "checkpoints" / f"step-{OLDER}"
    *sections, last = chance.choice(sorted(places_of(read_info(folder).recipe)))

    def change(values: dict[str, Any]) -> None:
        section = values["recipe"]
        for name in sections:
            section = section[name]
        section[last] = chance.choice(ODD)

    rewrite_info(folder, change)
    capfd.readouterr()
    try:
        assert train(run, resume="auto").steps == NEWEST
    except samestep.UserError as error:
        told = str(error)
    else:
        told = capfd.readouterr().err
        assert (run / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    assert "\x1b" not in told
    assert max(map(len, told.splitlines())) < 700
