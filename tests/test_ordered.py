"""`run.reduction: ordered`: the same bits under every layout that has it, the step of one process, and refusals."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from proving import prove, same
from resuming import job_of, train_all
from safetensors.torch import load_file
from small_tasks import Lines, Points
from sparse_row_ranks import Branches, Ids, Tied
from torch import Tensor, nn

import samestep
from samestep.data.order import DataPlace, virtual_shares
from samestep.errors import UserError
from samestep.layout import Layout
from samestep.parallel.ordered import held_sums, total, total_of_halves
from samestep.validation import checked

ORDERED: Mapping[str, Any] = {"reduction": "ordered"}


def recipe(task: samestep.Task, **more: Any) -> samestep.Recipe:
    values = {"task": task, "batch": 33, "epochs": 1, "clip": 0.5, "optimizer": samestep.AdamW(lr=1e-2)}
    return checked(samestep.Recipe, {**values, **more}, prefix=("recipe",))


class Mixed(Points):
    """Attention with dropout, odd sizes, a scale that is one number, a frozen matrix."""

    def model(self) -> nn.Module:
        return _Mixed(self.classes)


class _Mixed(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(1, 10)
        self.block = nn.TransformerEncoderLayer(10, 2, 13, dropout=0.2, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(10, classes)
        self.first.weight.requires_grad_(False)

    def forward(self, points: Tensor) -> Tensor:
        return self.last(self.block(self.first(points.unsqueeze(-1))).mean(1)) * self.scale


RECIPES: Mapping[str, samestep.Recipe] = {
    "points": recipe(Points(dropout=0.1), schedule=samestep.Schedule(warmup=3, decay="linear")),
    "lines": recipe(Lines(), virtual_ranks=6),
    "mixed": recipe(Mixed(), optimizer=samestep.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
    "branches": recipe(Ids(Branches), virtual_ranks=5),
    "tied": recipe(Ids(Tied), clip=None),
}
LAYOUTS = {
    2: ("dp2", "zero1x2", "zero2x2", "fsdp2", "fsdp2 recompute=full"),
    3: ("dp3", "fsdp3"),
    4: ("dp4", "dp2 fsdp2", "zero1x4", "fsdp4"),
}


def _skips_blocks(name: str, layout: str) -> bool:
    """Whether ranks run other blocks of a model whose parameters are gathered block by block."""
    return name == "branches" and Layout.parse(layout).zero >= 2


def trained(
    tmp_path: Path, layouts: list[str], names: list[str], **run: Any
) -> dict[tuple[str, str], dict[str, Any]]:
    """By recipe and layout the bits of losses, metrics, weights."""
    wanted = [(name, layout) for name in names for layout in layouts if not _skips_blocks(name, layout)]
    jobs = [
        job_of(RECIPES[name], layout, tmp_path / f"{number} {layout}", **{**ORDERED, **run})
        for number, (name, layout) in enumerate(wanted)
    ]
    return {
        key: {
            "losses": result.losses,
            "metrics": result.metrics,
            "weights": {
                name: value.numpy().tobytes()
                for name, value in load_file(result.folder / "model.safetensors").items()
            },
        }
        for key, result in zip(wanted, train_all(jobs), strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ("mixed",)),
        pytest.param(2, ("points", "lines", "branches", "tied"), marks=pytest.mark.slow),
        # 8 and 5 virtual ranks, which can't be divided evenly among 3 ranks
        pytest.param(3, ("points", "branches"), marks=pytest.mark.slow),
        pytest.param(3, ("lines", "mixed", "tied"), marks=pytest.mark.slow),
        pytest.param(4, tuple(RECIPES), marks=pytest.mark.slow),
    ],
)
def test_every_layout_has_the_bits_of_one_process(size: int, names: tuple[str, ...], tmp_path: Path) -> None:
    found = trained(tmp_path, ["single", *LAYOUTS[size]], list(names))
    for (name, layout), bits in found.items():
        assert bits == found[name, "single"], (name, layout)


def test_the_fast_way_has_other_bits(tmp_path: Path) -> None:
    found = trained(tmp_path, ["single", "dp2"], ["points"], reduction="fast")
    assert found["points", "single"]["weights"] != found["points", "dp2"]["weights"]


@pytest.mark.parametrize(
    ("layouts", "names"),
    [
        (("single",), ("mixed", "branches")),
        pytest.param(("single",), ("points", "lines", "tied"), marks=pytest.mark.slow),
        pytest.param(("dp2", "zero1x2", "fsdp2"), tuple(RECIPES), marks=pytest.mark.slow),  # of the same bits
    ],
    ids=["one rank", "one rank, more", "two ranks"],
)
def test_it_is_the_step_of_one_process(layouts: tuple[str, ...], names: tuple[str, ...]) -> None:
    cases = {
        f"{name} {layout}": (RECIPES[name], layout, ORDERED)
        for name in names
        for layout in layouts
        if not _skips_blocks(name, layout)
    }
    assert same(prove(cases), list(cases)) == {}


@pytest.mark.quick
@pytest.mark.parametrize("leaves", [1, 2, 3, 5, 6, 8, 13])
def test_the_tree_is_the_same_whoever_holds_its_leaves(leaves: int) -> None:
    values = [torch.tensor(value) for value in np.random.default_rng(0).normal(size=leaves).astype(np.float32)]

    def of_tree(first: int, size: int) -> Tensor:
        """The node of `size` leaves, a power of two, as the sum of its two halves; written apart from the package."""
        if size == 1 or first + size // 2 >= leaves:
            return values[first] if size == 1 else of_tree(first, size // 2)
        return of_tree(first, size // 2) + of_tree(first + size // 2, size // 2)

    wanted = of_tree(0, 1 << (leaves - 1).bit_length())
    for ranks in range(1, leaves + 1):
        sums: list[tuple[tuple[int, int], Tensor]] = []
        for rank in range(ranks):
            first, last = (round(leaves * at / ranks) for at in (rank, rank + 1))
            for begin, end in held_sums(first, last, leaves):
                sums.append(((begin, end), of_tree(begin, 1 << (end - begin - 1).bit_length()).clone()))
        assert total(sums, leaves).item() == wanted.item()


@pytest.mark.quick
def test_halves_are_a_sum_that_knows_no_other_rows() -> None:
    values = torch.randn(7, 37, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = total_of_halves(values)
    torch.testing.assert_close(whole, values.sum(-1))
    for row in range(7):
        assert total_of_halves(values[row : row + 1]).item() == whole[row].item()
    assert total_of_halves(torch.zeros(2, 0)).tolist() == [0, 0]


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 3, 8, 33])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_virtual_ranks_have_the_same_samples_whoever_holds_them(size: int, ranks: int) -> None:
    batch = np.arange(100, 100 + size)
    alone = [each.samples.tolist() for each in virtual_shares(batch, DataPlace(), 8) if not each.zero_weight]
    assert list(chain.from_iterable(alone)) == batch.tolist()
    shares = [virtual_shares(batch, DataPlace(index=rank, of=ranks), 8) for rank in range(ranks)]
    assert len({len(each) for each in shares}) == 1
    assert [each.samples.tolist() for rank in shares for each in rank if not each.zero_weight] == alone


class Normed(Points):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, self.classes))


class Counting(Points):
    """Counts its samples in a buffer."""

    def model(self) -> nn.Module:
        return _Counting(self.classes)


class _Counting(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.last = nn.Linear(4, classes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, points: Tensor) -> Tensor:
        if self.training:
            self.seen += len(points)
        return self.last(points)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("layout", "run", "told"),
    [
        ("tp2", {}, r'layout "tp2": run.reduction is ordered, which is for data ranks without offload; use dp2, '),
        ("dp2 pp2", {}, r"use dp4, zero1x4, zero2x4 or fsdp4, or reduction: fast"),
        ("fsdp2 offload=parameters", {}, r"is for data ranks without offload; use dp2"),
        ("dp9", {}, r"recipe.virtual_ranks is 8, fewer than the 9 ranks .* use virtual_ranks: 9 or more"),
        (
            "dp2",
            {"engine": "parameter-server"},
            r'ordered, .* "parameter-server" does not have; use engine native',
        ),
        ("dp2", {"micro_batch": 4}, r"run.micro_batch is 4; a virtual rank is one forward: use recipe.virtual_ranks"),
        ("dp2", {"group_by_length": True}, r"use group_by_length: false"),
        ("dp2", {"share_replicas": True}, r"use share_replicas: false"),
        ("dp2", {"sparse_rows": "on"}, r"use sparse_rows: auto"),
        ("dp2", {"bucket_mb": 4.0}, r"run.bucket_mb is 4, .* use no bucket_mb"),
        ("dp2", {"compile": True}, r"use compile: false"),
        ("dp2", {"reduction": "sorted"}, r"run.reduction is 'sorted'; it should be 'fast' or 'ordered'"),
    ],
)
def test_what_can_not_be_had_is_refused(layout: str, run: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        samestep.train(RECIPES["points"], layout=layout, **{**ORDERED, **run})


@pytest.mark.quick
@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"precision": "bf16"}, r"recipe.precision is bf16, .* use fp32 or fp64"),
        ({"communication": {"kind": "bf16"}}, r"recipe.communication is bf16, which sends no exact sums; use none"),
        ({"average": {}}, r"recipe.average is given, .* use no average"),
        ({"optimizer": {"name": "torch.optim.RAdam"}}, r"the optimizer is torch.optim.RAdam, .* use adamw or sgd"),
        ({"virtual_ranks": 0}, r"recipe.virtual_ranks is 0; it should be greater than 0"),
    ],
)
def test_recipes_that_can_not_be_had_are_refused(more: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        samestep.train(recipe(Points(), **more), layout="dp2", **ORDERED)


@pytest.mark.quick
def test_batch_norm_is_refused_before_a_rank_starts() -> None:
    with pytest.raises(UserError, match=r"1 \(BatchNorm1d\) takes its statistics from the whole batch, .* or reduct"):
        samestep.train(recipe(Normed()), layout="dp2", **ORDERED)


def test_buffers_that_a_forward_writes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a training forward writes the buffer seen, .* use reduction: fast"):
        samestep.train(recipe(Counting()), folder=tmp_path / "run", **ORDERED)


@pytest.mark.quick
def test_one_thread_a_rank_unless_the_job_says_more() -> None:
    from samestep import door
    from samestep.job import Job, Run

    for given, found in ((None, 1), (2, 2)):
        job = Job(recipe=RECIPES["points"], run=Run(layout="dp2", reduction="ordered", threads=given))
        assert door.settle(job)[0].run.threads == found
