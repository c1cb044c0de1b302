"""The ways to train that turns.py compares: hand-written loops, other libraries, samestep.

Each is a generator that takes one step per iteration. The libraries are used as their users write them, with a record
of every step's global loss, as samestep and the hand-written loop have. All train on the same global batches from the
same initial weights, with the same optimizer, schedule and clipping.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.overhead import handwritten, samestep
from benchmarks.peers.job import PeerJob
from samestep.data.types import Batch
from samestep.engines.deepspeed.initialize import deepspeed as import_deepspeed
from samestep.engines.deepspeed.initialize import quietly
from samestep.handwritten.loop import Loop
from samestep.job import Job, Run
from samestep.launch.world import World
from samestep.layout import Layout
from samestep.tasks.base import Task, call
from samestep.training.fit import Training


@dataclass(frozen=True, kw_only=True)
class Place:
    """The arguments of a way on its rank."""

    job: Job
    task: Task
    world: World
    local_ranks: int  # ranks on this host
    folder: Path | None  # for its records, on rank 0


Steps = Callable[[Place], Iterator[None]]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train."""

    title: str
    steps: Steps
    over_gloo: bool = True  # its default group is gloo; samestep's own ways use the transport that samestep chooses


def no_messages(**settings: Any) -> Steps:
    """Trains on the rank's own samples of each step, and updates with their gradient, without communication."""

    def steps(place: Place) -> Iterator[None]:
        recipe, world = place.job.recipe, place.world
        alone = replace(recipe, batch=max(1, recipe.batch // world.world_size))
        return handwritten(Loop(alone, place.task, device=world.device, **settings), place.folder)

    return steps


def ddp(**settings: Any) -> Steps:
    def steps(place: Place) -> Iterator[None]:
        recipe, world = place.job.recipe, place.world
        ranks = {"rank": world.rank, "world_size": world.world_size}
        return handwritten(Loop(recipe, place.task, device=world.device, **ranks, **settings), place.folder)

    return steps


def _peer(place: Place) -> PeerJob:
    return PeerJob(place.job.recipe, place.world.rank, place.world.world_size, task=place.task)


def _records(job: PeerJob, place: Place, norms: Iterator[Any]) -> Iterator[None]:
    """Record the loss and the gradient norm of each step."""
    job.begin()
    with (place.folder / "peer.jsonl" if place.folder else Path(os.devnull)).open("w", buffering=1) as log:
        for number, norm in enumerate(norms):
            log.write(json.dumps({"step": number, "loss": job.losses[-1], "grad_norm": float(norm)}) + "\n")
            yield


def fabric(place: Place) -> Iterator[None]:
    from benchmarks.peers.fabric import launched, step_of

    job = _peer(place)
    step = step_of(job, launched(job, place.local_ranks, job.place.of // place.local_ranks))
    return _records(job, place, map(step, job.loader()))


def accelerate(place: Place) -> Iterator[None]:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    job, world = _peer(place), place.world
    accelerator = Accelerator(
        cpu=world.device.type == "cpu",
        mixed_precision="bf16" if job.recipe.precision == "bf16" else "no",
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )
    # The loader already deals samples to ranks, and the schedule counts steps, so neither is prepared.
    model, optimizer = accelerator.prepare(job.model, job.optimizer)

    def step(pair: Any) -> Any:
        samples = job.global_samples(len(job.losses))
        batch = Batch(*pair)
        with accelerator.autocast():
            loss, terms = job.task.loss(call(model, batch.inputs), batch)
        count = job.count(terms, batch, samples)
        job.send_loss(loss)
        optimizer.zero_grad()
        accelerator.backward(loss * world.world_size / count)
        norm = accelerator.clip_grad_norm_(model.parameters(), job.recipe.clip or float("inf"))
        optimizer.step()
        job.schedule.step()
        job.note_loss(count)
        return norm

    return _records(job, place, map(step, job.loader()))


def deepspeed(stage: int) -> Steps:
    """DeepSpeed's engine with this ZeRO stage; PyTorch's fused AdamW is its fastest on a CPU here."""

    def steps(place: Place) -> Iterator[None]:
        job, world = _peer(place), place.world
        package = import_deepspeed(world.device)
        share = max(1, job.recipe.batch // world.world_size)
        config = {
            "train_batch_size": share * world.world_size,
            "train_micro_batch_size_per_gpu": share,
            "gradient_clipping": job.recipe.clip or 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": job.recipe.precision == "bf16"},
        }
        with quietly(world.device):
            engine, *_ = package.initialize(
                model=job.model, optimizer=job.optimizer, lr_scheduler=job.schedule, config=config
            )

        def step(pair: Any) -> Any:
            samples = job.global_samples(len(job.losses))
            batch = Batch(*pair)
            loss, terms = job.task.loss(call(engine, batch.inputs), batch)
            count = job.count(terms, batch, samples)
            job.send_loss(loss)
            engine.backward(loss * world.world_size / count)
            engine.step()
            job.note_loss(count)
            return engine.get_global_grad_norm() or float("nan")

        return _records(job, place, map(step, job.loader()))

    return steps


def trainer(place: Place) -> Iterator[None]:
    """transformers' Trainer, whose loop runs in a thread that waits between two steps."""
    from transformers import TrainerCallback

    from benchmarks.peers.hf_trainer import JobTrainer, settings_of

    job, world = _peer(place), place.world
    go, done = threading.Semaphore(0), threading.Semaphore(0)
    failed: list[BaseException] = []

    class Turns(TrainerCallback):
        def on_step_begin(self, *arguments: Any, **options: Any) -> None:
            done.release()
            go.acquire()

    def train() -> None:
        try:
            torch.set_num_threads(world.threads)  # the setting is per thread
            settings = settings_of(job, place.folder or Path(os.devnull))
            JobTrainer(job, args=settings, train_dataset=job.samples, callbacks=[Turns()]).train()
        except BaseException as error:
            failed.append(error)
        done.release()

    def norms() -> Iterator[float]:
        while not failed:
            go.release()
            done.acquire()
            yield float("nan")
        raise failed[0]

    threading.Thread(target=train, daemon=True).start()
    done.acquire()  # wait until it is built and asks for its first step
    return _records(job, place, norms())


def native(layout: str = "dp{n}", **run: Any) -> Steps:
    """samestep with these keys of a job's `run:` section; {n} is replaced by the number of ranks."""

    def steps(place: Place) -> Iterator[None]:
        chosen = Layout.parse(layout.format(n=place.world.world_size))
        job = replace(place.job, run=Run(layout=str(chosen), **run))
        return samestep(Training(job, place.task, place.world, chosen), place.folder)

    return steps


WAYS: Mapping[str, Way] = {
    "alone": Way(title="hand-written, no messages", steps=no_messages()),
    "alone-compiled": Way(title="hand-written, no messages, torch.compile", steps=no_messages(compile=True)),
    "ddp": Way(title="hand-written DDP", steps=ddp()),
    "ddp-compiled": Way(title="hand-written DDP, torch.compile", steps=ddp(compile=True)),
    "ddp-shared-memory": Way(title="hand-written DDP in samestep's group", steps=ddp(), over_gloo=False),
    "accelerate": Way(title="Accelerate", steps=accelerate),
    "fabric": Way(title="Lightning Fabric", steps=fabric),
    "trainer": Way(title="Hugging Face Trainer", steps=trainer),
    "deepspeed": Way(title="DeepSpeed, ZeRO-0", steps=deepspeed(0)),
    "deepspeed-zero1": Way(title="DeepSpeed, ZeRO-1", steps=deepspeed(1)),
    "deepspeed-zero2": Way(title="DeepSpeed, ZeRO-2", steps=deepspeed(2)),
    "samestep": Way(title="samestep", steps=native(), over_gloo=False),
    "samestep-gloo": Way(title="samestep over gloo", steps=native()),
    "shared": Way(title="samestep, share_replicas", steps=native(share_replicas=True), over_gloo=False),
    "by-length": Way(
        title="samestep, share_replicas, group_by_length",
        steps=native(share_replicas=True, group_by_length=True),
        over_gloo=False,
    ),
    "compiled": Way(title="samestep, compile", steps=native(compile=True), over_gloo=False),
    "shared-compiled": Way(
        title="samestep, share_replicas, compile",
        steps=native(share_replicas=True, compile=True),
        over_gloo=False,
    ),
    "small-buckets": Way(title="samestep, bucket_mb 0.25", steps=native(bucket_mb=0.25), over_gloo=False),
    "tp": Way(title="samestep, tpN", steps=native("tp{n}"), over_gloo=False),
    "tp-gloo": Way(title="samestep, tpN over gloo", steps=native("tp{n}")),
    "fsdp": Way(title="samestep, fsdpN", steps=native("fsdp{n}"), over_gloo=False),
    "fsdp-gloo": Way(title="samestep, fsdpN over gloo", steps=native("fsdp{n}")),
}
