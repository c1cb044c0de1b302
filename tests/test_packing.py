"""Packed rows: best fit, the same loss and gradients as unpacked, and models that can't keep documents apart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_jobs import chat_recipe, chat_task, save_model, say, write_rows
from torch import nn

import samestep
from samestep.data.packing import best_fit
from samestep.errors import UserError
from samestep.parallel.exact.float64 import in_float64
from samestep.tasks.base import call
from samestep.tasks.chat import check_keeps_apart

ROWS = [
    {
        "messages": [
            say("user", f"Say hello to {name} in French."),
            say("assistant", f"Bonjour, {name}!" * (1 + n % 3)),
        ]
    }
    for n, name in enumerate(("Ada", "Alan", "Grace", "Emmy", "Kurt", "Sofia", "Carl"))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


def slow_best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """The same by looking at every group."""
    groups: list[list[int]] = []
    left: list[int] = []
    times: list[int] = []  # when each group got its last row: of equally full ones the one that became so first
    for time, row in enumerate(sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))):
        able = [number for number in range(len(groups)) if left[number] >= lengths[row]]
        if not able:
            groups.append([])
            left.append(room)
            times.append(0)
            able = [len(groups) - 1]
        best = min(able, key=lambda number: (left[number], times[number]))
        groups[best].append(row)
        left[best] -= lengths[row]
        times[best] = time
    return sorted(sorted(group) for group in groups)


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(5))
def test_best_fit_is_that_of_looking_at_every_group(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    room = 40
    lengths = torch.randint(1, room + 1, (300,), generator=generator).tolist()
    groups = best_fit(lengths, room)
    assert sorted(row for group in groups for row in group) == list(range(300))
    assert all(sum(lengths[row] for row in group) <= room for group in groups)
    assert groups == slow_best_fit(lengths, room)
    assert len(groups) < sum(lengths) / room * 1.1 + 1


def gradients(made: Any, indices: Sequence[int], together: int) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and its gradients, of samples that go through the model so many at once; in float64."""
    torch.manual_seed(0)
    net = made.model().double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    with in_float64():
        for start in range(0, len(indices), together):
            batch = made.collate([made.train_set()[index] for index in indices[start : start + together]])
            part, counted = made.loss(call(net, batch.inputs), batch)
            total, count = total + part, count + int(counted)
    (total / count).backward()
    return total.item() / count, {name: value.grad for name, value in net.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_is_unpacked_with_gradients(attention: str, model: Path, source: Path) -> None:
    named = {"attention": attention}
    packed = chat_task(model, source, length=120, packing=True, named=named)
    alone = chat_task(model, source, length=120, named=named)
    assert len(packed.train_set()) < len(alone.train_set()) == len(ROWS)
    loss, grads = gradients(packed, range(len(packed.train_set())), together=2)
    expected, others = gradients(alone, range(len(ROWS)), together=1)
    assert loss == pytest.approx(expected, rel=1e-14)
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, others[name], rtol=0, atol=1e-12 * float(others[name].abs().max()))


def test_of_positions_that_go_on_the_loss_is_another(model: Path, source: Path) -> None:
    """The comparison above finds documents that see one another."""
    packed = chat_task(model, source, length=120, packing=True)
    batch = packed.collate([packed.train_set()[0]])
    net = packed.model().double()
    right, _ = packed.loss(call(net, batch.inputs), batch)
    wrong, _ = packed.loss(call(net, {"input_ids": batch.inputs["input_ids"]}), batch)
    assert abs(wrong.item() / right.item() - 1) > 1e-6


def test_models_that_can_not_keep_documents_apart_are_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM, RwkvConfig, RwkvForCausalLM

    torch.manual_seed(0)
    check_keeps_apart(GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32)))
    small: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2}
    refused: list[tuple[nn.Module, str]] = [
        (MambaForCausalLM(MambaConfig(**small, state_size=4)), "MambaForCausalLM"),
        (RwkvForCausalLM(RwkvConfig(**small, attention_hidden_size=16, context_length=32)), "RwkvForCausalLM"),
    ]
    for net, name in refused:
        with pytest.raises(UserError, match=f"recipe.data.packing: .*{name}.*leave packing out"):
            check_keeps_apart(net)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "layout",
    [
        "dp2",
        "fsdp2",
        "tp2",
        "pp2",
        "cp2 attention=ulysses",
        "cp2 attention=ring",
        "pp2 fsdp2 tp2",
        "tp2 sequence=split",
    ],
)
def test_layouts_take_the_same_step_of_packed_samples(layout: str, model: Path, source: Path) -> None:
    proof = samestep.verify(chat_recipe(model, source, length=120, packing=True), layout=layout, steps=2)
    assert max(proof.max_relative_difference.values()) < 1e-12
