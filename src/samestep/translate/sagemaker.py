"""Translates the `distribution` dictionary of a SageMaker estimator to a job.

Keys are those of smdistributed.modelparallel 1.x and 2.x, smdistributed.dataparallel, and the launchers.
"""

from dataclasses import replace
from typing import Any

from samestep.errors import UserError
from samestep.translate.base import ConfigReader, Draft, GivenSizes, SectionKeys, Sizes, has_any

# Keys of the launchers that start the ranks; some of them have no counterpart.
_LAUNCHERS = ("torch_distributed", "pytorchddp", "mpi", "parameter_server", "multi_worker_mirrored_strategy")
_NO_COUNTERPART = {
    "parameter_server": "there is no parameter server; replicas average their gradients",
    "multi_worker_mirrored_strategy": "TensorFlow's; replicas average their gradients",
}
_RANKS = "an instance; the layout takes as many ranks as there are: torchrun ... -m samestep train JOB.yaml"

# The mesh axes for each letter of a placement, outermost first.
_PLACED = {"D": "dp.fsdp", "P": "pp", "T": "cp.tp"}
_PLACEMENTS = {"cluster": "DPT", "spread": "TPD"}

_REASONS = {
    "auto_partition": "stages are cut by cost; run.cut_at names their first layers",
    "default_partition": "stages are cut by cost; run.cut_at names their first layers",
    "memory_weight": "balance=speed or balance=memory, with nothing in between",
    "active_microbatches": "the schedule says it: 1f1b keeps as many as there are stages ahead",
    "prescaled_batch": "recipe.batch is that of all ranks, however they share it",
    "deterministic_server": "a schedule's order of work is the same on every rank",
    "fast_mode": "stages send to each other, never through a first one",
    "static_mode": "a schedule's order of work is the same in every step",
    "contiguous": "a stage is a row of consecutive layers",
    "skip_tracing": "one forward without values is enough, whatever the model's size",
    "activation_loading_horizon": "activations are fetched when they are needed",
    "delayed_parameter_initialization": "a rank fills in its own part alone",
    "horovod": "replicas average their gradients by torch.distributed",
    "ddp_port": "who starts the ranks says it",
    "ddp_dist_backend": "that of the device: NCCL or gloo",
    "expert_parallel_degree": "an ep part of the layout shares experts out, over data ranks",
    "random_seed": "recipe.seed says it",
    "sdp_reduce_bucket_size": "buckets are set by themselves",
    "sdp_param_persistence_threshold": "every parameter is sharded",
    "sdp_max_live_parameters": "a block is whole while it is computed, and no other",
    "sdp_hierarchical_allgather": "dpM fsdpN shards inside groups alone",
}
_OTHERWISE = "no counterpart"


class ReadSageMaker(ConfigReader):
    """Translates SageMaker's distribution dictionary to a job."""

    title = "a SageMaker distribution dictionary"

    def recognises(self, content: Any) -> bool:
        return has_any(content, ("distribution", "smdistributed", *_LAUNCHERS))

    def read(self, content: Any, user_sizes: GivenSizes) -> Draft:
        draft = Draft()
        keys = SectionKeys(content, draft)
        if "distribution" in keys:
            outer = keys
            keys = keys.section("distribution")
            outer.leave({}, "the estimator's own")
        if user_sizes.batch:
            draft.set("recipe.batch", user_sizes.batch)
        smd = keys.section("smdistributed")
        data, model = smd.enabled("dataparallel"), smd.enabled("modelparallel")
        if data and model:
            raise UserError("smdistributed.dataparallel and smdistributed.modelparallel are both enabled; one can be")
        data.leave({}, "of SageMaker's own all-reduce, which the backend smddp does")
        sizes = (
            _model_parallel(model.section("parameters"), draft, user_sizes)
            if model
            else Sizes(data=user_sizes.processes)
        )
        model.leave({}, _OTHERWISE)
        smd.leave({}, _OTHERWISE)
        _launchers(keys, draft)
        keys.leave({}, _OTHERWISE)
        why = (
            ""
            if sizes.data and sizes.replicas
            else "the ranks that are left: the dictionary doesn't say how many instances there are"
        )
        draft.set_layout(sizes, why)
        return draft


def _launchers(keys: SectionKeys, draft: Draft) -> None:
    for name in _LAUNCHERS:
        section = keys.enabled(name)
        if section and name in _NO_COUNTERPART:
            draft.remark(name, None, _NO_COUNTERPART[name])
        if (ranks := section.whole("processes_per_host")) is not None:
            draft.remark(section.place("processes_per_host"), ranks, _RANKS)
        section.leave({}, "who starts the ranks says it")


def _model_parallel(keys: SectionKeys, draft: Draft, user_sizes: GivenSizes) -> Sizes:
    """Read the sizes and options of smdistributed.modelparallel."""
    pipeline = _either(keys, "pipeline_parallel_degree", "partitions") or 1
    tensor = keys.whole("tensor_parallel_degree") or 1
    context = keys.whole("context_parallel_degree") or 1
    options = _pipeline(keys, draft, pipeline)
    if keys.switch("activation_checkpointing"):
        options["recompute"] = "full"
    offload = [key for key in ("offload_activations", "sm_activation_offloading") if keys.switch(key)]
    sizes = Sizes(
        pipeline=pipeline,
        context=context,
        tensor=tensor,
        zero=1 if keys.switch("shard_optimizer_state") else 0,
        offload=["activations"] if offload else [],
    )
    sizes = _shards(keys, sizes, _data_ranks(keys, draft, sizes, user_sizes))
    if order := _order(keys, sizes):
        options["order"] = order
    _precision(keys, draft)
    if clip := keys.number("sdp_gradient_clipping"):
        draft.set("recipe.clip", clip)
    _micro_batch(keys, draft, sizes)
    keys.leave(_REASONS, _OTHERWISE)
    return replace(sizes, options=options)


def _either(keys: SectionKeys, *names: str) -> int | None:
    """Read a size that has several names. Raises UserError if they have different values."""
    sizes = {name: size for name in names if (size := keys.whole(name)) is not None}
    if len(set(sizes.values())) > 1:
        raise UserError(" and ".join(f"{name} is {size}" for name, size in sizes.items()) + "; they mean the same")
    return next(iter(sizes.values()), None)


def _pipeline(keys: SectionKeys, draft: Draft, pipeline: int) -> dict[str, str]:
    """Read the pipeline's options. SageMaker's `interleaved` runs backwards as early as possible, which is 1F1B."""
    schedule = keys.word("pipeline", ("interleaved", "simple"))
    balance = keys.word("optimize", ("speed", "memory"))
    if pipeline == 1:
        for name, value in (("pipeline", schedule), ("optimize", balance)):
            if value is not None:
                draft.remark(f"parameters.{name}", value, "is about pipeline stages, of which there is one")
        return {}
    options = {"schedule": "gpipe" if schedule == "simple" else "1f1b"}
    options["balance"] = balance or "memory"  # the library's default
    return options


def _data_ranks(keys: SectionKeys, draft: Draft, sizes: Sizes, user_sizes: GivenSizes) -> int | None:
    """The number of data ranks: 1 without replicas, else from the number of processes; None if that is not known."""
    replicas = keys.switch("ddp") or keys.switch("horovod")
    if user_sizes.processes is None:
        # Version 1.x has replicas if they are switched on; 2.x, which has no pipelines, always has them.
        first_version = "partitions" in keys or "pipeline_parallel_degree" in keys
        shares = sizes.zero or "sharded_data_parallel_degree" in keys
        return 1 if first_version and not replicas and not shares else None
    if user_sizes.processes % sizes.model:
        raise UserError(
            f"--processes is {user_sizes.processes}, and the model is split over {sizes.model}; use a multiple"
        )
    return user_sizes.processes // sizes.model


def _shards(keys: SectionKeys, sizes: Sizes, data: int | None) -> Sizes:
    """Read how parameters are sharded: over all data ranks or a part of them."""
    place = keys.place("hybrid_shard_degree")
    first, second = keys.whole("sharded_data_parallel_degree"), keys.whole("hybrid_shard_degree", least=0)
    if first is not None and second is not None:
        raise UserError(f"sharded_data_parallel_degree and {place} are both given; they are of versions 1.x and 2.x")
    if second == 0:  # left to the script's FSDP, which shards over all ranks by default
        return replace(sizes, zero=3, data=data)
    degree = first or second or 1
    if degree == 1:
        return replace(sizes, data=data)
    if data is not None and data % degree:
        raise UserError(f"{data} data ranks can't be shared out to shards of {degree}; use a multiple of it")
    return replace(sizes, zero=3, replicas=data // degree if data else None, data=degree)


def _order(keys: SectionKeys, sizes: Sizes) -> str | None:
    """The order of the mesh axes over the ranks; None if only one axis is split, where all orders are the same."""
    strategy = keys.take("placement_strategy")
    letters = str(strategy if strategy is not None else "cluster")
    letters = _PLACEMENTS.get(letters.lower(), letters.upper())
    if sorted(letters) != sorted(_PLACED):
        raise UserError(
            f"{keys.place('placement_strategy')} is {strategy!r}; use cluster, spread or an order of the letters "
            "D, P and T"
        )
    split = (sizes.data != 1 or sizes.replicas != 1) + (sizes.pipeline > 1) + (sizes.tensor * sizes.context > 1)
    return ".".join(_PLACED[letter] for letter in letters) if split > 1 else None


def _precision(keys: SectionKeys, draft: Draft) -> None:
    if keys.switch("bf16"):
        draft.set("recipe.precision", "bf16")
    if keys.switch("fp16") or keys.switch("fp16_params"):
        if draft.get("recipe.precision"):
            raise UserError("bf16 and fp16 are both true; switch one of them off")
        draft.set("recipe.precision", "fp16")
    keys.take("fp16_params")


def _micro_batch(keys: SectionKeys, draft: Draft, sizes: Sizes) -> None:
    """Set the micro-batch size from the number of micro-batches, if the batch is known; else add a remark."""
    count = keys.whole("microbatches")
    if count is None:
        return
    batch = draft.get("recipe.batch")
    if batch is None or sizes.data is None or sizes.replicas is None:
        draft.remark(
            keys.place("microbatches"),
            count,
            "run.micro_batch = samples of a data rank / microbatches; translate's --processes and --batch give it",
        )
        return
    samples = -(-batch // (sizes.data * sizes.replicas))
    draft.set("run.micro_batch", -(-samples // count), f"{samples} samples of a data rank in {count} micro-batches")
