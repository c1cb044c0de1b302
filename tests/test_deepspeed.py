"""Engine deepspeed: the step of one process at every ZeRO stage, low precision, and its checkpoints."""

import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from proving import prove, same
from small_tasks import Points, Words
from torch import Tensor, nn
from unsafe import trapped_state

import samestep
from samestep import environment
from samestep.launch import local
from samestep.launch.world import join

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install 'samestep[deepspeed]'"
)

LAYOUTS = (
    "dp2",
    "zero1x2",
    "zero2x2",
    "fsdp2",
    "zero1x2 offload=optimizer",
    "zero2x2 offload=optimizer",
    "fsdp2 offload=optimizer",
    "fsdp2 offload=parameters",
)


def recipe(**values: Any) -> samestep.Recipe:
    settings: dict[str, Any] = {
        "task": Points(),
        "batch": 33,  # uneven over two ranks, and 200 samples are no multiple of it
        "steps": 8,
        "clip": 0.5,
        "optimizer": samestep.AdamW(lr=1e-2),
        "schedule": samestep.Schedule(warmup=2, decay="cosine"),
    }
    return samestep.Recipe(**{**settings, **values})


def written(folder: Path, **config: Any) -> Path:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def _assert_same_steps(of_samples: Sequence[str], of_words: Sequence[str], unclipped: Sequence[str]) -> None:
    """Under layouts of each of three recipes."""
    samples, words = recipe(), recipe(task=Words(), batch=13, optimizer=samestep.SGD(lr=0.1, momentum=0.9))
    cases: dict[str, Any] = {layout: (samples, layout, {"engine": "deepspeed"}) for layout in of_samples}
    # Words differ from sample to sample, so the count of terms is known only after all forwards of all ranks; and
    # micro-batches of 3 leave one of 7 samples on one rank and 6 on the other.
    accumulated = {"engine": "deepspeed", "micro_batch": 3}
    cases |= {f"{layout} of words": (words, layout, accumulated) for layout in of_words}
    # Nobody asks for clipping, and the norm is above DeepSpeed's default, by which it would clip.
    steep = recipe(task=Steep(), clip=None, optimizer=samestep.SGD(lr=0.01))
    cases |= {f"{layout} unclipped": (steep, layout, {"engine": "deepspeed"}) for layout in unclipped}
    proofs = prove(cases)
    assert same(proofs, list(cases)) == {}


def test_every_stage_takes_the_step_of_one_process() -> None:
    _assert_same_steps(["zero1x2"], ["dp2", "fsdp2 offload=parameters"], ["zero2x2"])


@pytest.mark.slow
def test_every_layout_takes_the_step_of_one_process() -> None:
    _assert_same_steps(LAYOUTS, LAYOUTS, ["dp2"])


class Steep(Points):
    """Gradients with a norm far above 1."""

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, Tensor | int]:
        loss, count = super().loss(output, batch)
        return 50 * loss, count


def test_one_process_takes_it_too() -> None:
    proof = samestep.verify(recipe(), engine="deepspeed", micro_batch=5, device="cpu")
    assert proof.same_step, proof


class OutOfRange(Points):
    def collate(self, samples: Sequence[Any]) -> samestep.Batch:
        return samestep.Batch(torch.stack([x for x, _ in samples]), torch.arange(len(samples)))


def test_a_label_out_of_range_is_one_sentence(tmp_path: Path) -> None:
    sentence = r"step 0, samples [\d, ]+\.\.\.: a label or an id is out of range \(Target \d is out"
    with pytest.raises(samestep.UserError, match=sentence):
        samestep.train(
            recipe(task=OutOfRange()),
            engine="deepspeed",
            layout="single",
            device="cpu",
            folder=tmp_path / "run",
            check=False,
        )


class HalfUsed(Points):
    """A layer that no sample uses."""

    def model(self) -> nn.Module:
        return Half(self.classes)


class Half(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, classes), nn.Linear(4, classes)

    def forward(self, points: Tensor) -> Tensor:
        return self.used(points)


class OneSided(Points):
    """A layer that one rank's samples use, and the other's do not."""

    def model(self) -> nn.Module:
        return Sided(self.classes)


class Sided(Half):
    def forward(self, points: Tensor) -> Tensor:
        used = self.used(points)
        return used + self.unused(points) if self.training and dist.get_rank() == 1 else used


@pytest.mark.slow
def test_unused_parameters_keep_their_values_or_are_refused() -> None:
    half = recipe(task=HalfUsed(), optimizer=samestep.AdamW(lr=1e-2, weight_decay=0.1))
    sided = recipe(task=OneSided())
    cases: dict[str, Any] = {layout: (half, layout, {"engine": "deepspeed"}) for layout in ("dp2", "zero2x2")}
    sides = ("zero1x2", "zero2x2")
    apart = {"engine": "deepspeed", "micro_batch": 5}
    cases |= {f"{layout}, one rank": (sided, layout, apart) for layout in (*sides, "fsdp2")}
    proofs = prove(cases)
    assert same(proofs, ["dp2"]) == {}
    assert "4 parameters (counted over all ranks) unused" in str(proofs["zero2x2"])
    for layout in sides:
        assert "used parameters that others' did not (unused.bias, unused.weight)" in str(
            proofs[f"{layout}, one rank"]
        )
    # As rank 0 tells it; rank 1 "runs unused" there.
    assert "a forward ends where other ranks did not" in str(proofs["fsdp2, one rank"])


class LateSided(Points):
    """The same, from the third forward on."""

    def model(self) -> nn.Module:
        return Later(self.classes)


class Later(Half):
    forwards = 0

    def forward(self, points: Tensor) -> Tensor:
        self.forwards += self.training
        both = self.used(points) + self.unused(points)
        return both + self.used(points) if self.forwards > 2 and dist.get_rank() == 1 else both


@pytest.mark.slow
def test_a_forward_that_would_wait_for_ever_ends(tmp_path: Path) -> None:
    with pytest.raises(samestep.UserError, match="a forward runs used where the first forward did not"):
        samestep.train(recipe(task=LateSided()), "fsdp2", engine="deepspeed", device="cpu", folder=tmp_path / "run")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("dp2 fsdp2", 'DeepSpeed shards over all ranks; use "fsdp4"'),
        ("dp2 offload=optimizer", "from ZeRO 1 on; use zero1x2 offload=optimizer"),
        ("zero2x2 offload=parameters", "at ZeRO 3 alone; use fsdp2 offload=parameters"),
        ("zero1x2 offload=optimizer-disk", "to disk at ZeRO 3 alone; use fsdp2 offload=optimizer-disk"),
        ("fsdp2 offload=parameters-disk", 'engine "deepspeed" has no offload=parameters-disk yet'),
        ("tp2", 'engine "deepspeed" does not split tensor yet'),
    ],
)
def test_layouts_that_it_does_not_have_are_refused(layout: str, message: str) -> None:
    with pytest.raises(samestep.LayoutError, match="(?s)" + message.replace("(", r"\(")):
        samestep.train(recipe(), layout=layout, engine="deepspeed")


@pytest.mark.slow
def test_low_precision_its_scheduler_and_its_tensorboard(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        bf16={"enabled": True},
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.02, "warmup_type": "linear"},
        },
        tensorboard={"enabled": True, "output_path": str(tmp_path / "board"), "job_name": "points"},
    )
    asked = samestep.Recipe(task=Points(), batch=40, epochs=6, optimizer=samestep.AdamW(lr=0.02))
    result = samestep.train(
        asked, "dp2", engine="deepspeed", engine_config=path, micro_batch=7, device="cpu", folder=tmp_path / "run"
    )
    assert result.losses[-1] < 0.9 * result.losses[0]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rates = [json.loads(line)["lr"] for line in lines]
    # Three micro-batches on each of two ranks, and the rate moves once a step. DeepSpeed counts from the second one.
    assert rates[:8] == pytest.approx([0.02 * min(1, max(0, step - 1) / 4) for step in range(8)])
    assert any((tmp_path / "board").rglob("events.out.tfevents*"))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_scaled_loss_moves_the_parameters_as_far(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch computes in float16 on every CPU, only slowly; DeepSpeed asks for a fast one.
    with environment.deepspeed_settings("cpu", 0):
        accelerator: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    monkeypatch.setattr(type(accelerator), "is_fp16_supported", lambda self: True)
    path = written(tmp_path, fp16={"enabled": True, "initial_scale_power": 7}, zero_optimization={"stage": stage})
    task, moved = Points(), {}
    runs: list[tuple[Any, Path | None]] = [("fp32", None), ("fp16", path)]
    for precision, config in runs:
        with samestep.session(
            "single", engine="deepspeed", precision=precision, engine_config=config, device="cpu"
        ) as session:
            torch.manual_seed(0)
            model = task.model()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
            for batch in session.batches(task.train_set(), batch=33, collate=task.collate, steps=2):
                session.step(batch, task.loss)
            after = session.trainer.state()
            moved[precision] = torch.cat([(after[name] - before[name]).flatten() for name in before])
    assert torch.dist(moved["fp16"], moved["fp32"]) < 0.02 * moved["fp32"].norm()


def steps(layout: str, folder: str, *, again: bool) -> tuple[list[float], Any]:
    """Losses of steps 3 to 5, without a stop or from the checkpoint after step 2; and what came with it."""
    task, losses, seen = Points(), list[float](), None
    with samestep.session(layout, engine="deepspeed", device="cpu", threads=1) as session:
        torch.manual_seed(int(again))
        model = task.model()
        session.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        trainer: Any = session.trainer
        if again:
            seen = trainer.load_checkpoint(folder, trusted=True)["seen"]
        for batch in session.batches(task.train_set(), batch=33, collate=task.collate, steps=6, start=3 * again):
            losses.append(session.step(batch, task.loss).loss.item())
            if batch.step == 2:
                trainer.save_checkpoint(folder, client_state={"seen": 99})
    return losses[-3:], seen


def around_checkpoints(layouts: list[str], folder: Path) -> dict[str, Any]:
    with join(device="cpu", threads=1):
        return {each: [steps(each, str(folder / each), again=again) for again in (False, True)] for each in layouts}


@pytest.mark.parametrize(
    "layouts", [["fsdp2"], pytest.param(["dp2", "zero1x2", "zero2x2"], marks=pytest.mark.slow)], ids=" ".join
)
def test_a_checkpoint_goes_on_where_it_was(layouts: list[str], tmp_path: Path) -> None:
    found = local.start(around_checkpoints, (layouts, tmp_path), 2)
    for layout in layouts:
        (losses, _), (resumed, seen) = found[layout]
        assert resumed == pytest.approx(losses, rel=1e-6), layout
        assert seen == 99


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with samestep.session("single", engine="deepspeed", device="cpu") as session:
        model = Points().model()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        trainer: Any = session.trainer
        with pytest.raises(samestep.UserError, match="holds no DeepSpeed checkpoint"):
            trainer.load_checkpoint(tmp_path, trusted=True)


def test_a_pickle_is_not_read_unless_it_is_trusted(tmp_path: Path) -> None:
    trace, folder = tmp_path / "trace", tmp_path / "checkpoint"
    (folder / "step").mkdir(parents=True)
    (folder / "latest").write_text("step", encoding="utf-8")
    torch.save({"module": trapped_state(trace)}, folder / "step" / "mp_rank_00_model_states.pt")
    with samestep.session("single", engine="deepspeed", device="cpu") as session:
        model = Points().model()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        trainer: Any = session.trainer
        for given in ({}, {"tag": "step"}, {"trusted": False}):
            with pytest.raises(samestep.UserError, match=r"by pickle, .* load_checkpoint\(\.\.\., trusted=True\)"):
                trainer.load_checkpoint(folder, **given)
        assert not trace.exists()
        with pytest.raises(FileExistsError):  # what `trusted` allows: DeepSpeed reads the file twice
            trainer.load_checkpoint(folder, trusted=True)
        assert trace.exists()


def test_shards_are_what_a_rank_holds() -> None:
    ranks = samestep.dry_run(recipe(), layout="fsdp2", engine="deepspeed", device="cpu")
    whole = 12 * sum(parameter.numel() for parameter in Points().model().parameters())  # with Adam's averages
    # Shards are padded.
    assert all(0.5 <= (rank.parameters + rank.optimizer_state) / whole < 0.6 for rank in ranks)
