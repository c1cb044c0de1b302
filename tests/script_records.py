"""Records of scripts, written as a rank's recorder writes them, for a model of two parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.recording.store import RecordWriter


@dataclass(kw_only=True)
class Step:
    """One step of one rank."""

    rows: Sequence[str]
    gradients: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    losses: Sequence[tuple[float, int]] = ((1.0, 0),)  # given to backward, with the targets of a mean
    lr: float = 0.1
    decay: float = 0.0
    clips: Sequence[tuple[float, float]] = ()  # norm and limit
    places: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of parameters that are no wholes
    before: Mapping[str, Tensor] = field(default_factory=dict)  # what the script has changed since the last step
    outputs: Sequence[float] = ()  # the norm of a module's output, of each row
    shape: Sequence[int] = ()  # of a row
    state: Mapping[str, Tensor] = field(default_factory=dict)  # what modules carry along
    own: Mapping[str, Tensor] = field(default_factory=dict)  # what this rank's loss gives
    held: Mapping[str, Tensor] = field(default_factory=dict)  # copies of the weights, COPY/NAME
    rates: Mapping[str, float] = field(default_factory=dict)  # of parameters in groups of their own


@dataclass(kw_only=True)
class Record:
    """What a rank leaves."""

    steps: Sequence[Step]
    before: Mapping[str, Tensor]
    evaluated: Sequence[str] = ()
    end: str = "ended"
    processes: int = 0
    iterations: Sequence[Sequence[Sequence[int]]] = ()  # the samples of each batch, by the pass over a DataLoader
    size: int = 16  # of the data set
    iterations_end: bool = False
    idle: bool = False  # has no optimizer
    batches: int = 1  # that DataLoaders gave
    emptied: bool = False
    reduced: Sequence[float] = ()  # numbers after the evaluation
    loaded: int = 0  # steps after which an optimizer's state was loaded


def write(folder: Path, ranks: Sequence[Record]) -> None:
    for number, record in enumerate(ranks):
        _write(RecordWriter(folder / f"rank-{number}"), record)


def _write(writer: RecordWriter, record: Record) -> None:
    for number, step in enumerate(record.steps):
        kinds = {
            "gradient": step.gradients,
            "after": step.after,
            "before": step.before if number else record.before,
            "state": step.state,
            "held": step.held,
            "own": step.own,
        }
        tensors = {
            kind: [{**_place(name, value, step), **writer.tensor(value)} for name, value in values.items()]
            for kind, values in kinds.items()
            if values
        }
        rows = {"rows": {"0": list(step.rows)}, "batch": len(step.rows)}
        forward = {"model": "Net", **rows, "counts": {}, "random": "r", "shapes": {"0": list(step.shape)}}
        if step.outputs:
            output = {
                "module": "body",
                "kind": "Linear",
                "numbers": 4,
                "norms": step.outputs,
                "products": step.outputs,
            }
            forward["activations"] = [{name: _plain(value) for name, value in output.items()}]
        losses = [{"value": value, "targets": count, "after": 1} for value, count in step.losses]
        if record.idle:
            writer.event("opened", forwards=[forward], loss=losses[0])
            continue
        own = [{"names": [name], "options": {"lr": rate}} for name, rate in step.rates.items()]
        writer.event(
            "step",
            forwards=[forward],
            losses=losses,
            clips=[{"norm": norm, "limit": limit, "after": 1} for norm, limit in step.clips],
            groups=[
                {
                    "names": [name for name in step.gradients if name not in step.rates],
                    "options": {"lr": step.lr, "weight_decay": step.decay},
                },
                *own,
            ],
            changed=list(step.before),
            tensors=tensors,
            dropout=False,
            optimizer=0,
            number=number + 1,
        )
    if record.loaded:
        writer.event("loaded", after=record.loaded)
    if record.emptied:
        writer.event("emptied")
    if record.evaluated:
        rows = {"0": list(record.evaluated)}
        writer.event("evaluation", after=len(record.steps), model="Net", rows=rows, batch=1, counts={})
    if record.reduced:
        writer.event("reduced", after=len(record.steps), values=list(record.reduced))
    for number, batches in enumerate(record.iterations):
        writer.event("iteration", iteration=number, size=record.size, made=0)
        writer.event("iteration trains", iteration=number)
        for batch in batches:
            writer.event("indices", iteration=number, indices=list(batch))
        if record.iterations_end:
            writer.event("iteration ends", iteration=number)
    writer.event("end", how=record.end, processes=record.processes, batches=record.batches, open=[])
    writer.close()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _place(name: str, value: Tensor, step: Step) -> dict[str, Any]:
    return {"name": name, "whole": list(value.shape), "start": None, "offset": None, **step.places.get(name, {})}


def runs(folder: Path, *, alone: Record, split: Sequence[Record], again: Record | None = None) -> Path:
    """The three runs of a proof; the repetition is as the run alone, within rounding."""
    write(folder / "alone", [alone])
    write(folder / "again", [again or alone])
    write(folder / "split", split)
    return folder


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"body.weight": torch.randn(4, 3, generator=generator), "head.bias": torch.randn(5, generator=generator)}
