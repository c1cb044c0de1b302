"""Translates DeepSpeed's `optimizer` and `scheduler` sections to a recipe's optimizer and schedule, and back."""

from typing import Any

from samestep.engines.deepspeed.keys import DEFAULT_LR, NEUTRAL, adds_decay_to_gradient, default_decay, schema_of
from samestep.errors import UserError
from samestep.recipe import SGD, AdamW, NamedOptimizer, Recipe
from samestep.translate.base import Draft, SectionKeys

_OTHER_OPTIMIZER = "recipe.optimizer can be adamw or sgd; until you say it is adamw with its default rate"
_OTHER_SCHEDULE = "recipe.schedule has a linear warm-up and a linear or cosine decay"
_DECAY_ALL = "DeepSpeed decays biases and norms too, where the script hands it no groups"

# DeepSpeed's schedules, with their kind of decay.
_SCHEDULES = {"WarmupLR": "none", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def read_optimizer(keys: SectionKeys, draft: Draft) -> None:
    """Set the recipe's optimizer and schedule and, if the schedule has it, the number of steps."""
    optimizer = keys.section("optimizer")
    name = optimizer.take("type")
    parameters = optimizer.section("params")
    schema = schema_of({"type": name})
    if schema is AdamW:
        _adamw(str(name), parameters, draft)
    elif schema is SGD:
        _sgd(parameters, draft)
    elif name is not None:
        draft.remark("optimizer.type", name, _OTHER_OPTIMIZER)
    else:
        draft.remark("optimizer", None, "not in the file, so the script makes it; recipe.optimizer says it here")
    parameters.leave({"max_grad_norm": "recipe.clip says it"}, "no counterpart")
    optimizer.leave({}, "no counterpart")
    _read_schedule(keys.section("scheduler"), draft)


def _adamw(name: str, params: SectionKeys, draft: Draft) -> None:
    left_out = "weight_decay" not in params
    decay = params.number("weight_decay")
    decoupled = params.switch("adam_w_mode")
    if own := params.switch("torch_adam"):
        draft.remark(params.place("torch_adam"), own, "PyTorch's fused kernel is taken where there is one")
    section = {"type": name, "params": {"torch_adam": own, "adam_w_mode": decoupled is not False}}
    why = ""
    if decay and adds_decay_to_gradient(section):
        why = "added to the gradient by DeepSpeed's adam_w_mode: false; decoupled here, which is another training"
    draft.set("recipe.optimizer.name", "adamw", "" if name.lower() == "adamw" else "DeepSpeed's Adam is AdamW, too")
    _rate(params, draft, default=DEFAULT_LR)
    if (betas := params.take("betas")) is not None:
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise UserError(f"{params.place('betas')} is {betas!r}; it should be a list of two numbers")
        draft.set("recipe.optimizer.betas", list(betas))
    if (eps := params.number("eps")) is not None:
        draft.set("recipe.optimizer.eps", eps)
    if left_out:
        decay = default_decay(section)
        why = "PyTorch's default" if own else "DeepSpeed's default"
    _decay(decay, why, draft)
    for switch in ("bias_correction", "amsgrad"):
        if (value := params.switch(switch)) not in (None, NEUTRAL[switch]):
            draft.remark(params.place(switch), value, "AdamW is computed without it")


def _sgd(params: SectionKeys, draft: Draft) -> None:
    draft.set("recipe.optimizer.name", "sgd")
    _rate(params, draft, default=DEFAULT_LR)
    if (momentum := params.number("momentum")) is not None:
        draft.set("recipe.optimizer.momentum", momentum)
    if (nesterov := params.switch("nesterov")) is not None:
        draft.set("recipe.optimizer.nesterov", nesterov)
    _decay(params.number("weight_decay") if "weight_decay" in params else 0.0, "", draft)
    if dampening := params.number("dampening"):
        draft.remark(params.place("dampening"), dampening, "momentum has no dampening")


def _rate(params: SectionKeys, draft: Draft, default: float) -> None:
    has_rate = "lr" in params
    rate = params.number("lr")
    if rate:
        draft.set("recipe.optimizer.lr", rate)
    elif not has_rate:
        draft.set("recipe.optimizer.lr", default, "the default of DeepSpeed's optimizers")


def _decay(decay: float | None, why: str, draft: Draft) -> None:
    if decay is None:
        return
    draft.set("recipe.optimizer.weight_decay", decay, why)
    if decay:
        draft.set("recipe.optimizer.decay_all", True, _DECAY_ALL)


def _read_schedule(section: SectionKeys, draft: Draft) -> None:
    if not section:
        return
    name = section.take("type")
    params = section.section("params")
    if not isinstance(name, str) or name not in _SCHEDULES:
        if name is not None:
            draft.remark("scheduler.type", name, _OTHER_SCHEDULE)
        params.leave({}, _OTHER_SCHEDULE)
        section.leave({}, "no counterpart")
        return
    decay = _SCHEDULES[name]
    _warmup(params, draft, cosine=decay == "cosine")
    if decay != "none":
        draft.set("recipe.schedule.decay", decay)
        if (total := params.whole("total_num_steps")) is not None:
            draft.set("recipe.steps", total, "the steps over which DeepSpeed's schedule decays")
    if decay == "cosine":
        if "cos_min_ratio" not in params:
            draft.set("recipe.schedule.final", 1e-4, _DEFAULT)
        elif (least := params.number("cos_min_ratio")) is not None:
            draft.set("recipe.schedule.final", least)
    if decay == "linear" and "warmup_max_lr" not in params:
        _highest(DEFAULT_LR, _DEFAULT + " of warmup_max_lr, which replaces the optimizer's", params, draft)
    elif decay != "cosine" and (rate := params.number("warmup_max_lr")):
        own = draft.get("recipe.optimizer.lr")
        _highest(rate, "" if own == rate else f"the schedule's, which replaces the optimizer's {own}", params, draft)
    params.leave({}, "no counterpart")
    section.leave({}, "no counterpart")


_DEFAULT = "DeepSpeed's default"


def _highest(rate: float, why: str, params: SectionKeys, draft: Draft) -> None:
    """Set the recipe's learning rate to the highest of the schedule."""
    if draft.get("recipe.optimizer.name") is None:
        draft.remark(params.place("warmup_max_lr"), rate, "write it as recipe.optimizer.lr")
    else:
        draft.set("recipe.optimizer.lr", rate, why)


def _warmup(params: SectionKeys, draft: Draft, *, cosine: bool) -> None:
    steps = params.whole("warmup_num_steps", least=0)
    kind = params.word("warmup_type", ("log", "linear"))
    if "warmup_num_steps" not in params:
        draft.set("recipe.schedule.warmup", 1000, _DEFAULT)
    elif steps is not None and steps > 1:
        draft.set(
            "recipe.schedule.warmup",
            steps,
            "linear here, logarithmic in DeepSpeed"
            if kind != "linear"
            else "DeepSpeed's first two steps have the lowest rate",
        )
    lowest = "warmup_min_ratio" if cosine else "warmup_min_lr"
    if least := params.number(lowest):
        draft.remark(params.place(lowest), least, "a warm-up of W steps begins with 1 / W of the rate")


def written_optimizer(recipe: Recipe, remarks: list[str]) -> dict[str, Any]:
    optimizer = recipe.optimizer
    if isinstance(optimizer, NamedOptimizer):
        remarks.append(
            f"recipe.optimizer = {optimizer.name}: make it in the script, and hand it to deepspeed.initialize"
        )
        return {}
    if isinstance(optimizer, AdamW):
        settings = {
            "lr": optimizer.lr,
            "betas": list(optimizer.betas),
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
        }
        made = {"type": "AdamW", "params": settings}
        if optimizer.state != "full":
            remarks.append(
                f"recipe.optimizer.state = {optimizer.state}: DeepSpeed's AdamW keeps its averages in full"
            )
    else:
        settings = {"lr": optimizer.lr, "momentum": optimizer.momentum, "weight_decay": optimizer.weight_decay}
        made = {"type": "SGD", "params": {**settings, "nesterov": optimizer.nesterov}}
    if optimizer.weight_decay and not optimizer.decay_all:
        remarks.append(
            "recipe.optimizer.decay_all = false: DeepSpeed decays what it is handed; hand it two groups of "
            "parameters, the vectors (biases, norms) with weight_decay 0"
        )
    return {"optimizer": made}


def written_schedule(recipe: Recipe, remarks: list[str], expressed: set[str]) -> dict[str, Any]:
    """Write the schedule's section. DeepSpeed counts warm-up and decay in steps, so it needs the number of steps."""
    schedule, steps = recipe.schedule, recipe.steps
    if schedule.function is not None or schedule.hold or schedule.decay not in ("none", "linear", "cosine"):
        kind = f"function {schedule.function}" if schedule.function is not None else schedule.decay
        remarks.append(
            f"recipe.schedule = {kind}, hold {schedule.hold:g}: DeepSpeed's schedules are a warm-up with a linear or "
            "cosine decay after it; make it in PyTorch and hand it to deepspeed.initialize as lr_scheduler"
        )
        return {}
    if not schedule.warmup and schedule.decay == "none":
        return {}
    if steps is None and (schedule.decay != "none" or schedule.warmup < 1):
        remarks.append(
            f"recipe.schedule = {schedule.decay}, warm-up {schedule.warmup:g}: DeepSpeed wants a number of steps; "
            "a job with recipe.steps has one"
        )
        return {}
    warmup = int(schedule.warmup if schedule.warmup >= 1 else schedule.warmup * (steps or 0))
    settings: dict[str, Any] = {"warmup_num_steps": max(1, warmup), "warmup_type": "linear"}
    remarks.append(
        "recipe.schedule: DeepSpeed warms up over 2 steps at least, and its first step has the lowest rate"
    )
    if schedule.decay == "cosine":
        name, settings["cos_min_ratio"] = "WarmupCosineLR", schedule.final
    else:
        name = "WarmupDecayLR" if schedule.decay == "linear" else "WarmupLR"
        settings["warmup_max_lr"] = recipe.optimizer.lr
        if schedule.decay == "linear" and schedule.final:
            remarks.append(f"recipe.schedule.final = {schedule.final:g}: WarmupDecayLR goes down to 0")
    if schedule.decay != "none":
        settings["total_num_steps"] = steps
        expressed.add("recipe.steps")
    return {"scheduler": {"type": name, "params": settings}}
