"""`samestep evaluate` and `samestep predict`: scores and predictions of a checkpoint's model, in one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep import door, environment
from samestep.checkpoint.compatibility import check_base, differences, fingerprint
from samestep.convert.base import Weights
from samestep.convert.convert import recipe_of
from samestep.convert.formats import FORMATS, format_of
from samestep.data.loader import to_device
from samestep.engines.base import Checkpointed
from samestep.engines.precision import parameter_dtype
from samestep.errors import CheckpointError, UserError
from samestep.job import Job, Run
from samestep.jobfile import plain
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.parallel.state_shards import MODEL, Piece, whole_piece
from samestep.progress import phases
from samestep.progress.bars import Bar
from samestep.recipe import AdamW, Recipe
from samestep.tasks.base import Task
from samestep.tasks.prediction import Prediction, ToPredict
from samestep.tasks.registry import resolve as resolve_task
from samestep.training.fit import Training, build_model
from samestep.validation import checked

# Sections of a recipe that determine a model's output, unlike those about its training.
_DECIDES = ("task", "data", "model", "args", "precision")


def evaluate(recipe: Recipe, checkpoint: str | Path, **run: Any) -> dict[str, Any]:
    """The task's metrics over its held-out samples, of a checkpoint's model, in this process.

    `checkpoint` is one of samestep's, a run's folder (its newest is taken), or weights of any format that
    `samestep checkpoint convert` reads. `run` takes device, threads and workers. Raises UserError.
    """
    return evaluate_job(Job(recipe=recipe, run=checked(Run, run, prefix=("run",))), Path(checkpoint))


def load_model(recipe: Recipe, checkpoint: str | Path) -> nn.Module:
    """Return the recipe's model with a checkpoint's weights, on the CPU, in evaluation mode.

    `checkpoint` as in `evaluate`. Raises UserError where the checkpoint is damaged, or another model's.
    """
    with _weights(Path(checkpoint)) as weights:
        recipe = _with_adapter(recipe, weights)
    model = build_model(resolve_task(recipe), recipe).model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    every_name = model.named_parameters(remove_duplicate=False)
    tied = {name: names[id(parameter)] for name, parameter in every_name if names[id(parameter)] != name}
    memory = {name: value for name, value in model.state_dict().items() if name not in tied}
    with _weights(Path(checkpoint)) as weights:
        _fill(memory, tied, weights, Path(checkpoint))
    return model.eval()


@phases.command("evaluate")
def evaluate_job(job: Job, checkpoint: Path) -> dict[str, Any]:
    """Compute the metrics of a job's held-out samples with a checkpoint's model. Raises UserError."""
    job = _alone(job)
    task = door.check(job).task
    _check_held_out(task, "")
    with (
        _model(job, task, checkpoint) as training,
        Bar("evaluate", 1) as bar,
        phases.phase("scoring the held-out samples"),
    ):
        return training.evaluate(bar)


def predict_job(job: Job, checkpoint: Path, file: Path | None, new_tokens: int = 0) -> Iterator[Prediction]:
    """Yield predictions of a checkpoint's model for a file's samples, or the held-out ones. Raises UserError."""
    job = _alone(job)
    task = door.check(job).task
    if file is None:
        _check_held_out(task, "--input")
    elif task.predicts_from is None:
        raise UserError(
            f"--input {file}: task {type(task).__name__} predicts its held-out samples alone; leave --input out, or "
            "give the task a `predict` of its own"
        )
    if new_tokens and not task.writes_text:
        raise UserError(f"--new-tokens is {new_tokens}, and task {type(task).__name__} writes no text; leave it out")
    request = ToPredict(file=file, batch=job.recipe.evaluation.batch, new_tokens=new_tokens)
    with _model(job, task, checkpoint) as training:
        trainer, device = training.session.trainer, training.session.world.device
        dtype = parameter_dtype(job.recipe.precision)
        yield from task.predict(lambda inputs: trainer.predict(to_device(inputs, device, dtype)), request)


@contextmanager
def conversation(checkpoint: Path, job: Job | None) -> Iterator[Callable[[Sequence[Mapping[str, Any]], int], Any]]:
    """Context of a function that answers conversations, by a checkpoint's model: messages, most tokens -> pieces.

    `job`: None for that of the checkpoint. Raises UserError where nothing says what was trained, or its task has no
    conversations.
    """
    recipe = job.recipe if job is not None else None
    if recipe is None:
        with _weights(checkpoint) as weights:
            recipe = recipe_of(weights)
    if recipe is None:
        raise UserError(f"{checkpoint} doesn't say what was trained; use --job JOB.yaml, of the job that trained it")
    task = resolve_task(recipe)
    if type(task).answer is Task.answer:
        raise UserError(
            f"task {recipe.task} has no conversations; use a job of task chat, or samestep predict for its samples"
        )
    with phases.phase(f"reading {checkpoint}"):
        model = load_model(recipe, checkpoint)

    def answer(messages: Sequence[Mapping[str, Any]], most: int) -> Any:
        with torch.inference_mode():
            yield from task.answer(lambda inputs: model(**inputs), messages, most, remembers=True) or ()

    yield answer


def _alone(job: Job) -> Job:
    """Return the job for one process, whatever layout trains it."""
    ranks = environment.ranks()
    if ranks is not None and ranks.world_size > 1:
        raise UserError("this command works in one process; start it without a launcher")
    run = job.run
    recipe = replace(job.recipe, communication=None)
    return replace(job, recipe=recipe, run=Run(device=run.device, threads=run.threads, workers=run.workers))


def _check_held_out(task: Task, instead: str) -> None:
    """Raise UserError for a task without held-out samples."""
    samples = task.eval_set()
    if samples is None or len(samples) == 0:
        raise UserError(
            f"task {type(task).__name__} has no held-out samples; use {instead or 'recipe.data.held_out'}"
        )


@contextmanager
def _model(job: Job, task: Task, checkpoint: Path) -> Iterator[Training]:
    """Build the job's model with a checkpoint's weights, prepared as in training."""
    with _weights(checkpoint) as weights, join(alone=True, device=job.run.device, threads=job.run.threads) as world:
        job = replace(job, recipe=_with_adapter(job.recipe, weights))
        training = Training(job, task, world, Layout())
        recipe = plain(job.recipe, written=True)
        if not isinstance(job.recipe.task, str):
            recipe["task"] = type(job.recipe.task).__name__
        for line in differences(weights.recipe, recipe):
            if line.split()[0].split(".")[1] in _DECIDES:
                training.session.warn(f"the checkpoint was trained otherwise: {line}")
        trainer = training.session.trainer
        assert isinstance(trainer, Checkpointed)  # true of the native engine's

        def read(pieces: Mapping[str, Piece]) -> None:
            """Read the checkpoint into the model's parameters, in place."""
            memory = {name.removeprefix(MODEL): box.values for name, piece in pieces.items() for box in piece.boxes}
            _fill(memory, trainer.tied(), weights, checkpoint)

        with phases.phase(f"reading {checkpoint}"):
            trainer.restore(0, {}, read, {})
        yield training


# Keys of PEFT's configuration, and the recipe's. Those that the recipe doesn't have change what an adapter computes.
_PEFT_KEYS = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rank_stabilized"}
_PEFT_UNKNOWN = ("use_dora", "rank_pattern", "alpha_pattern", "use_qalora", "lora_bias")


def _with_adapter(recipe: Recipe, weights: Weights) -> Recipe:
    """Return the recipe of these weights' model: without adapters if they were merged into their base.

    Raises CheckpointError for adapters with other settings.
    """
    if recipe.adapter is None:
        return recipe
    if weights.base is None and not any(".lora_A." in f".{name}" for name in weights.entries):
        # Groups may name adapters' parameters, and some optimizers, such as Muon, accept matrices only.
        return replace(recipe, adapter=None, groups=(), optimizer=AdamW())
    trained_with = weights.base.adapter if weights.base is not None else {}
    for key, name in _PEFT_KEYS.items():
        value = getattr(recipe.adapter, name)
        if key in trained_with and trained_with[key] != value:
            raise CheckpointError(
                f"recipe.adapter.{name} is {value}, and the adapters were trained with {trained_with[key]}"
            )
    for key in _PEFT_UNKNOWN:
        if trained_with.get(key):
            raise CheckpointError(
                f"the adapters were trained with {key}, which recipe.adapter doesn't have; load them with PEFT, in a "
                "task whose model() gives its model"
            )
    return recipe


@contextmanager
def _weights(checkpoint: Path) -> Iterator[Weights]:
    """Open the checkpoint's weights, in any known format."""
    with FORMATS[format_of(checkpoint)].open(checkpoint) as weights:
        yield weights


def _fill(memory: Mapping[str, Tensor], tied: Mapping[str, str], weights: Weights, path: Path) -> None:
    """Read weights into a model's memory. A tied parameter may have any of its names.

    Raises CheckpointError for another model's weights.
    """
    names_there = weights.names()
    names = {name: other for other, name in tied.items() if other in names_there}
    names |= {name: name for name in memory if name in names_there}
    left_out = _left_out(memory, weights, path)
    for name, value in memory.items():
        if name in left_out:
            continue
        if name not in names:
            raise CheckpointError(f"{path} has no {name}, and the job's model has")
        entry = weights.entries[names_there[names[name]]]
        if entry.shape != value.shape:
            raise CheckpointError(
                f"{path}: {name} has shape {list(entry.shape)}, and in the job's model {list(value.shape)}"
            )
    for name in names_there:
        if name not in memory and name not in tied:
            raise CheckpointError(f"{path} holds {name}, and the job's model has none")
    for name, value in memory.items():
        if name not in left_out:
            value.copy_(weights.read(names_there[names[name]]))


def _left_out(memory: Mapping[str, Tensor], weights: Weights, path: Path) -> set[str]:
    """Return the names left out of the weights, which are the adapters' base. Raises CheckpointError for another."""
    base = weights.base
    if base is None:
        return set()
    if not base.fingerprint:  # adapters of other tools, with unknown base
        names_there = weights.names()
        return {name for name in memory if name not in names_there and ".lora_" not in name}
    held = {MODEL + name: whole_piece(value) for name, value in memory.items()}
    here = [name for name in base.left_out if name in memory]
    check_base(base, here, fingerprint(held, here), path)
    return set(here)
