"""What the processes of the table do: one takes a model's reference steps, and ranks hold layouts against them."""

import os
import pickle
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from model_table.entry import HELD_OUT, OF_IMAGES, NotMadeError, task_of
from model_table.zoo import entry_of
from samestep import AdamW, Recipe, door, environment
from samestep.comm.group_pool import GroupPool
from samestep.comm.shared_memory.backend import for_transport
from samestep.contract.check import check_contract
from samestep.door.layouts import first_of_several
from samestep.errors import LayoutError, UserError
from samestep.job import Job, Run
from samestep.launch.fork_server import end_with_starter
from samestep.launch.world import join
from samestep.layout import Layout
from samestep.tasks.base import Task, call
from samestep.verification.noise import NoiseMeasurement
from samestep.verification.proof import Proof, Reference, hold_against, proof_job, reference

KNOWN = "known.pickle"
BATCH = 6  # which neither 4 nor 8 ranks divide


@dataclass(frozen=True, kw_only=True)
class Known:
    """A model's job as it is proved, and what one process did."""

    job: Job
    reference: Reference


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a rank, or the process of the reference, came to."""

    kind: Literal["known", "same", "different", "refused", "crash", "not made"]
    text: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)  # layouts refused before any rank starts, and why
    difference: float | None = None
    prepared: float = 0.0  # seconds of the checks before any step
    alike: bool = True  # whether every rank answers so by itself
    impossible: Mapping[str, str] = field(default_factory=dict)  # as an entry's, seen in the model
    proof: Proof | None = None  # one whose differences may be the model's own noise


def take_reference(name: str, layouts: Sequence[str], steps: int, folder: Path, output: Path, to: Connection) -> None:
    """Take a model's steps in one process, and look at which layouts are refused at once."""
    _begin(output)
    try:
        task = task_of(entry_of(name))
        began = time.monotonic()
        job = _job(task)
        layout = door.check(job).layout
        job = proof_job(job)
        check_contract(job, layout, task, spread=first_of_several(layouts, None))
        prepared = time.monotonic() - began
        refused: dict[str, str] = {}
        for layout in layouts:
            try:
                door.check(replace(job, run=replace(job.run, layout=layout)), task=task)
            except UserError as error:
                refused[layout] = str(error)
        known = reference(job, task, steps, folder, held_out=HELD_OUT)
        # By a file: the pipes of multiprocessing send tensors as shared memory of a process that soon ends.
        (folder / KNOWN).write_bytes(pickle.dumps(Known(job=job, reference=known)))
        impossible = OF_IMAGES if _takes_images_alone(task) else {}
        answer = Answer(kind="known", refused=refused, prepared=round(prepared, 2), impossible=impossible)
    except NotMadeError as error:
        answer = Answer(kind="not made", text=str(error))
    except UserError as error:
        answer = Answer(kind="refused", text=str(error))
    except BaseException:
        answer = Answer(kind="crash", text=traceback.format_exc())
    to.send(answer)


def _takes_images_alone(task: Task) -> bool:
    """Whether no layer of a model takes tokens: those with parameters take images, [samples, channels, height,
    width], or a vector a sample, and no linear layer an image whose features stand last."""
    tokens: list[str] = []

    def look(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        sizes = [value.ndim for value in arguments if isinstance(value, Tensor)]
        most = 2 if isinstance(module, nn.Linear) else 4
        if any(size == 3 or size > most for size in sizes):
            tokens.append(type(module).__name__)

    model = task.model()
    rows = task.train_set()
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(look)
    with torch.no_grad():
        call(model, task.collate([rows[0], rows[1]]).inputs)
    return not tokens and any(isinstance(module, nn.Conv2d) for module in model.modules())


def hold(
    variables: Mapping[str, str], layouts: Sequence[str], steps: int, folder: Path, output: Path, to: Connection
) -> None:
    """Hold layouts against the reference on one rank, one after the other; ends at the first that crashes."""
    _begin(output)
    os.environ.update(variables)
    known: Known = pickle.loads((folder / KNOWN).read_bytes())
    task = known.job.recipe.task
    assert isinstance(task, Task)
    try:
        with join(device="cpu", threads=1, cpu_backend=for_transport("auto")) as world:
            mine = known.reference if world.rank == 0 else None
            groups = GroupPool()
            for layout in layouts:
                to.send("began")
                try:
                    with groups.lent():
                        proof = hold_against(known.job, task, world, Layout.parse(layout), steps, mine)
                except UserError as error:
                    alike = not isinstance(error, LayoutError) or error.on_every_rank
                    to.send(Answer(kind="refused", text=str(error), alike=alike))
                    continue
                to.send(_answer(proof))
    except BaseException:
        to.send(Answer(kind="crash", text=traceback.format_exc()))
        os._exit(1)


def _answer(proof: Proof) -> Answer:
    most = proof.max_relative_difference
    return Answer(
        kind="same" if proof.same_step else "different",
        text=f"{', '.join(proof.words())} {dict(most)} {proof.worst_parameter}",
        difference=max(most.values()),
        proof=proof if proof.wants_noise() else None,
    )


def hold_against_noise(proof: Proof, steps: int, folder: Path, output: Path, to: Connection) -> None:
    """Measure the model's noise in one process, and judge a proof by it."""
    _begin(output)
    known: Known = pickle.loads((folder / KNOWN).read_bytes())
    task = known.job.recipe.task
    assert isinstance(task, Task)
    to.send(_answer(proof.held_against_noise(NoiseMeasurement(known.job, task, steps, known.reference))))


def _begin(output: Path) -> None:
    """One thread, no messages on the terminal, and an end with the process that started this one."""
    end_with_starter()
    number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(number, 1)
    os.dup2(number, 2)
    os.close(number)
    environment.adopt(environment.snapshot())


def _job(task: Task) -> Job:
    recipe = Recipe(task=task, batch=BATCH, epochs=1, clip=0.5, optimizer=AdamW(lr=1e-3))
    return Job(recipe=recipe, run=Run(device="cpu", threads=1))
