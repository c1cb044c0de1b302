"""Sharded layouts and recomputation: the same step, less memory a rank, no message that isn't needed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mistakes import Summed
from proving import Case, prove, same
from small_tasks import Points, Words
from torch import nn

import samestep
from samestep.data.loader import StepBatch
from samestep.engines.base import Loss, Preparation, StepReport
from samestep.engines.native.engine import Native
from samestep.engines.native.trainer import NativeTrainer
from samestep.parallel.blocks import find_blocks
from samestep.parallel.sharding import local
from samestep.verification.proof import Proof


def recipe(task: samestep.Task, **values: Any) -> samestep.Recipe:
    settings = {
        "batch": 33,
        "epochs": 2,
        "clip": 0.5,
        "optimizer": samestep.AdamW(lr=1e-2),
        "schedule": samestep.Schedule(warmup=3, decay="cosine"),
    }
    return samestep.Recipe(task=task, **{**settings, **values})


POINTS = recipe(Points(dropout=0.1))
WORDS = recipe(Words(), optimizer=samestep.SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1))


def of_points(layouts: Mapping[str, int | None]) -> dict[str, Case]:
    """By a layout, with its micro-batches."""
    return {layout: (POINTS, layout, {"micro_batch": micro_batch}) for layout, micro_batch in layouts.items()}


SAME: Mapping[str, Case] = {
    **of_points({"zero1x2": 5, "zero2x2": None, "fsdp2 recompute=selective offload=parameters": 8}),
    "momentum and a loss over words, fsdp2": (WORDS, "fsdp2", {}),
}
ALSO_SAME: Mapping[str, Case] = {
    **of_points({"fsdp3": 4, "dp2 fsdp2": None, "dp2 zero1x2": 3, "single recompute=full": 6}),
    "momentum and a loss over words, zero1x2": (WORDS, "zero1x2", {}),
}
OTHER: Mapping[str, Case] = {layout: (POINTS, layout, {"engine": Summed()}) for layout in ("zero1x2", "fsdp2")}
SUMMED = "fsdp2"  # seen by a fast test


@pytest.fixture(scope="module")
def proofs() -> Mapping[str, Proof | str]:
    return prove({**SAME, "summed": OTHER[SUMMED]}, steps=8)


@pytest.mark.parametrize("name", SAME)
def test_a_layout_takes_the_step_of_one_process(proofs: Mapping[str, Proof | str], name: str) -> None:
    assert same(proofs, [name]) == {}


@pytest.mark.slow
def test_other_numbers_of_ranks_take_the_step_of_one_process() -> None:
    assert same(prove(ALSO_SAME, steps=8), list(ALSO_SAME)) == {}


def test_summed_gradients_are_seen(proofs: Mapping[str, Proof | str]) -> None:
    assert_other_step(proofs["summed"])


@pytest.mark.slow
def test_summed_gradients_are_seen_under_every_layout() -> None:
    for proof in prove(OTHER, steps=8).values():
        assert_other_step(proof)


def assert_other_step(proof: Proof | str) -> None:
    assert isinstance(proof, Proof), proof
    assert not proof.same_step


class WatchedTrainer(NativeTrainer):
    """Writes what this rank holds, and how often its gradients are reduced, into a file a rank."""

    folder: Path

    def step(self, batch: StepBatch, loss: Loss) -> StepReport:
        name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
        with mock.patch.object(dist, name, wraps=getattr(dist, name)) as reduced:
            report = super().step(batch, loss)
        state = self.optimizer.optim.state if hasattr(self.optimizer, "optim") else self.optimizer.state  # pyright: ignore
        held = {
            "parameters": sum(local(p.detach()).numel() for p in self.model.parameters()),
            "state": sum(local(v).numel() for values in state.values() for v in values.values() if v.ndim),
            "reduced": reduced.call_count,
        }
        (self.folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(held), encoding="utf-8")
        return report


class Watched(Native):
    trainer_class = WatchedTrainer

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self, model: nn.Module, how: Preparation) -> NativeTrainer:
        trainer = super().prepare(model, how)
        assert isinstance(trainer, WatchedTrainer)
        trainer.folder = self.folder
        return trainer


def watched(layout: str, folder: Path, **run: Any) -> list[dict[str, Any]]:
    samestep.train(
        recipe(Points(), steps=3, epochs=None), layout=layout, engine=Watched(folder), folder=folder / "run", **run
    )
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("rank-*.json"))]


def parameters_of_points() -> int:
    return sum(p.numel() for p in Points().model().parameters())


def test_zero1_keeps_all_parameters_and_a_part_of_the_state(tmp_path: Path) -> None:
    ranks = watched("zero1x2", tmp_path)
    total = parameters_of_points()
    assert [rank["parameters"] for rank in ranks] == [total, total]
    # Adam keeps two numbers a parameter; a parameter's state is on one rank.
    assert sum(rank["state"] for rank in ranks) == 2 * total
    assert all(0 < rank["state"] < 2 * total for rank in ranks)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return watched("fsdp2", tmp_path_factory.mktemp("shards"))


def test_shards_hold_a_part_of_everything(shards: list[dict[str, Any]]) -> None:
    ranks = shards
    total = parameters_of_points()
    assert sum(rank["parameters"] for rank in ranks) == total
    assert sum(rank["state"] for rank in ranks) == 2 * total
    # Every matrix and vector is cut along its first dimension, whose sizes here differ by at most one row.
    assert all(rank["parameters"] < 0.6 * total for rank in ranks)


@pytest.mark.slow
def test_shards_reduce_gradients_once_a_step(shards: list[dict[str, Any]], tmp_path: Path) -> None:
    whole = shards[0]["reduced"]
    assert watched("fsdp2", tmp_path, micro_batch=4)[0]["reduced"] == whole > 0


def test_bf16_shards_train(tmp_path: Path) -> None:
    plain = samestep.train(recipe(Points(), steps=5, epochs=None), folder=tmp_path / "fp32").losses
    mixed = samestep.train(
        recipe(Points(), steps=5, epochs=None, precision="bf16"), layout="fsdp2", folder=tmp_path / "bf16"
    ).losses
    assert mixed == pytest.approx(plain, rel=2e-2)
    assert mixed != plain


def transformer_encoder() -> tuple[nn.Module, int, type]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)), 3, type(layer)


def mlp() -> tuple[nn.Module, int, type]:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), 2, nn.Linear


def llama() -> tuple[nn.Module, int, type]:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
    )
    return LlamaForCausalLM(config), 3, LlamaDecoderLayer


def bert() -> tuple[nn.Module, int, type]:
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2
    )
    return BertForSequenceClassification(config), 4, BertLayer


@pytest.mark.parametrize("make", [transformer_encoder, mlp, llama, bert])
def test_blocks_are_the_repeated_layers(make: Any) -> None:
    model, count, kind = make()
    blocks = find_blocks(model)
    assert [type(block) for block in blocks] == [kind] * count


@pytest.mark.parametrize("how", ["full", "selective"])
def test_recomputation_keeps_less_for_backward(how: str) -> None:
    from samestep.parallel.exact.forward_context import ForwardContext
    from samestep.parallel.recompute import recompute

    def kept(model: nn.Module) -> int:
        saved: dict[int, int] = {}

        def save(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            model(torch.randn(4, 6, 4))
        return sum(saved.values())

    plain, spare = transformer_encoder()[0], transformer_encoder()[0]
    recompute(find_blocks(spare), how, ForwardContext())  # pyright: ignore[reportArgumentType]
    assert kept(spare) < kept(plain)


def test_selective_recomputation_keeps_what_every_kernel_of_attention_gives() -> None:
    from samestep.parallel.recompute import _KEPT

    names: set[str] = set(torch._C._dispatch_get_all_op_names())
    kernels = {
        name
        for name in (full.partition(".")[0].removeprefix("aten::") for full in names)
        if name.startswith("_scaled_dot_product_") and "backward" not in name and "math" not in name
    }
    kept = {operator._schema.name.removeprefix("aten::") for operator in _KEPT}
    assert len(kernels) >= 4
    assert kernels - kept == set()
