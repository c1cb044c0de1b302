"""The recorder's parts by themselves: draws, copies of weights, samples that are made, batches, skipped forwards."""

import copy
import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samestep.recording.samples import rows_of
from samestep.recording.skipped import SKIPPED, without_skipped
from samestep.recording.store import RecordWriter, events
from samestep.script_proof.draws import Draws, Now, own_draw
from samestep.script_proof.fetching import Fetching
from samestep.script_proof.given import GivenBatches
from samestep.script_proof.held import Changes, HeldWeights
from samestep.script_proof.states import states_of

pytestmark = pytest.mark.quick
NOW = Now(step=0, backwards=0, in_backward=False, training=True)


def drawn(folder: Path, *values: torch.Tensor) -> Path:
    """A split run of which each rank has drawn one of the values."""
    for rank, value in enumerate(values):
        writer = RecordWriter(folder / f"rank-{rank}")
        Draws(writer, from_run=None, together=0, notes=True).drawn("randn", value, NOW)
        writer.close()
    return folder


@pytest.mark.parametrize(
    ("values", "shape", "how", "wanted"),
    [
        (([1.0, 2.0], [3.0, 4.0]), 4, "joined", [1.0, 2.0, 3.0, 4.0]),
        (([1.0, 2.0], [1.0, 2.0]), 2, "same", [1.0, 2.0]),
        (([1.0, 2.0], [3.0, 4.0]), 2, "unlike", None),
        (([1.0, 2.0], [3.0, 4.0]), 5, "unlike", None),
    ],
)
def test_one_process_gets_what_ranks_drew(
    values: tuple[list[float], ...], shape: int, how: str, wanted: list[float] | None, tmp_path: Path
) -> None:
    split = drawn(tmp_path / "split", *map(torch.tensor, values))
    writer = RecordWriter(tmp_path / "alone")
    result = torch.zeros(shape)
    Draws(writer, from_run=split, together=2, notes=False).drawn("randn", result, NOW)
    writer.close()
    assert [each["how"] for each in events(tmp_path / "alone")] == [how]
    assert result.tolist() == (wanted if wanted is not None else [0.0] * shape)


def test_draws_of_each_rank_are_told_from_those_that_all_have(tmp_path: Path) -> None:
    assert own_draw(drawn(tmp_path / "own", torch.tensor([1.0]), torch.tensor([2.0]))) == "randn"
    assert own_draw(drawn(tmp_path / "same", torch.tensor([1.0]), torch.tensor([1.0]))) is None


class Lazy(dict[str, Any]):
    """A mapping whose items are work, as those of transformers' lists of models."""

    def items(self) -> Any:
        raise AssertionError("items of another library's mapping were asked for")


@pytest.fixture
def thawed() -> Iterator[None]:
    """What a recorder has frozen is collected again after the test."""
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_copies_of_the_weights_are_found_without_asking_mappings_for_their_items() -> None:
    held = HeldWeights()
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert held.find({"": model}, [optimizer]) == []
    lazy = Lazy({"a": 1, "b": 2, "c": 3, "d": 4})
    average = copy.deepcopy(model)
    snapshot = {name: value.detach().clone() for name, value in model.named_parameters()}
    names = {each.name for each in held.find({"": model}, [optimizer])}
    assert {"Sequential/0.weight", "snapshot/1.bias"} & names
    assert len(names) == 8
    assert (len(lazy), len(snapshot), len([*average.parameters()])) == (4, 4, 4)


def test_parameters_that_were_changed_between_steps_are_known() -> None:
    one, other = torch.ones(3), torch.ones(2)
    changes = Changes()
    changes.noted([one, other])
    assert changes.since([("one", one), ("other", other)]) == []
    other.mul_(2)
    assert changes.since([("one", one), ("other", other)]) == ["other"]


def test_what_modules_carry_along_has_names() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.register_buffer("seen", torch.zeros(2), persistent=False)
            self.mean = torch.zeros(3)

    class Centre(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(4))

    model, centre = Kept(), Centre()
    names = {name for name, _ in states_of({"": model})}
    assert {"seen", "mean", "Centre.centre"} <= names
    assert "layer.weight" not in names
    assert centre.centre is not None


def test_a_sample_is_made_of_its_number_and_the_generators_are_as_before(tmp_path: Path) -> None:
    dataset = object()

    def made(place: str, before: int) -> tuple[float, float]:
        writer = RecordWriter(tmp_path / place)
        fetching = Fetching(writer)
        fetching.begun(dataset)
        torch.manual_seed(before)
        random.seed(before)
        state = torch.get_rng_state()
        value = fetching.sample(dataset, 7, lambda: torch.rand(1).item() + random.random())
        other = fetching.sample(dataset, 8, lambda: torch.rand(1).item() + random.random())
        assert torch.get_rng_state().equal(state)
        writer.close()
        return value, other

    first, other = made("one", 1), made("two", 2)
    assert first == other
    assert first[0] != first[1]
    one, two = (list(events(tmp_path / place)) for place in ("one", "two"))
    assert [each["hash"] for each in one] == [each["hash"] for each in two]
    assert one[0]["drawn"] != two[0]["drawn"]


def test_a_batch_is_known_by_its_rows_whatever_came_between() -> None:
    batches = GivenBatches()
    rows = [torch.arange(4.0).reshape(2, 2) + 10 * number for number in range(3)]
    for number, each in enumerate(rows):
        batches.add([f"0:{2 * number}", f"0:{2 * number + 1}"], each)
    found = batches.columns(rows_of((rows[1],), {}), training=True)
    assert found["#"] == ["0:2", "0:3"]
    assert found["#given"] == [f"0:{number}" for number in range(6)]
    assert batches.columns(rows_of((rows[2],), {}), training=True) == {"#": ["0:4", "0:5"]}


def forward(name: str, **values: Any) -> dict[str, Any]:
    return {"rows": {"0": [name]}, **values}


def test_forwards_that_no_step_used_are_left_out() -> None:
    loss = {"value": 1.0, "targets": 0, "after": 2}
    steps = [
        {"forwards": [forward("a")], "losses": [{**loss, "after": 1}], "clips": []},
        {"forwards": [forward("b", used=False), forward("c", used=True)], "losses": [loss], "clips": []},
    ]
    kept = without_skipped(steps)
    assert kept[0] is steps[0]
    assert [each["rows"]["0"] for each in kept[1]["forwards"]] == [["c"]]
    assert [each["rows"]["0"] for each in kept[1][SKIPPED]] == [["b"]]
    assert kept[1]["losses"] == [{**loss, "after": 1}]
