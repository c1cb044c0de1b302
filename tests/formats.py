"""Tiny models for conversions, trained or not, and readers of every format that are none of samestep's."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from small_tasks import Points
from torch import Tensor, nn

import samestep
from samestep.job import Job
from samestep.tasks.registry import resolve

WORDS = [f"word{number}" for number in range(30)]


def texts(folder: Path) -> Path:
    """A file of labelled texts."""
    path = folder / "data.jsonl"
    rows = [
        {"text": " ".join(WORDS[(n * k) % 30] for k in range(1, 2 + n % 9)), "label": "abc"[n % 3]} for n in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def classifier(folder: Path, **rest: Any) -> samestep.Recipe:
    """BERT, three classes of texts."""
    return samestep.Recipe(
        task="text-classification",
        data={"source": str(texts(folder)), "max_length": 16, "vocabulary": 200},
        model={"layers": 1, "hidden": 12, "heads": 2, "feed_forward": 21},
        **{"batch": 9, "steps": 3, **rest},
    )


def language(folder: Path, **rest: Any) -> samestep.Recipe:
    """Llama, with one table for its embeddings and its output."""
    text = "\n".join(" ".join(WORDS[(n * k) % 30] for k in range(1, 9)) for n in range(150))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    return samestep.Recipe(
        task="causal-lm",
        data={"source": str(folder / "text.txt"), "length": 11, "vocabulary": 300},
        model={"layers": 1, "hidden": 12, "heads": 2, "feed_forward": 21, "tied": True},
        **{"batch": 9, "steps": 3, **rest},
    )


RECIPES = {"bert": classifier, "llama": language}


def model_of(recipe: samestep.Recipe, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return resolve(recipe).model()


def points(task: samestep.Task | None = None, **rest: Any) -> samestep.Recipe:
    return samestep.Recipe(task=task or Points(), batch=33, steps=5, optimizer=samestep.AdamW(lr=1e-2), **rest)


def trained(
    recipe: samestep.Recipe, folder: Path, layout: str = "single", *, resume: str = "never"
) -> samestep.TrainResult:
    """Trained into a folder, with a checkpoint after the last step."""
    checkpoint = samestep.Checkpointing(resume=resume)
    run: dict[str, Any] = {"device": "cpu", "threads": 1, "log": ()}
    return samestep.train(recipe, layout, folder=folder, checkpoint=checkpoint, **run)


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and the same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def points_file(folder: Path) -> Path:
    """A state dict of the points' model, saved as one does."""
    torch.manual_seed(1)
    torch.save(Points().model().state_dict(), folder / "mlp.pt")
    return folder / "mlp.pt"


def job_file(folder: Path, recipe: samestep.Recipe) -> Path:
    import yaml

    from samestep.jobfile import plain

    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({"recipe": plain(Job(recipe=recipe).recipe)}), encoding="utf-8")
    return path


def _state_dict(path: Path, _: nn.Module) -> Mapping[str, Tensor]:
    return torch.load(path, weights_only=True)


def _ddp(path: Path, model: nn.Module) -> Mapping[str, Tensor]:
    wrapped = nn.DataParallel(model)  # it names parameters as DistributedDataParallel does
    wrapped.load_state_dict(torch.load(path, weights_only=True))
    return wrapped.module.state_dict()


def _safetensors(path: Path, _: nn.Module) -> Mapping[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def _hugging_face(path: Path, model: nn.Module) -> Mapping[str, Tensor]:
    loaded, report = type(model).from_pretrained(path, output_loading_info=True)  # pyright: ignore
    assert not any(report.values()), report
    return loaded.state_dict()


def _deepspeed(path: Path, _: nn.Module) -> Mapping[str, Tensor]:
    tag = (path / "latest").read_text(encoding="utf-8")
    return torch.load(path / tag / "mp_rank_00_model_states.pt", weights_only=True)["module"]


def _accelerate(path: Path, model: nn.Module) -> Mapping[str, Tensor]:
    from accelerate import load_checkpoint_in_model

    load_checkpoint_in_model(model, str(path), strict=True)
    return model.state_dict()


def _fsdp(path: Path, model: nn.Module) -> Mapping[str, Tensor]:
    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(path / "pytorch_model_fsdp_0"), no_dist=True)
    return state["model"]


# Each reads into a model of other weights, or without one.
READERS: Mapping[str, Callable[[Path, nn.Module], Mapping[str, Tensor]]] = {
    "state-dict": _state_dict,
    "ddp": _ddp,
    "safetensors": _safetensors,
    "hugging-face": _hugging_face,
    "deepspeed": _deepspeed,
    "fsdp": _fsdp,
    **({"accelerate": _accelerate} if importlib.util.find_spec("accelerate") else {}),
}
