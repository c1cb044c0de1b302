"""Reads tables of published step times, predicts each row, and computes the errors."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.input_files import parse_json, text_of
from samestep.layout import Layout, Recompute, Schedule
from samestep.limits import check_whole
from samestep.planning.hardware import cluster_of, device_of
from samestep.planning.memory import memory_of
from samestep.planning.shapes import Transformer, with_parameters
from samestep.planning.software import SOFTWARE, Software
from samestep.planning.stage_time import PlannedJob
from samestep.planning.step_time import step_time, with_micro_batches

_VTRAIN = {
    "# GPUs": "gpus",
    "global batch": "global_batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "seq",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
    "iteration time (ms)": "milliseconds",
}
_GPT2_VOCAB = 50257
_ALMOST = 1.05  # of a device's memory: counted memory up to this has run in published steps


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A published step time, with all that is needed to predict it."""

    group: str
    model_name: str
    model: Transformer
    layout: Layout
    global_batch: int
    micro_batch: int | None  # None: not published
    recompute_known: bool  # whether recomputation is published; if not, the least with which the step fits is assumed
    precision: str
    gpu: str
    software: Software
    seconds: float
    source: Mapping[str, Any]  # the row as it was read


@dataclass(frozen=True, kw_only=True)
class PredictedRow:
    """The prediction of a published step."""

    row: PublishedRow
    seconds: float  # predicted, of one step
    micro_batch: int  # published, or else the fastest one that fits

    def to_json(self) -> dict[str, Any]:
        """A dict of the row as it was read, and of the prediction."""
        return {
            **self.row.source,
            "predicted_layout": str(self.row.layout),
            "predicted_micro_batch": self.micro_batch,
            "published_seconds": self.row.seconds,
            "predicted_seconds": self.seconds,
            "relative_error": self.error,
        }

    @property
    def error(self) -> float:
        """The relative error, positive if the prediction is too slow."""
        return self.seconds / self.row.seconds - 1


def read_rows(file: Path, gpu: str | None) -> list[PublishedRow]:
    """Read the rows of a JSON file of published steps, or of a CSV file in vTrain's format, measured on `gpu`.

    Raises UserError for a file that can't be read, or a row without what its prediction needs.
    """
    try:
        text = text_of(file)
    except UserError as error:
        raise UserError(f"--rows {error}; give a JSON or CSV file of published steps") from None
    if file.suffix.lower() == ".csv":
        if gpu is None:
            raise UserError(
                f"--rows {file}: a CSV file does not say on what it was measured; add --gpu, such as a100"
            )
        return [
            _from_vtrain(record, file, gpu, number)
            for number, record in enumerate(csv.DictReader(text.splitlines()), 2)
        ]
    try:
        records = parse_json(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--rows {file}: not JSON ({error}); give a list of published steps") from None
    if not isinstance(records, list) or not records or not all(isinstance(record, dict) for record in records):
        raise UserError(f"--rows {file}: no list of published steps; give a list of one or more, each with its keys")
    return [_from_json(record, file) for record in records]


def _from_vtrain(record: Mapping[str, str], file: Path, gpu: str, line: int) -> PublishedRow:
    """A row of vTrain's table (milliseconds per step), which was measured with Megatron's GPT."""
    try:
        values = {ours: float(record[theirs]) for theirs, ours in _VTRAIN.items()}
        sizes = {name: round(value) for name, value in values.items()}
    except (KeyError, TypeError, ValueError, OverflowError):  # OverflowError: inf
        raise UserError(f"--rows {file}, line {line}: the columns are {', '.join(_VTRAIN)}, each a number") from None
    for name, size in sizes.items():
        if name != "milliseconds":
            check_whole(f"--rows {file}, line {line}: {name}", size)
    if not 0 < values["milliseconds"] <= 1e12:
        raise UserError(f"--rows {file}, line {line}: a step takes {values['milliseconds']:g} ms; give more than 0")
    model = Transformer(
        name=f"gpt {sizes['layers']} x {sizes['hidden']}",
        layers=sizes["layers"],
        hidden=sizes["hidden"],
        heads=sizes["heads"],
        kv_heads=sizes["heads"],
        ffn=4 * sizes["hidden"],
        vocab=_sliced_vocab(sizes["tp"]),
        seq=sizes["seq"],
        positions=sizes["seq"],
        dropout=True,
    )
    layout = Layout(pipeline=sizes["pp"], replicate=sizes["dp"], tensor=sizes["tp"])
    _check_devices(f"--rows {file}, line {line}: the row", sizes["gpus"], layout)
    return PublishedRow(
        group="vtrain",
        model_name=model.name,
        model=model,
        layout=layout,
        global_batch=sizes["global_batch"],
        micro_batch=sizes["micro_batch"],
        recompute_known=False,
        precision="fp16",
        gpu=gpu,
        software=SOFTWARE["megatron-2021"],
        seconds=values["milliseconds"] / 1e3,
        source=dict(record),
    )


def _sliced_vocab(slices: int) -> int:
    """GPT-2's vocabulary size, padded to equal tensor slices if there are several.

    vTrain's table does not give it. Without slices, its steps spend twice as long on the head as with two or more
    slices, which is how matrix products behave whose sides are not multiples of 8.
    """
    return _GPT2_VOCAB if slices == 1 else -(-_GPT2_VOCAB // (128 * slices)) * 128 * slices


def _from_json(record: Mapping[str, Any], file: Path) -> PublishedRow:
    """A row of a JSON table. Raises UserError with the row and the field that is missing or wrong."""
    try:
        software = _software(record)
        learned = "learned" in str(record.get("notes", "")) or software.name == "megatron-2021"
        sizes = {name: record[name] for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")}
        for name, value in (*sizes.items(), ("global_batch", record["global_batch"])):
            check_whole(f"--rows {file}: row {record.get('id', '?')}: {name}", value)
        for name in ("model", "precision", "gpu", "group"):
            if not isinstance(record.get(name, ""), str):
                raise TypeError(f"{name} is {record[name]!r:.40}")
        for name in ("micro_batch", "head_dim"):
            if record.get(name) is not None:
                check_whole(f"--rows {file}: row {record.get('id', '?')}: {name}", record[name])
        model = Transformer(
            **sizes,
            name=record["model"],
            positions=record["seq"] if learned else 0,
            dropout=software.name == "megatron-2021",
            head_size=record.get("head_dim"),
        )
        if record.get("parameters"):
            model = with_parameters(model, record["parameters"])
        layout = _layout(record["layout"], record["recompute"], software)
        _check_devices(f"--rows {file}: row {record.get('id', '?')}", int(record.get("gpus", layout.size)), layout)
        return PublishedRow(
            group=record.get("group", ""),
            model_name=record["model"],
            model=model,
            layout=layout,
            global_batch=record["global_batch"],
            micro_batch=record["micro_batch"],
            recompute_known=True,  # null counts as none: such programs offload as often as they recompute
            precision=_flops_known(
                f"--rows {file}: row {record.get('id', '?')}", _gpu(record["gpu"]), _precision(record["precision"])
            ),
            gpu=_gpu(record["gpu"]),
            software=software,
            seconds=_seconds(record, model),
            source=record,
        )
    except KeyError as error:
        raise UserError(f"--rows {file}: row {record.get('id', '?')} has no {error}; give every row one") from None
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise UserError(
            f"--rows {file}: row {record.get('id', '?')} has a value of another kind ({error}); "
            "write sizes and seconds as numbers, names as text"
        ) from None


def _flops_known(row: str, gpu: str, precision: str) -> str:
    """The precision of a row. Raises UserError if its device does not have it."""
    flops = device_of(gpu).flops
    if precision not in flops:
        raise UserError(f"{row} is of {precision}, which {gpu} does not have; give {' or '.join(flops)}")
    return precision


def _check_devices(row: str, devices: int, layout: Layout) -> None:
    """Raise UserError if a row's layout has another number of ranks than the row has devices."""
    if devices != layout.size:
        raise UserError(
            f"{row} is of {devices} devices, and its layout of {layout.size}; "
            "give a layout whose sizes multiply to the devices"
        )


def _software(record: Mapping[str, Any]) -> Software:
    """The program of a row, recognised by its source, notes and precision."""
    text = f"{record.get('source', '')} {record.get('notes', '')}"
    a100 = record["gpu"].startswith("a100")
    if "FSDP1" in text or "llm-foundry" in text:
        software = SOFTWARE["fsdp-2023"]
        return (
            software if a100 else replace(software, attention="flash-2")
        )  # the first version that was made for Hopper
    if a100 and record["precision"] == "fp16":
        return SOFTWARE["megatron-2021"]
    return SOFTWARE["megatron-core"]


def _gpu(name: str) -> str:
    """The device's name in `hardware`, from a longer published name such as h100-sxm5-80gb."""
    match = re.search(r"gb300|gb200|b300|b200|h200|h100|a100", name.lower())
    if match is None:
        return name
    return "a100-40gb" if match[0] == "a100" and "40" in name else match[0]


def _precision(name: str) -> str:
    """The name in `hardware` of a published precision; all variants of fp8 and of fp4 are one each."""
    if name in ("fp16", "bf16", "fp32"):
        return name
    return "fp4" if "fp4" in name else "fp8"


def _layout(parts: Mapping[str, Any], recompute: str | None, software: Software) -> Layout:
    """A layout from a row's sizes; data parallel ranks with ZeRO-1 or ZeRO-2 become the shard axis."""
    dp, fsdp, zero = parts.get("dp", 1), parts.get("fsdp", 1), parts.get("zero", 0)
    schedule: Schedule = "interleaved-1f1b" if (parts.get("vp") or 1) > 1 else "1f1b"
    sharded = zero in (1, 2) and dp > 1
    return Layout(
        pipeline=parts.get("pp", 1),
        replicate=1 if sharded else dp,
        shard=dp if sharded else fsdp,
        zero=zero if (sharded or fsdp > 1) else 0,
        context=parts.get("cp", 1),
        tensor=parts.get("tp", 1),
        schedule=schedule,
        stages=parts.get("vp") or 1,
        recompute=recompute or "none",  # type: ignore[arg-type]
        sequence="split" if software.splits_sequence else "whole",
    )


def _seconds(record: Mapping[str, Any], model: Transformer) -> float:
    """A row's seconds per step, as published or computed from the published rate."""
    for name in ("step_seconds", "step_seconds_derived"):
        if record.get(name):
            if (seconds := float(record[name])) <= 0:
                raise UserError(f"row {record.get('id', '?')}: {name} is {seconds:g}; give more than 0")
            return seconds
    tokens = record["global_batch"] * record["seq"]
    if record.get("tokens_per_second_per_gpu"):
        return tokens / record["gpus"] / record["tokens_per_second_per_gpu"]
    if not record.get("tflops_per_gpu"):
        raise UserError(
            f"row {record.get('id', '?')} has no step_seconds, and no rate to find them from; give it one"
        )
    # arXiv 2104.04473, equation 2: with recomputation the forward counts twice; attention counts in full.
    inner = model.layers * model.hidden
    flops = (96 if record["recompute"] == "full" else 72) * tokens * inner * model.hidden
    flops *= 1 + model.seq / (6 * model.hidden) + model.vocab / (16 * inner)
    return flops / record["gpus"] / (record["tflops_per_gpu"] * 1e12)


def predict(row: PublishedRow, factors: Mapping[str, float] | None = None) -> PredictedRow:
    """Predict a row's step time, with the fastest micro-batch size if it was not published.

    `factors` multiply the device's efficiencies, by name.
    """
    cluster = cluster_of(row.gpu, row.layout.size)
    if factors:
        efficiency = cluster.device.efficiency
        changed: dict[str, Any] = {name: getattr(efficiency, name) * factor for name, factor in factors.items()}
        cluster = replace(cluster, device=replace(cluster.device, efficiency=replace(efficiency, **changed)))
    job = PlannedJob(model=row.model, global_batch=row.global_batch, precision=row.precision, software=row.software)
    sizes = [row.micro_batch] if row.micro_batch else with_micro_batches(job, row.layout)[:4]
    seconds, size = min((step_time(job, _fitted(row, job, size), size, cluster).seconds, size) for size in sizes)
    return PredictedRow(row=row, seconds=seconds, micro_batch=size)


def _fitted(row: PublishedRow, job: PlannedJob, micro_batch: int) -> Layout:
    """The row's layout; if its recomputation was not published, with the least with which the step fits."""
    if row.recompute_known:
        return row.layout
    hows: Sequence[Recompute] = ("none", "selective", "full")
    layouts = [replace(row.layout, recompute=how) for how in hows]
    most = _ALMOST * device_of(row.gpu).memory
    peaks = [(max(rank.total for rank in memory_of(job, layout, micro_batch)), layout) for layout in layouts]
    return next((layout for peak, layout in peaks if peak <= most), layouts[-1])


def kendall_tau(predicted: Sequence[float], published: Sequence[float]) -> float | None:
    """Kendall's tau-b, the agreement of two orders with ties, from -1 to 1; None if all of one are tied."""
    agree = against = tied_here = tied_there = 0
    for first in range(len(predicted)):
        for second in range(first):
            here = predicted[first] - predicted[second]
            there = published[first] - published[second]
            if here == 0 or there == 0:
                tied_here += here == 0
                tied_there += there == 0
            elif (here > 0) == (there > 0):
                agree += 1
            else:
                against += 1
    pairs = len(predicted) * (len(predicted) - 1) // 2
    below = ((pairs - tied_here) * (pairs - tied_there)) ** 0.5
    return (agree - against) / below if below else None
