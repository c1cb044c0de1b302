"""Conversions from what DeepSpeed and Accelerate themselves have written, and into what they themselves read."""

import importlib
import importlib.util
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import same
from safetensors.torch import load_file
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.convert.convert import convert
from samestep.launch import local
from samestep.launch.world import join

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install 'samestep[deepspeed]'"
)
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="pip install 'samestep[accelerate]'"
)


class Mixed(nn.Module):
    """Sizes that divide by nothing, a buffer, a frozen parameter, and a parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.norm = nn.LayerNorm(7)
        self.square = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7)
        self.again.weight = self.square.weight
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.register_buffer("scale", torch.tensor(1.5))
        self.head = nn.Linear(7, 3)

    def forward(self, points: Tensor) -> Tensor:
        x = self.norm(self.first(points)) * self.scale  # [batch, 7]
        return self.head(self.again(self.square(x).relu()) + self.frozen.sum())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and the rest in two groups, as for weight decay."""
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kinds[parameter.ndim > 1].append(parameter)
    return [{"params": kinds[True], "weight_decay": 0.1}, {"params": kinds[False], "weight_decay": 0.0}]


def trained(session: samestep.Session, model: nn.Module) -> dict[str, Tensor]:
    """A model's state after three steps."""
    task = Points()
    session.prepare(model, torch.optim.AdamW(groups(model), lr=0.05))
    for batch in session.batches(task.train_set(), batch=33, collate=task.collate, steps=3):
        session.step(batch, task.loss)
    return session.trainer.state()


DEEPSPEED = ("dp2", "zero1x2", "zero2x2", "fsdp2")


def save_by_deepspeed(folder: Path) -> dict[str, dict[str, Tensor]]:
    states: dict[str, dict[str, Tensor]] = {}
    with join(device="cpu", threads=1):
        for layout in DEEPSPEED:
            with samestep.session(layout, engine="deepspeed", device="cpu", threads=1) as session:
                torch.manual_seed(0)
                states[layout] = trained(session, Mixed())
                trainer: Any = session.trainer
                trainer.save_checkpoint(folder / layout)
    return states


@pytest.fixture(scope="module")
def by_deepspeed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("deepspeed")
    return folder, local.start(save_by_deepspeed, (folder,), 2)


@needs_deepspeed
@pytest.mark.parametrize("layout", DEEPSPEED)
def test_what_deepspeed_wrote(
    layout: str, by_deepspeed: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path
) -> None:
    folder, states = by_deepspeed
    converted = convert(folder / layout, tmp_path / "weights.safetensors")
    assert converted.from_format == "deepspeed"
    same(load_file(tmp_path / "weights.safetensors"), states[layout])
    (tag,) = [path for path in (folder / layout).iterdir() if path.is_dir()]
    convert(tag, tmp_path / "by-tag.safetensors")
    same(load_file(tmp_path / "by-tag.safetensors"), states[layout])


@needs_deepspeed
def test_the_float32_weights_of_half_precision_are_those_that_deepspeed_finds(tmp_path: Path) -> None:
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}), encoding="utf-8")
    with samestep.session(
        "single", engine="deepspeed", precision="bf16", device="cpu", engine_config=config
    ) as session:
        torch.manual_seed(0)
        state = trained(session, Mixed())
        trainer: Any = session.trainer
        trainer.save_checkpoint(tmp_path / "ds")
        theirs: Any = importlib.import_module("deepspeed.utils.zero_to_fp32")
        expected = theirs.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "ds"))
    convert(tmp_path / "ds", tmp_path / "weights.safetensors")
    found = load_file(tmp_path / "weights.safetensors")
    same(found, {name: value.float() for name, value in expected.items()})
    same(found, state)
    assert not torch.equal(found["head.weight"], found["head.weight"].bfloat16().float())  # not the rounded ones


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("layout", DEEPSPEED[1:])
def test_a_missing_rank_is_told(
    layout: str, by_deepspeed: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path
) -> None:
    folder, _ = by_deepspeed
    for rank, said in ((0, "lacks the file of rank 0"), (1, "2 ranks wrote some")):
        copy = Path(shutil.copytree(folder / layout, tmp_path / f"copy{rank}"))
        (file,) = copy.glob(f"*/*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        file.unlink()
        with pytest.raises(samestep.UserError, match=said):
            convert(copy, tmp_path / "weights.safetensors")


@needs_deepspeed
def test_sliced_models_are_refused(by_deepspeed: tuple[Path, dict[str, dict[str, Tensor]]], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(by_deepspeed[0] / "zero1x2", tmp_path / "copy"))
    (file,) = copy.glob("*/mp_rank_00_model_states.pt")
    shutil.copyfile(file, file.with_name("mp_rank_01_model_states.pt"))
    with pytest.raises(samestep.UserError, match="part of a model that was sliced"):
        convert(copy, tmp_path / "weights.safetensors")


@needs_deepspeed
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)]
)
def test_deepspeed_loads_what_is_written(stage: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = Mixed().state_dict()
    torch.save(expected, tmp_path / "plain.pt")
    convert(tmp_path / "plain.pt", tmp_path / "ds", to="deepspeed")
    config = tmp_path / "ds_config.json"
    config.write_text(json.dumps({"zero_optimization": {"stage": stage}}), encoding="utf-8")
    with samestep.session("single", engine="deepspeed", device="cpu", engine_config=config) as session:
        torch.manual_seed(2)
        model = Mixed()
        session.prepare(model, torch.optim.AdamW(groups(model), lr=0.05))
        trainer: Any = session.trainer
        trainer.engine.load_checkpoint(str(tmp_path / "ds"), load_module_only=True)
        same(session.trainer.state(), expected)
        task = Points()  # and the optimizer steps from there
        batches = session.batches(task.train_set(), batch=33, collate=task.collate, steps=1)
        loss = session.step(next(iter(batches)), task.loss).loss
    assert loss.item() == pytest.approx(first_loss(expected), rel=1e-6)


def first_loss(state: Mapping[str, Tensor]) -> float:
    """The loss of the first step, of a model with this state, in one process."""
    with samestep.session("single", device="cpu") as session:
        model, task = Mixed(), Points()
        model.load_state_dict(dict(state))
        session.prepare(model, torch.optim.AdamW(model.parameters()))
        batches = session.batches(task.train_set(), batch=33, collate=task.collate, steps=1)
        return session.step(next(iter(batches)), task.loss).loss.item()


def accelerator_of(session: samestep.Session) -> Any:
    trainer: Any = session.trainer
    return trainer._precision._accelerator


def save_by_accelerate(folder: Path) -> dict[str, dict[str, Tensor]]:
    states: dict[str, dict[str, Tensor]] = {}
    with join(device="cpu", threads=1):
        for layout in ("dp2", "fsdp2"):
            with samestep.session(layout, engine="accelerate", device="cpu", threads=1) as session:
                torch.manual_seed(0)
                states[layout] = trained(session, Points().model())
                accelerator = accelerator_of(session)
                if layout == "dp2":
                    accelerator.save_state(str(folder / layout))
                    continue
                # `save_state` calls this on accelerators; on CPUs it takes ranks for replicas.
                utils: Any = importlib.import_module("accelerate.utils")
                accelerator.state.distributed_type = utils.DistributedType.FSDP
                utils.save_fsdp_model(
                    accelerator.state.fsdp_plugin, accelerator, accelerator._models[0], str(folder / layout)
                )
    return states


@pytest.mark.slow
@needs_accelerate
def test_what_accelerate_wrote(tmp_path: Path) -> None:
    states = local.start(save_by_accelerate, (tmp_path,), 2)
    for layout, form in (("dp2", "accelerate"), ("fsdp2", "fsdp")):
        converted = convert(tmp_path / layout, tmp_path / f"{layout}.safetensors")
        assert converted.from_format == form
        same(load_file(tmp_path / f"{layout}.safetensors"), states[layout])
