"""What words of other tools are called here: keys of job files, options of commands, and commands.

A table, as data: a message about an unknown key or option says what to write instead. `tests/test_synonyms.py` holds
every key and option that it names against the job's schema and the commands.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """A key of a job file, options of which the first counts that a command has, and how the value differs."""

    key: str | None = None
    options: tuple[str, ...] = ()
    note: str = ""

    def as_key(self) -> str:
        """What to write into a job file."""
        if self.key is None:
            named = f"{' or '.join(self.options)} of samestep train and launch says it" if self.options else ""
            return "; ".join(part for part in (named, self.note) if part)
        return f"here it is {self.key}" + (f", {self.note}" if self.note else "")


def _table() -> Iterator[tuple[str, Meaning]]:
    for words, meaning in _ROWS:
        for word in words.split():
            yield word, meaning


def meaning_of(word: str) -> Meaning | None:
    """What an option or a key of another tool is here, however it is written: --per-device-batch, lr, Num_Workers."""
    return SYNONYMS.get(plain(word))


def plain(word: str) -> str:
    """A word without the dashes before it, in small letters, with underscores."""
    return word.lstrip("-").lower().replace("-", "_")


def _layout(part: str) -> Meaning:
    return Meaning(key="run.layout", options=("--layout",), note=f"with the part {part}")


_OF_A_RANK = (
    "which is of all ranks: samples of a rank x ranks x accumulation; run.micro_batch are the most of one forward"
)
_ACCUMULATION = "a rank accumulates recipe.batch / ranks / micro_batch times, as follows from the batch"

_ROWS: Sequence[tuple[str, Meaning]] = (
    # optimizer and schedule
    (
        "lr learning_rate lrate base_lr base_learning_rate init_lr initial_lr max_lr peak_lr",
        Meaning(key="recipe.optimizer.lr"),
    ),
    ("weight_decay wd l2 l2_penalty", Meaning(key="recipe.optimizer.weight_decay")),
    ("momentum sgd_momentum", Meaning(key="recipe.optimizer.momentum", note="of name: sgd")),
    ("eps epsilon adam_epsilon adam_eps", Meaning(key="recipe.optimizer.eps")),
    (
        "betas adam_betas adam_beta1 adam_beta2 beta1 beta2",
        Meaning(key="recipe.optimizer.betas", note="a list such as [0.9, 0.999]"),
    ),
    (
        "optim optimizer_name optimizer_type optimiser opt",
        Meaning(key="recipe.optimizer.name", note="adamw, sgd, or such as torch.optim.Muon"),
    ),
    (
        "warmup warmup_steps num_warmup_steps lr_warmup_steps warmup_iters lr_warmup_iters warmup_ratio "
        "warmup_fraction lr_warmup_fraction warm_up warmup_epochs",
        Meaning(key="recipe.schedule.warmup", note="a number of steps, or below 1 a fraction of all"),
    ),
    (
        "lr_scheduler_type lr_scheduler lr_schedule scheduler scheduler_type lr_decay_style lr_policy lr_decay",
        Meaning(
            key="recipe.schedule.decay",
            note="none, linear, cosine, cosine_with_restarts, polynomial or inverse_sqrt",
        ),
    ),
    (
        "min_lr lr_min eta_min lr_end final_lr min_lr_ratio",
        Meaning(key="recipe.schedule.final", note="a fraction of the optimizer's lr"),
    ),
    (
        "max_grad_norm clip_grad clip_grad_norm clip_grad_norm_ grad_clip gradient_clip_val gradient_clipping "
        "clip_norm gradient_clip clip_gradients grad_norm_clip",
        Meaning(key="recipe.clip"),
    ),
    ("ema ema_decay use_ema model_ema model_ema_decay swa", Meaning(key="recipe.average.decay")),
    ("early_stopping early_stopping_patience patience", Meaning(key="recipe.early_stop.patience")),
    # length and batch
    (
        "batch_size global_batch_size train_batch_size total_batch_size effective_batch_size bs batchsize "
        "global_batch",
        Meaning(key="recipe.batch", note="the samples of a step over all ranks"),
    ),
    (
        "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size per_gpu_batch_size "
        "train_micro_batch_size_per_gpu batch_size_per_gpu batch_size_per_device local_batch_size device_batch_size",
        Meaning(key="recipe.batch", note=_OF_A_RANK),
    ),
    (
        "micro_batch micro_batch_size microbatch microbatch_size mbs",
        Meaning(key="run.micro_batch", options=("--micro-batch",), note="the most samples of one forward on a rank"),
    ),
    (
        "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches accumulation_steps accum_iter "
        "grad_accum grad_accum_steps grad_accumulation_steps update_freq num_micro_batches microbatches",
        Meaning(key="run.micro_batch", options=("--micro-batch",), note=_ACCUMULATION),
    ),
    (
        "eval_batch_size per_device_eval_batch_size val_batch_size valid_batch_size test_batch_size",
        Meaning(key="recipe.evaluation.batch"),
    ),
    (
        "max_steps steps train_steps num_train_steps training_steps total_steps num_steps train_iters max_iters "
        "iterations num_iterations max_iterations",
        Meaning(key="recipe.steps"),
    ),
    ("epochs epoch num_train_epochs num_epochs max_epochs n_epochs nb_epoch", Meaning(key="recipe.epochs")),
    ("seed random_seed manual_seed rng_seed data_seed random_state", Meaning(key="recipe.seed")),
    # numbers
    (
        "fp16 bf16 bfloat16 float16 fp32 float32 half half_precision mixed_precision amp use_amp dtype torch_dtype "
        "precision",
        Meaning(key="recipe.precision", note="fp64, fp32, bf16 or fp16"),
    ),
    ("tf32 allow_tf32 matmul_precision", Meaning(key="run.float32_matmul", note="highest, high or medium")),
    ("torch_compile compile use_compile compile_model jit", Meaning(key="run.compile", note="true or false")),
    # data and model
    (
        "dataset dataset_name dataset_path train_file train_data train_data_path data_path data_dir train_path "
        "training_file",
        Meaning(key="recipe.data.source"),
    ),
    (
        "validation_file eval_file test_file val_file valid_file val_data eval_data eval_dataset",
        Meaning(key="recipe.data.eval_source"),
    ),
    ("val_split validation_split test_size val_size val_ratio", Meaning(key="recipe.data.held_out")),
    ("tokenizer_name tokenizer_path tokenizer_name_or_path", Meaning(key="recipe.data.tokenizer")),
    (
        "seq_length seq_len sequence_length max_length max_seq_length max_seq_len block_size context_length "
        "model_max_length max_sequence_length",
        Meaning(key="recipe.data.length", note="of causal-lm, and recipe.data.max_length of text-classification"),
    ),
    ("vocab_size vocabulary_size n_vocab", Meaning(key="recipe.data.vocabulary")),
    ("hidden_size hidden_dim d_model n_embd embed_dim", Meaning(key="recipe.model.hidden")),
    ("num_layers n_layer n_layers num_hidden_layers num_blocks", Meaning(key="recipe.model.layers")),
    ("num_heads n_head n_heads num_attention_heads", Meaning(key="recipe.model.heads")),
    ("intermediate_size ffn_hidden_size ffn_dim d_ff", Meaning(key="recipe.model.feed_forward")),
    (
        "model_name_or_path model_name model_path pretrained pretrained_model pretrained_model_name_or_path",
        Meaning(key="recipe.model.folder", note="a folder of save_pretrained; recipe.task names what is trained"),
    ),
    (
        "lora lora_r lora_rank peft peft_config lora_config use_lora",
        Meaning(key="recipe.adapter.rank"),
    ),
    ("lora_alpha", Meaning(key="recipe.adapter.alpha")),
    ("use_rslora rslora", Meaning(key="recipe.adapter.rank_stabilized")),
    ("lora_dropout", Meaning(key="recipe.adapter.dropout")),
    ("target_modules lora_target_modules lora_target", Meaning(key="recipe.adapter.targets")),
    # what is saved, evaluated and logged
    (
        "save_steps save_interval save_every save_freq save_strategy checkpoint_interval checkpointing_steps "
        "checkpoint_every ckpt_interval every_n_train_steps checkpoint_freq",
        Meaning(key="run.checkpoint.every", options=("--checkpoint-every",), note="steps, or a time such as 10m"),
    ),
    (
        "save_total_limit keep_last keep_last_n keep_checkpoints max_checkpoints save_top_k",
        Meaning(key="run.checkpoint.keep"),
    ),
    ("load_best_model_at_end metric_for_best_model", Meaning(key="run.checkpoint.best", note="a metric's name")),
    ("greater_is_better", Meaning(key="run.checkpoint.best_is", note="highest or lowest")),
    (
        "resume resume_from_checkpoint resume_from load_checkpoint ckpt_path restore resume_checkpoint auto_resume",
        Meaning(
            key="run.checkpoint.resume", options=("--resume", "--checkpoint"), note="auto, or a checkpoint's path"
        ),
    ),
    (
        "eval_steps eval_interval evaluation_steps eval_every eval_freq val_check_interval check_val_every_n_epoch "
        "evaluation_strategy eval_strategy val_interval validation_steps",
        Meaning(key="recipe.evaluation.every", note="a number of steps, or epoch"),
    ),
    (
        "logging_steps log_interval log_every log_every_n_steps logging_strategy print_freq log_freq steps_per_print",
        Meaning(note="every step stands in metrics.jsonl of the run's folder, so there is nothing to set"),
    ),
    (
        "report_to wandb use_wandb wandb_project logger log_with tensorboard tensorboard_dir mlflow comet",
        Meaning(
            key="run.log",
            note="a list such as [tensorboard, wandb]; metrics.jsonl has the same numbers, for what reads neither",
        ),
    ),
    (
        "output_dir out_dir save_dir save_path work_dir default_root_dir results_dir exp_dir output_path "
        "checkpoint_dir logging_dir log_dir logdir",
        Meaning(key="run.folder", options=("--folder", "--logs")),
    ),
    (
        "run_name experiment_name exp_name job_name",
        Meaning(key="name", options=("--job-id",), note="beside recipe and run"),
    ),
    (
        "overwrite overwrite_output_dir exist_ok",
        Meaning(key="run.overwrite", options=("--force",)),
    ),
    ("dry dryrun fast_dev_run sanity_check", Meaning(options=("--dry-run",))),
    (
        "config config_path config_yaml cfg conf job job_file yaml",
        Meaning(note="the job file stands by itself, without an option before it: samestep train JOB.yaml"),
    ),
    ("verbose log_level debug", Meaning(note="there is nothing to set; samestep doctor RUN_FOLDER reads a run")),
    # ranks and hosts
    (
        "nproc_per_node nproc nprocs num_processes np n num_procs num_gpus gpus ngpus n_gpu n_gpus num_gpus_per_node "
        "gpus_per_node world_size devices num_devices ntasks num_ranks procs ntasks_per_node tasks_per_node ppn "
        "proc_per_node num_proc nproc_per_host slots_per_host num_processes_per_node",
        Meaning(
            key="run.processes",
            options=("--processes", "--num-procs"),
            note="of a layout without a size, such as ddp; dp4 says it itself",
        ),
    ),
    ("nnodes num_nodes num_machines nodes n_nodes node_count", Meaning(options=("--num-nodes",))),
    ("node_rank machine_rank node_id", Meaning(options=("--node-rank",))),
    (
        "master_addr master_address main_process_ip rdzv_endpoint dist_url init_method rendezvous",
        Meaning(options=("--master-addr",), note="and --master-port has the port"),
    ),
    (
        "rdzv_backend rdzv_conf rdzv_configuration standalone",
        Meaning(
            note="hosts meet in a store of samestep's own, and without hosts there is only this machine; leave it out"
        ),
    ),
    ("master_port main_process_port rdzv_port", Meaning(options=("--master-port",))),
    ("rdzv_id job_id", Meaning(options=("--job-id",))),
    ("hostfile host_file hosts machinefile machine_file", Meaning(options=("--hostfile",))),
    ("bind bind_to cpu_bind cpu_affinity numa", Meaning(key="run.bind", options=("--bind",))),
    (
        "num_threads nthreads omp_num_threads num_cpu_threads_per_process threads cpu_threads",
        Meaning(key="run.threads", options=("--threads",)),
    ),
    (
        "workers num_workers dataloader_num_workers num_data_workers dataloader_workers data_workers",
        Meaning(key="run.workers"),
    ),
    (
        "device accelerator no_cuda use_cpu cuda cpu use_cuda gpu",
        Meaning(key="run.device", options=("--device",), note="auto or cpu"),
    ),
    (
        "backend dist_backend ddp_backend distributed_backend",
        Meaning(key="run.transport", note="auto, gloo or shared-memory"),
    ),
    ("timeout ddp_timeout dist_timeout nccl_timeout", Meaning(key="run.hang_limit", note="seconds, or such as 10m")),
    (
        "restarts max_restarts max_failures retries num_retries max_retries",
        Meaning(key="run.max_restarts", options=("--max-restarts",)),
    ),
    ("local_rank rank", Meaning(note="who starts the ranks says it in their environment; leave it out")),
    # how it is split
    (
        "strategy parallelism parallel parallel_mode distributed_type distributed distribution ddp "
        "parallelism_config data_parallel",
        Meaning(key="run.layout", options=("--layout",), note="such as dp2, fsdp4 or pp2 dp2 tp2"),
    ),
    ("dp dp_size dp_degree data_parallel_size data_parallel_degree dp_replicate_size", _layout("dpN")),
    (
        "fsdp fsdp_size fsdp_config full_shard sharding_strategy dp_shard_size data_parallel_shard_degree",
        _layout("fsdpN"),
    ),
    (
        "zero zero_stage zero_optimization zero_optimization_stage",
        _layout("zero1xN or zero2xN, or fsdpN for stage 3"),
    ),
    (
        "tp tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree tensor_model_parallel_size",
        _layout("tpN"),
    ),
    (
        "pp pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
        "pipeline_model_parallel_size",
        _layout("ppN"),
    ),
    (
        "cp cp_size context_parallel context_parallel_size sp sp_size sequence_parallel_size ulysses_degree",
        _layout("cpN"),
    ),
    ("ep ep_size expert_parallel expert_parallel_size expert_model_parallel_size", _layout("epN")),
    ("sequence_parallel sequence_parallelism", _layout("sequence=split, beside tpN")),
    (
        "gradient_checkpointing activation_checkpointing recompute recompute_activations checkpoint_activations "
        "remat use_gradient_checkpointing",
        _layout("recompute=full or recompute=selective"),
    ),
    (
        "cpu_offload offload offload_optimizer offload_param offload_params",
        _layout("offload=optimizer or offload=parameters"),
    ),
    ("find_unused_parameters", Meaning(note="unused parameters are found by themselves; leave it out")),
    ("bucket_cap_mb bucket_size reduce_bucket_size", Meaning(key="run.bucket_mb")),
    (
        "gradient_compression compression comm_hook communication_hook ddp_comm_hook powersgd",
        Meaning(key="recipe.communication.kind"),
    ),
    (
        "deepspeed deepspeed_config ds_config use_deepspeed deepspeed_config_file config_file accelerate_config",
        Meaning(
            key="run.engine_config", note="with run.engine; samestep translate FILE makes a job file of such a file"
        ),
    ),
    ("framework trainer library", Meaning(key="run.engine", options=("--engine",))),
)
SYNONYMS: Mapping[str, Meaning] = dict(_table())

# Words for commands, in other tools and in speech.
COMMANDS: Mapping[str, str] = {
    "run": "train",
    "fit": "train",
    "start": "train",
    "finetune": "train",
    "fine-tune": "train",
    "resume": "train JOB.yaml --resume",
    "torchrun": "launch",
    "exec": "launch",
    "spawn": "launch",
    "test": "evaluate",
    "eval": "evaluate",
    "validate": "evaluate",
    "infer": "predict",
    "inference": "predict",
    "generate": "predict",
    "prove": "verify",
    "proof": "verify",
    "lint": "check",
    "new": "init",
    "create": "init",
    "convert": "checkpoint convert",
    "export": "checkpoint export",
    "inspect": "checkpoint inspect",
    "checkpoints": "checkpoint list",
    "benchmark": "compare",
    "bench": "comm",
    "nccl-tests": "comm",
    "env": "doctor",
    "diagnose": "doctor",
    "autotune": "tune",
    "layouts": "layout",
    "estimate": "plan",
    "version": "--version",
    "help": "--help",
}


# Values of keys by what other tools call them: precisions, as a model's type or a trainer's setting.
VALUES: Mapping[str, str] = {
    **dict.fromkeys(("bfloat16", "torch.bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
    **dict.fromkeys(("float16", "torch.float16", "half", "16", "16-mixed", "16-true", "fp16-mixed"), "fp16"),
    **dict.fromkeys(("float32", "torch.float32", "float", "single", "32", "32-true", "no", "tf32"), "fp32"),
    **dict.fromkeys(("float64", "torch.float64", "double", "64", "64-true"), "fp64"),
}


def value_of(value: object) -> str | None:
    """What a value is called here; None for one that isn't in the table."""
    return VALUES.get(str(value).lower())
