"""`recipe.optimizer.state`: Adam's averages in bf16 or 8 bits: numbers, the same step, bytes, checkpoints."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from proving import prove, same
from resuming import job_of, train_all
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep import AdamW, Checkpointing
from samestep.errors import CheckpointError, LayoutError, UserError
from samestep.parallel.optimizer.kinds import Shapes, kind_of
from samestep.parallel.optimizer.rounded import BLOCK, FORMATS, RoundedState, numbers_of_8_bits
from samestep.training.optimizer import make_optimizer

pytestmark = pytest.mark.timeout(300)

STATES = ("bf16", "8bit")
SIZE, LAYERS = 32, 16


def rounded(state: str, value: Tensor, average: str, step: int) -> Tensor:
    """What is left of an average that a step has made."""
    from samestep.parallel.optimizer.rounded import _chance

    kept = FORMATS[state]()
    signed = average == "exp_avg"
    chance = _chance(torch.tensor(float(step)), average, value)
    return kept.values(kept.kept(value, chance, signed=signed), torch.float32, signed=signed)


def neighbours(state: str, value: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The numbers below and above each value, by an independent search."""
    if state == "bf16":
        near = value.bfloat16()
        steps = [torch.nextafter(near, torch.full_like(near, to)) for to in (-torch.inf, torch.inf)]
        below = torch.where(near.float() <= value, near, steps[0])
        above = torch.where(near.float() >= value, near, steps[1])
        return below.float(), above.float()
    blocks = value.view(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    numbers = torch.tensor(numbers_of_8_bits(signed=signed))
    far = (blocks / scale).unsqueeze(-1) - numbers  # [blocks, BLOCK, 256]
    below = numbers[torch.where(far >= 0, far, torch.inf).argmin(-1)]
    above = numbers[torch.where(far <= 0, far, -torch.inf).argmax(-1)]
    return (below * scale).view(value.shape), (above * scale).view(value.shape)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("average", ["exp_avg", "exp_avg_sq"])
def test_a_number_becomes_one_of_its_neighbours_and_is_right_on_average(state: str, average: str) -> None:
    value = torch.randn(4, BLOCK, generator=torch.Generator().manual_seed(0))
    value = value if average == "exp_avg" else value.square()
    below, above = neighbours(state, value, signed=average == "exp_avg")
    found = torch.stack([rounded(state, value, average, step) for step in range(1, 257)])
    inner = (value > below) & (below > 0)  # a block's most negative number may have none below it
    assert ((found == below) | (found == above) | torch.isclose(found, below) | torch.isclose(found, above))[
        :, inner
    ].all()
    apart = ((found.mean(0) - value) / (above - below))[inner]
    assert apart.abs().mean() < 2.5 / 256**0.5 / 2  # the mean of 256 throws of a coin
    assert abs(apart.mean()) < 0.01


def test_the_numbers_of_8_bits_are_those_of_the_published_method() -> None:
    signed, unsigned = numbers_of_8_bits(signed=True), numbers_of_8_bits(signed=False)
    assert len({*signed}) == len({*unsigned}) == 256
    assert signed[-1] == unsigned[-1] == 1.0
    assert 0.0 in signed
    # The largest decade has half of all numbers, equally far apart (Dettmers et al. 2022, figure 2).
    top = [number for number in unsigned if 0.1 < number < 1]
    assert len(top) == 128
    assert top[1] - top[0] == pytest.approx(top[-1] - top[-2]) == pytest.approx(0.9 / 128)
    assert min(number for number in unsigned if number) == pytest.approx(3.25e-7)


def test_torchao_has_the_same_numbers() -> None:
    utilities = pytest.importorskip("torchao.optim.quant_utils")
    for signed in (True, False):
        assert utilities.create_dynamic_map(signed) == pytest.approx(numbers_of_8_bits(signed=signed), abs=1e-7)


@pytest.mark.parametrize("state", STATES)
def test_a_second_average_with_a_beta_near_one_does_not_stand_still(state: str) -> None:
    generator = torch.Generator().manual_seed(0)
    average = torch.zeros(2, BLOCK)
    for step in range(1, 1201):
        square = torch.randn(2, BLOCK, generator=generator).square()
        average = rounded(state, 0.999 * average + 0.001 * square, "exp_avg_sq", step)
    assert average.mean() / (1 - 0.999**1200) == pytest.approx(1, abs=0.02)  # of squares that are 1 on average


def test_rounded_to_the_nearest_it_would() -> None:
    generator = torch.Generator().manual_seed(0)
    average = torch.zeros(2, BLOCK)
    for _ in range(3000):
        average = (0.999 * average + 0.001 * torch.randn(2, BLOCK, generator=generator).square()).bfloat16().float()
    assert average.mean() / (1 - 0.999**3000) > 1.2


def test_a_second_average_is_never_zero_beside_a_first_one_that_is_not() -> None:
    small = torch.full((1, BLOCK), 1e-12)
    small[0, 0] = 1.0
    assert (rounded("8bit", small, "exp_avg_sq", 1) > 0).all()
    assert (rounded("8bit", torch.zeros(1, BLOCK), "exp_avg_sq", 1) == 0).all()
    assert rounded("8bit", torch.full((1, BLOCK), torch.nan), "exp_avg", 1).isnan().all()
    assert rounded("bf16", torch.tensor([[torch.nan, torch.inf]]), "exp_avg", 1).isfinite().sum() == 0


def test_a_step_is_adams_and_what_follows_begins_from_what_was_kept() -> None:
    for state in STATES:
        mine, theirs = (nn.Parameter(torch.ones(8, 64)) for _ in range(2))
        gradients = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1))
        own = RoundedState([mine], kind=torch.optim.AdamW, state=state, lr=0.1)
        plain = torch.optim.AdamW([theirs], lr=0.1)
        for step, gradient in enumerate(gradients, 1):
            mine.grad = theirs.grad = gradient
            own.step()
            plain.step()
            torch.testing.assert_close(mine, theirs)
            for average in ("exp_avg", "exp_avg_sq"):
                plain.state[theirs][average] = rounded(state, plain.state[theirs][average], average, step)
        assert {value.dtype for key, value in own.state[mine].items() if key != "step"} == (
            {torch.bfloat16} if state == "bf16" else {torch.uint8, torch.float32}
        )


def recipe(state: Any, **values: Any) -> samestep.Recipe:
    settings: dict[str, Any] = {"task": Points(samples=64, held_out=7), "batch": 13, "steps": 4, "clip": 1.0}
    return samestep.Recipe(optimizer=AdamW(lr=0.01, state=state), **{**settings, **values})


LAYOUTS = ("dp2", "zero1x2", "zero2x2", "fsdp2", "tp2", "pp2")


@pytest.mark.parametrize(
    "layouts",
    [
        {"bf16": ("zero1x2",), "8bit": ("fsdp2", "tp2")},
        pytest.param(dict.fromkeys(STATES, LAYOUTS), marks=pytest.mark.slow),
    ],
    ids=["few", "all"],
)
def test_every_layout_rounds_alike(layouts: Mapping[Any, tuple[str, ...]]) -> None:
    recipes = {state: recipe(state) for state in layouts}
    cases = {f"{state} {layout}": (recipes[state], layout, {}) for state in layouts for layout in layouts[state]}
    assert same(prove(cases, steps=3), list(cases)) == {}


@pytest.mark.parametrize("state", STATES)
def test_a_part_of_a_parameter_can_not_be_stepped_by_itself_and_that_is_found_out(state: Any) -> None:
    shapes = [Shapes(settings={}, shapes=[torch.Size((16, 4)), torch.Size((16,))])]
    tried: list[tuple[Any, bool]] = [(state, False), ("full", True)]
    for kept, by_number in tried:
        kind = kind_of(partial(make_optimizer, AdamW(state=kept)), shapes, kept)
        assert (kind.by_number, kind.alone, kind.draws) == (by_number, True, False)


def losses(jobs: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    return {name: result.losses for name, result in zip(jobs, train_all(list(jobs.values())), strict=True)}


ON = ("single", "zero1x2", "fsdp2", "tp2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "layouts"),
    [
        pytest.param("bf16", ON, marks=pytest.mark.slow),
        pytest.param("8bit", ON, marks=pytest.mark.slow),
        ("8bit", ("single", "fsdp2")),
    ],
)
def test_a_training_goes_on_from_a_checkpoint_as_if_nothing_had_been(
    state: Any, layouts: tuple[str, ...], tmp_path: Path
) -> None:
    asked = recipe(state, precision="fp64")
    saved = tmp_path / "checkpoints"
    saving = Checkpointing(every=2, folder=saved)
    (whole,) = losses({"": job_of(asked, "single", tmp_path / "whole", checkpoint=saving)}).values()
    resumed = {
        layout: job_of(
            asked,
            layout,
            tmp_path / layout,
            checkpoint=Checkpointing(every=9, folder=tmp_path / f"of {layout}", resume=str(saved / "step-2")),
        )
        for layout in layouts
    }
    found = losses(resumed)
    assert found["single"][-2:] == whole[-2:]  # to the bit
    for layout in resumed:
        assert found[layout][-2:] == pytest.approx(whole[-2:], rel=1e-12), layout
    with pytest.raises(CheckpointError, match=r"recipe\.optimizer\.state is full, and was"):
        train_all(
            [
                job_of(
                    recipe("full", precision="fp64"),
                    "single",
                    tmp_path / "x",
                    checkpoint=resumed["single"].run.checkpoint,
                )
            ]
        )


class Layers(Points):
    """Square layers, without vectors."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(SIZE, SIZE, bias=False), nn.Tanh()) for _ in range(LAYERS)))

    def train_set(self) -> samestep.Samples:
        vectors = torch.randn(32, SIZE, generator=torch.Generator().manual_seed(0))
        return [(vector, vector) for vector in vectors]

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        return (output - batch.targets).square().sum(), len(output)


BYTES = {"bf16": 4.0, "8bit": 2 + 2 * 4 / BLOCK}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "parts", "states"),
    [
        ("fsdp2", 2, ["8bit"]),
        *(
            pytest.param(layout, parts, STATES, marks=pytest.mark.slow)
            for layout, parts in (("dp2", 1), ("zero1x2", 2))
        ),
    ],
)
def test_bytes_a_parameter(layout: str, parts: int, states: Any) -> None:
    for state in states:
        asked = samestep.Recipe(task=Layers(), batch=16, steps=3, optimizer=AdamW(state=state))
        for rank in samestep.dry_run(asked, layout, threads=1, check=False):
            held = rank.optimizer_state / (LAYERS * SIZE * SIZE)
            assert held == pytest.approx(BYTES[state] / parts, rel=0.01)


@pytest.mark.parametrize(
    ("run", "error", "words"),
    [
        ({"engine": "accelerate"}, UserError, 'state is bf16, which engine "accelerate" does not have'),
        ({"layout": "dp2 offload=optimizer"}, LayoutError, "state is bf16, and offload=optimizer"),
        ({"layout": "dp2", "share_replicas": True}, UserError, "run.share_replicas is true; use one"),
        ({"layout": "dp2", "reduction": "ordered"}, UserError, "run.reduction is ordered"),
    ],
)
def test_what_it_does_not_go_with_is_refused(run: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        samestep.train(recipe("bf16"), **{"layout": "single", "check": False, **run})


def test_what_a_recipe_can_not_say_together() -> None:
    with pytest.raises(samestep.UserError, match=r"master_weights is true and optimizer\.state is bf16"):
        recipe("bf16", master_weights=True, precision="bf16")
    with pytest.raises(samestep.UserError, match=r"communication is local-sgd and optimizer\.state is 8bit"):
        recipe("8bit", communication=samestep.communication.LocalSGD())
