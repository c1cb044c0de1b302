"""Recipe: what is trained. Everything that decides the result, and nothing about how it is spread."""

import math
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Len
from pydantic import BeforeValidator, Discriminator, Tag, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from samestep.communication import Communication, OneBitAdam, ZeroOneAdam
from samestep.errors import closest
from samestep.field_types import (
    STRICT,
    Beta,
    Count,
    Decay,
    Epsilon,
    Factor,
    Fraction,
    Least,
    Positive,
    Rate,
    Real,
    Seed,
    Whole,
    broken_rule,
)
from samestep.limits import MOST, MOST_WIDTH
from samestep.validation import tells_mistakes

Precision = Literal["fp64", "fp32", "bf16", "fp16"]


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2)."""

    name: Literal["adamw"] = "adamw"
    lr: Rate = 3e-4
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Epsilon = 1e-8
    weight_decay: Decay = 0.01
    decay_all: bool = False  # also biases and norms, which take no decay otherwise
    # How the two averages of matrices and tables are kept from step to step: as they are, or rounded.
    state: Literal["full", "bf16", "8bit"] = "full"


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class SGD:
    """Stochastic gradient descent with momentum (Sutskever et al. 2013)."""

    name: Literal["sgd"] = "sgd"
    lr: Rate = 0.1
    momentum: Beta = 0.0
    nesterov: bool = False
    weight_decay: Decay = 0.0
    decay_all: bool = False

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> "SGD":
        if self.nesterov and not self.momentum:
            raise broken_rule("nesterov", "nesterov needs a momentum above 0")
        return self


SHORT_NAMES = ("adamw", "sgd")


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class NamedOptimizer:
    """Any optimizer: a class or function that takes parameters, or groups of them, and gives a torch.optim.Optimizer.

    `name` is "torch.optim.Muon", "package.module:function", "path/to/file.py:function", or the class itself.
    """

    name: Any
    lr: Rate | None = None  # None: its own default
    weight_decay: Decay | None = None  # None: its own default
    decay_all: bool = False  # also biases and norms, which take no decay otherwise
    args: dict[str, Any] = field(default_factory=dict)  # every further argument that it takes

    @model_validator(mode="after")
    def _names_something(self) -> "NamedOptimizer":
        """A callable, or a name with a module before it; a bare word is a misspelt adamw or sgd."""
        if callable(self.name):
            return self
        if not isinstance(self.name, str) or not self.name.strip():
            raise broken_rule("name", "name should be adamw, sgd, or an optimizer such as torch.optim.Muon")
        if "." not in self.name and ":" not in self.name:
            raise broken_rule(
                "name", f'name is "{self.name}"; {closest(self.name, SHORT_NAMES)}, or such as torch.optim.Muon'
            )
        return self


def _name_or_adamw(value: Any) -> Any:
    return {"name": "adamw", **value} if isinstance(value, dict) else value


def _which_optimizer(value: Any) -> str:
    """Which schema reads the section: those of short names, or that of any other optimizer."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return name if name in SHORT_NAMES else "named"


Optimizer = Annotated[
    Annotated[AdamW, Tag("adamw")] | Annotated[SGD, Tag("sgd")] | Annotated[NamedOptimizer, Tag("named")],
    Discriminator(_which_optimizer),
    BeforeValidator(_name_or_adamw),
]


Decline = Literal["none", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"]
_DECLINES: tuple[str, ...] = get_args(Decline)[1:]
_ONLY_OF_DECAYS: Mapping[str, tuple[str, ...]] = {
    "hold": _DECLINES,
    "power": ("polynomial",),
    "cycles": ("cosine_with_restarts",),
}


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Schedule:
    """Learning rate by step: a linear warm-up, a while at the full rate, then a decay to `final` times that.

    Or a function of one's own, which gives the fraction of the full rate at each step.
    """

    warmup: Annotated[Real, Ge(0), Le(MOST)] = 0.0  # below 1: a fraction of all steps; else a number of steps
    hold: Annotated[Real, Ge(0), Le(MOST)] = 0.0  # at the full rate after the warm-up, counted likewise
    decay: Decline = "none"
    final: Fraction = 0.0
    power: Annotated[Real, Gt(0), Le(100)] = 1.0  # of decay: polynomial
    cycles: Annotated[Whole, Gt(0), Le(10**6)] = 1  # of decay: cosine_with_restarts
    # "file.py:function" or "package.module:function" of the step, from 0, and the number of steps.
    function: str | None = None

    @model_validator(mode="after")
    def _whole_steps(self) -> "Schedule":
        """Below 1 a fraction, from 1 on a number of steps: 1.5 is neither."""
        for name in ("warmup", "hold"):
            value = getattr(self, name)
            if value >= 1 and value != int(value):
                raise broken_rule(
                    name, f"{name} is {value}; below 1 it is a fraction of all steps, else a whole number of them"
                )
        return self

    @model_validator(mode="after")
    def _settings_that_do_something(self) -> "Schedule":
        """Refuse a setting that the kind of decay doesn't have."""
        defaults = {key.name: key.default for key in fields(self)}
        if self.function is not None:
            for name, default in defaults.items():
                if name != "function" and getattr(self, name) != default:
                    raise broken_rule(
                        name, f"{name} and function are both given, and the function gives the whole rate; use one"
                    )
            return self
        for name, kinds in _ONLY_OF_DECAYS.items():
            if self.decay not in kinds and getattr(self, name) != defaults[name]:
                raise broken_rule(
                    name,
                    f"{name} is {getattr(self, name):g} and decay is {self.decay}, which has none; use "
                    f"decay: {' or '.join(kinds)}, or leave {name} out",
                )
        return self


def steps_of(value: float, total_steps: int) -> int:
    """A number of steps as schedules have it: below 1 a fraction of all."""
    return int(value if value >= 1 else value * total_steps)


def _one_or_several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Group:
    """Parameters that are trained otherwise than the rest: by their names, and by how many dimensions they have."""

    # Names or patterns with * and ?, such as "*.bias"; one of them must match.
    parameters: Annotated[
        tuple[str, ...],
        Len(min_length=1),
        BeforeValidator(_one_or_several, json_schema_input_type=str | Annotated[tuple[str, ...], Len(min_length=1)]),
    ]
    dims: Annotated[Whole, Ge(0), Le(64)] | None = None  # only those of so many dimensions, such as 2 for matrices
    lr: Rate | None = None  # None: the optimizer's
    weight_decay: Decay | None = None  # of all of them; None: the optimizer's
    schedule: Schedule | None = None  # None: the recipe's
    optimizer: Optimizer | None = None  # None: the recipe's

    @model_validator(mode="after")
    def _says_something(self) -> "Group":
        if all(getattr(self, name) is None for name in ("lr", "weight_decay", "schedule", "optimizer")):
            raise broken_rule(
                "parameters", "the group changes nothing; give it lr, weight_decay, schedule or optimizer"
            )
        return self


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Average:
    """An exponential moving average of the weights, which is what is evaluated and exported.

    After a step it becomes `decay` times itself and 1 - `decay` times the weights (Polyak & Juditsky 1992 average all
    alike; with a decay as in Tarvainen & Valpola 2017, section 2).
    """

    decay: Beta = 0.999
    start: Count = 0  # steps before it begins, with the weights of then
    every: Positive = 1  # steps from one change to the next


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Evaluation:
    """When and how the held-out samples are looked at."""

    batch: Positive = 64  # samples of one forward; part of the recipe, so that scores are the same everywhere
    every: Positive | Literal["epoch"] | None = None  # steps, or each epoch; None: once, at the end
    at_end: bool = True  # after the last step; false: only where `every` says so

    def steps_between(self, steps_per_epoch: int) -> int | None:
        """Steps from one evaluation to the next; None: there is none before the end."""
        return steps_per_epoch if self.every == "epoch" else self.every


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Patterns = Annotated[tuple[str, ...], BeforeValidator(_one_or_more, json_schema_input_type=str | tuple[str, ...])]


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoRA:
    """Low-rank adapters, which are trained, in the task's model, which stays as it is (Hu et al. 2021)."""

    kind: Literal["lora"] = "lora"
    rank: Annotated[Whole, Gt(0), Le(MOST_WIDTH)] = 8
    alpha: Factor = 16.0  # what an adapter makes is multiplied by alpha / rank
    rank_stabilized: bool = False  # by alpha / sqrt(rank) instead (rsLoRA, Kalajdzievski 2023)
    dropout: Beta = 0.0  # of what an adapter takes
    # Linear layers, by names or patterns, whole or from the last dots on; (): all in the repeated layers.
    targets: Patterns = ()
    also_train: Patterns = ()  # modules that are trained whole, such as a new output layer

    @property
    def scaling(self) -> float:
        """What the product of an adapter's matrices is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class EarlyStop:
    """When a training ends before its last step: once evaluations have not become better for a while."""

    metric: str  # of the task's, one number
    mode: Literal["highest", "lowest"] = "highest"
    patience: Positive = 3  # evaluations in a row that are not better
    min_delta: Least = 0.0  # by how much more than this an evaluation must be better


def _task(value: Any) -> Any:
    """Refuse what no task is named by; classes of tasks are not known here."""
    if isinstance(value, (Mapping, list, tuple, bool, int, float)) or value is None:
        raise PydanticCustomError(
            "task_wanted", "Input should be the name of a task, file.py:ClassName, or a samestep.Task"
        )
    return value


@tells_mistakes
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe:
    """What is trained: task, data, seed, global batch, length, optimizer, schedule, clipping, precision, messages.

    `task` is the name of a shipped task, "path/to/file.py:ClassName", or a task object. `data`, `model` and
    `args` are handed to the task's class.
    """

    task: Annotated[Any, BeforeValidator(_task)]
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    args: dict[str, Any] = field(default_factory=dict)
    seed: Seed = 0
    batch: Positive = 64  # global: samples of one step, over all ranks and micro-batches
    # Pieces into which run.reduction: ordered cuts the global batch; float32 rounds otherwise with another number.
    virtual_ranks: Annotated[Whole, Gt(0), Le(65536)] = 8
    steps: Positive | None = None
    epochs: Annotated[Whole, Gt(0), Le(10**6)] | None = None
    optimizer: Optimizer = field(default_factory=AdamW)
    groups: tuple[Group, ...] = ()  # parameters with settings of their own; the first that matches counts
    schedule: Schedule = field(default_factory=Schedule)
    average: Average | None = None  # a moving average of the weights; None: the weights themselves
    clip: Factor | None = None  # largest norm of the whole gradient
    precision: Precision = "fp32"
    # With bf16: parameters and gradients are bf16 too, and the optimizer steps a float32 copy of the parameters.
    master_weights: bool = False
    dropout: bool = True  # False switches every dropout of the model off
    # False: attention drops none of its weights, so that flash attention can run, which never writes them out.
    attention_dropout: bool = True
    communication: Communication | None = None  # None: every step's gradient, whole and exact
    evaluation: Evaluation = field(default_factory=Evaluation)
    adapter: LoRA | None = None  # None: all of the model is trained, but for what the task freezes
    early_stop: EarlyStop | None = None

    @model_validator(mode="after")
    def _evaluations_to_stop_by(self) -> "Recipe":
        if self.early_stop is not None and self.evaluation.every is None:
            raise broken_rule(
                "early_stop",
                "early_stop looks at evaluations between steps, and recipe.evaluation.every is empty; use a number "
                "of steps for it, or epoch",
            )
        return self

    @model_validator(mode="after")
    def _one_length(self) -> "Recipe":
        if self.steps is not None and self.epochs is not None:
            raise broken_rule(
                "epochs", "steps and epochs are both given; give one of them, and leave the other out or make it null"
            )
        return self

    @model_validator(mode="after")
    def _masters_of_short_numbers(self) -> "Recipe":
        if self.master_weights and self.precision not in ("bf16", "fp64"):  # proofs have float64 for both
            raise broken_rule(
                "master_weights",
                f"master_weights is true, for parameters in bf16, and precision is {self.precision}; use bf16",
            )
        return self

    @model_validator(mode="after")
    def _rounded_state_by_itself(self) -> "Recipe":
        """Adam's averages in few bits go neither with master weights nor with methods of their own state."""
        for optimizer in (self.optimizer, *(group.optimizer for group in self.groups)):
            if not isinstance(optimizer, AdamW) or optimizer.state == "full":
                continue
            setting = f"optimizer.state is {optimizer.state}"
            if self.master_weights:
                raise broken_rule(
                    "master_weights",
                    f"master_weights is true and {setting}; keep the state full, or no master weights",
                )
            if self.communication is not None:
                raise broken_rule(
                    "communication",
                    f"communication is {self.communication.kind} and {setting}, which has other state; use one",
                )
        return self

    @model_validator(mode="after")
    def _adam_of_few_bits(self) -> "Recipe":
        """Methods that are a kind of Adam take its place, and want its settings."""
        if not isinstance(self.communication, (OneBitAdam, ZeroOneAdam)):
            return self
        for optimizer in (self.optimizer, *(group.optimizer for group in self.groups)):
            if optimizer is not None and not isinstance(optimizer, AdamW):
                raise broken_rule(
                    "communication",
                    f"communication is {self.communication.kind}, which is a kind of Adam, and optimizer is "
                    f"{optimizer.name}; use adamw, or powersgd, local-sgd or diloco",
                )
        return self

    @model_validator(mode="after")
    def _average_of_one_model(self) -> "Recipe":
        if self.average is not None and self.communication is not None:
            raise broken_rule(
                "average",
                f"average is given and communication is {self.communication.kind}, whose ranks may each have their "
                "own weights; use one",
            )
        return self

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole training; one epoch where neither steps nor epochs are given."""
        return self.steps if self.steps is not None else steps_per_epoch * (self.epochs or 1)
