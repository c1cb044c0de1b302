"""What is kept of adapters: checkpoints without the base, PEFT's folders, and weights merged into the base."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_tasks import PeftNextWord
from model_tasks import NextWord
from resuming import job_of, largest_difference, train_all
from torch import Tensor, nn

import samestep
from samestep import CheckpointError, LoRA, UserError
from samestep.checkpoint.safe_index import entries, read_metadata
from samestep.convert.convert import convert
from samestep.inference import evaluate, load_model
from samestep.job import Checkpointing, Job
from samestep.parallel.low_rank import adapted_layers
from samestep.recipe import NamedOptimizer

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")]

STEPS, SAVED_AT = 4, 2
ROUNDED: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}  # merged weights, and PEFT's adapters, are in float32
WORDS = torch.tensor([[3, 5, 7, 11], [1, 2, 30, 4]])


def recipe(kind: str = "llama", **values: Any) -> samestep.Recipe:
    whole = ("lm_head",) if kind == "llama" else ()
    adapter = LoRA(rank=3, alpha=5, dropout=0.2, rank_stabilized=kind == "gpt2", also_train=whole)
    values = {"task": NextWord(kind=kind, layers=2), "adapter": adapter, **values}
    optimizer = samestep.AdamW(lr=2e-2)
    return samestep.Recipe(batch=8, steps=STEPS, precision="fp64", optimizer=optimizer, **values)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, Path]:
    """A job with adapters, and its folder after all steps by one process."""
    job = job_of(recipe(request.param), "single", tmp_path_factory.mktemp("run"), checkpoint=Checkpointing(every=2))
    (result,) = train_all([job])
    return job, result.folder


def output(model: nn.Module) -> Tensor:
    model.double().eval()
    with torch.no_grad():
        return model(input_ids=WORDS).logits


def plain(job: Job) -> nn.Module:
    """The job's model without adapters, with the base's weights."""
    torch.manual_seed(job.recipe.seed)
    return job.recipe.task.model()


@pytest.mark.slow
def test_what_was_trained_under_one_layout_goes_on_under_another(tmp_path: Path) -> None:
    go_on(tmp_path, ("fsdp2",), ("tp2",))


@pytest.mark.slow
def test_what_was_trained_under_any_layout_goes_on_under_any_other(tmp_path: Path) -> None:
    go_on(tmp_path, ("tp2", "pp2", "zero1x2"), ("dp2", "fsdp2 offload=parameters-disk", "pp2", "tp2 sequence=split"))


def go_on(tmp_path: Path, sources: tuple[str, ...], targets: tuple[str, ...]) -> None:
    """Save under each source, go on under each target, and hold the losses against those of one process."""
    wanted = recipe()
    (alone,) = train_all([job_of(wanted, "single", tmp_path / "alone")])
    saving = [job_of(wanted, each, tmp_path / each, checkpoint=Checkpointing(every=SAVED_AT)) for each in sources]
    saved = train_all(saving)
    places = [str(each.folder / "checkpoints" / f"step-{SAVED_AT}") for each in saved]
    resuming = [
        job_of(wanted, target, tmp_path / f"{number}-{target}", checkpoint=Checkpointing(resume=place))
        for number, place in enumerate(places)
        for target in targets
    ]
    for result in train_all(resuming):
        assert result.first_step == SAVED_AT
        assert largest_difference(result.losses, alone.losses[SAVED_AT:]) < 1e-12


def test_a_checkpoint_holds_no_base(trained: tuple[Job, Path]) -> None:
    job, folder = trained
    checkpoint = folder / "checkpoints" / f"step-{STEPS}"
    model = load_model(job.recipe, checkpoint)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    told = json.loads((checkpoint / "checkpoint.json").read_text())["base"]
    assert set(told["left_out"]) == frozen
    held = {name for name in entries(read_metadata(checkpoint)) if not name.startswith("random.")}
    trained_names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name.removeprefix("model.") for name in held if name.startswith("model.")} == trained_names
    assert {name.removeprefix("optimizer.").rpartition(".")[0] for name in held if name.startswith("optimizer.")} == (
        trained_names
    )


def test_another_base_is_refused(trained: tuple[Job, Path], tmp_path: Path) -> None:
    job, folder = trained

    class Other(type(job.recipe.task)):
        def model(self) -> nn.Module:
            model = super().model()
            with torch.no_grad():
                next(layer for name, layer in model.named_parameters() if "embed" in name or "wte" in name).mul_(1.01)
            return model

    other = replace(job.recipe, task=Other(kind=job.recipe.task.kind, layers=2))
    with pytest.raises(CheckpointError, match="was trained with other frozen parameters"):
        load_model(other, folder)
    resume = Checkpointing(resume=str(folder))
    with pytest.raises(CheckpointError):
        samestep.train(other, folder=tmp_path / "again", threads=1, checkpoint=resume)


def test_merged_weights_are_a_plain_model_of_the_same_output(trained: tuple[Job, Path], tmp_path: Path) -> None:
    job, folder = trained
    convert(folder, tmp_path / "merged.safetensors", from_="samestep", job=job, merge=True)
    model = load_model(job.recipe, folder)
    expected = output(model)
    assert (output(plain(job)) - expected).abs().max() > 1e-3
    merged = load_model(replace(job.recipe, adapter=None), tmp_path / "merged.safetensors")
    assert not adapted_layers(merged)
    torch.testing.assert_close(output(merged), expected, **ROUNDED)
    # The job with an adapter takes merged weights as well.
    torch.testing.assert_close(output(load_model(job.recipe, tmp_path / "merged.safetensors")), expected, **ROUNDED)


def test_peft_reads_what_was_trained(trained: tuple[Job, Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    job, folder = trained
    convert(folder, tmp_path / "adapter", from_="samestep", to="peft")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    theirs = peft.PeftModel.from_pretrained(plain(job), str(tmp_path / "adapter"))
    torch.testing.assert_close(output(theirs), output(load_model(job.recipe, folder)), **ROUNDED)


def test_predictions_are_the_same_from_every_kind_of_file(trained: tuple[Job, Path], tmp_path: Path) -> None:
    job, folder = trained
    convert(folder, tmp_path / "adapter", from_="samestep", to="peft")
    convert(folder, tmp_path / "merged.pt", from_="samestep", to="state-dict", job=job, merge=True)
    convert(folder, tmp_path / "alone.safetensors", from_="samestep")
    expected = output(load_model(job.recipe, folder))
    found: Mapping[str, Any] = evaluate(job.recipe, folder)
    for place in (tmp_path / "adapter", tmp_path / "merged.pt", folder / "model.safetensors"):
        torch.testing.assert_close(output(load_model(job.recipe, place)), expected, **ROUNDED)
        assert evaluate(job.recipe, place) == found
    # The optimizer of the adapters, which takes matrices alone, is none that merged weights could have.
    of_matrices = replace(job.recipe, optimizer=NamedOptimizer(name="torch.optim.Muon", lr=0.02))
    assert evaluate(of_matrices, tmp_path / "merged.pt") == found


def test_a_base_is_asked_for_where_it_is_wanted(trained: tuple[Job, Path], tmp_path: Path) -> None:
    job, folder = trained
    with pytest.raises(
        CheckpointError,
        match=r"holds adapters without their base, .* use --merge, or --to samestep, state-dict, safetensors, peft",
    ):
        convert(folder, tmp_path / "whole", from_="samestep", to="hugging-face", job=job)
    with pytest.raises(UserError, match="--merge: the base of these adapters is what a job's task builds"):
        convert(folder, tmp_path / "whole", from_="samestep", to="safetensors", merge=True)
    without = replace(job, recipe=replace(job.recipe, adapter=None))
    with pytest.raises(CheckpointError, match="the job's model has no adapters to merge"):
        convert(folder, tmp_path / "whole", from_="samestep", to="safetensors", job=without, merge=True)
    with pytest.raises(
        CheckpointError, match=r"recipe\.adapter\.alpha is 7\.0, and the adapters were trained with 5"
    ):
        load_model(replace(job.recipe, adapter=LoRA(rank=3, alpha=7)), folder)


@pytest.mark.parametrize("key", ["use_rslora", "use_dora", "rank_pattern"])
def test_adapters_of_other_kinds_are_refused(key: str, trained: tuple[Job, Path], tmp_path: Path) -> None:
    """They would be loaded with another scale, or without a part."""
    job, folder = trained
    convert(folder, tmp_path / "adapter", from_="samestep", to="peft")
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    others = {"use_rslora": not config["use_rslora"], "use_dora": True, "rank_pattern": {"q_proj": 2}}
    config[key] = others[key]
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="the adapters were trained with") as refused:
        load_model(job.recipe, tmp_path / "adapter")
    if key == "use_rslora":
        assert "recipe.adapter.rank_stabilized is" in str(refused.value)
        adapter = job.recipe.adapter
        assert adapter is not None
        other = replace(adapter, rank_stabilized=not adapter.rank_stabilized)
        load_model(replace(job.recipe, adapter=other), tmp_path / "adapter")
    else:
        assert f"with {key}, which recipe.adapter doesn't have" in str(refused.value)


def test_no_folder_of_peft_is_made_of_other_weights(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match="not those of adapters alone"):
        convert(tmp_path / "whole.pt", tmp_path / "adapter", to="peft")


def test_models_of_peft_are_saved_without_their_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    wanted = recipe(task=PeftNextWord(kind="llama", layers=2), adapter=None)
    job = job_of(wanted, "single", tmp_path / "run", checkpoint=Checkpointing())
    (result,) = train_all([job])
    checkpoint = result.folder / "checkpoints" / f"step-{STEPS}"
    told = json.loads((checkpoint / "checkpoint.json").read_text())["base"]
    assert any(name.endswith("base_layer.weight") for name in told["left_out"])
    assert not any("lora_" in name for name in told["left_out"])
    expected = output(load_model(wanted, checkpoint))
    convert(result.folder, tmp_path / "adapter", from_="samestep", to="peft")
    base = NextWord(kind="llama", layers=2)
    torch.manual_seed(wanted.seed)
    theirs = peft.PeftModel.from_pretrained(base.model(), str(tmp_path / "adapter"))
    torch.testing.assert_close(output(theirs), expected, **ROUNDED)
    convert(result.folder, tmp_path / "merged.safetensors", from_="samestep", job=job, merge=True)
    merged = load_model(replace(wanted, task=base), tmp_path / "merged.safetensors")
    torch.testing.assert_close(output(merged), expected, **ROUNDED)


def test_frozen_parameters_stay_in_a_checkpoint_where_that_is_asked_for(tmp_path: Path) -> None:
    job = job_of(recipe(), "single", tmp_path / "run", checkpoint=Checkpointing(only_trained=False))
    (result,) = train_all([job])
    assert json.loads((result.folder / f"checkpoints/step-{STEPS}/checkpoint.json").read_text())["base"] is None
    convert(result.folder, tmp_path / "weights.safetensors", from_="samestep")
    assert evaluate(job.recipe, tmp_path / "weights.safetensors") == evaluate(job.recipe, result.folder)


class Moved(nn.Module):
    """A model that keeps an average in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 3), nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.kept.add_(1)
        return self.layer(x)


class OfMoved(samestep.Task):
    def model(self) -> nn.Module:
        return Moved()

    def train_set(self) -> samestep.Samples:
        return [(torch.randn(4, generator=torch.Generator().manual_seed(n)), n % 3) for n in range(16)]

    def loss(self, output: Tensor, batch: samestep.Batch) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(output, batch.targets, reduction="sum"), len(batch.targets)


def test_frozen_parameters_that_move_are_not_left_out(tmp_path: Path) -> None:
    wanted = samestep.Recipe(task=OfMoved(), batch=4, steps=2)
    asked: Any = {"threads": 1, "check": False}
    with pytest.raises(CheckpointError, match="a frozen parameter has changed since the training began"):
        samestep.train(wanted, folder=tmp_path / "a", checkpoint={"only_trained": True}, **asked)
    samestep.train(wanted, folder=tmp_path / "b", checkpoint={}, **asked)
