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


def _adamw(name: str, given: SectionKeys, draft: Draft) -> None:
    left_out = "weight_decay" not in given
    decay = given.number("weight_decay")
    decoupled = given.switch("adam_w_mode")
    if own := given.switch("torch_adam"):
        draft.remark(given.place("torch_adam"), own, "PyTorch's fused kernel is taken where there is one")
    section = {"type": name, "params": {"torch_adam": own, "adam_w_mode": decoupled is not False}}
    why = ""
    if decay and adds_decay_to_gradient(section):
        why = "added to the gradient by DeepSpeed's adam_w_mode: false; decoupled here, which is another training"
    draft.set("recipe.optimizer.name", "adamw", "" if name.lower() == "adamw" else "DeepSpeed's Adam is AdamW, too")
    _rate(given, draft, default=DEFAULT_LR)
    if (betas := given.take("betas")) is not None:
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise UserError(f"{given.place('betas')} is {betas!r}; it should be a list of two numbers")
        draft.set("recipe.optimizer.betas", list(betas))
    if (eps := given.number("eps")) is not None:
        draft.set("recipe.optimizer.eps", eps)
    if left_out:
        decay = default_decay(section)
        why = "PyTorch's default" if own else "DeepSpeed's default"
    _decay(decay, why, draft)
    for switch in ("bias_correction", "amsgrad"):
        if (value := given.switch(switch)) not in (None, NEUTRAL[switch]):
            draft.remark(given.place(switch), value, "AdamW is computed without it")


def _sgd(given: SectionKeys, draft: Draft) -> None:
    draft.set("recipe.optimizer.name", "sgd")
    _rate(given, draft, default=DEFAULT_LR)
    if (momentum := given.number("momentum")) is not None:
        draft.set("recipe.optimizer.momentum", momentum)
    if (nesterov := given.switch("nesterov")) is not None:
        draft.set("recipe.optimizer.nesterov", nesterov)
    _decay(given.number("weight_decay") if "weight_decay" in given else 0.0, "", draft)
    if dampening := given.number("dampening"):
        draft.remark(given.place("dampening"), dampening, "momentum has no dampening")


def _rate(given: SectionKeys, draft: Draft, default: float) -> None:
    asked = "lr" in given
    rate = given.number("lr")
    if rate:
        draft.set("recipe.optimizer.lr", rate)
    elif not asked:
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
    given = section.section("params")
    if not isinstance(name, str) or name not in _SCHEDULES:
        if name is not None:
            draft.remark("scheduler.type", name, _OTHER_SCHEDULE)
        given.leave({}, _OTHER_SCHEDULE)
        section.leave({}, "no counterpart")
        return
    decay = _SCHEDULES[name]
    _warmup(given, draft, cosine=decay == "cosine")
    if decay != "none":
        draft.set("recipe.schedule.decay", decay)
        if (total := given.whole("total_num_steps")) is not None:
            draft.set("recipe.steps", total, "the steps over which DeepSpeed's schedule decays")
    if decay == "cosine":
        if "cos_min_ratio" not in given:
            draft.set("recipe.schedule.final", 1e-4, _DEFAULT)
        elif (least := given.number("cos_min_ratio")) is not None:
            draft.set("recipe.schedule.final", least)
    if decay == "linear" and "warmup_max_lr" not in given:
        _highest(DEFAULT_LR, _DEFAULT + " of warmup_max_lr, which replaces the optimizer's", given, draft)
    elif decay != "cosine" and (rate := given.number("warmup_max_lr")):
        own = draft.get("recipe.optimizer.lr")
        _highest(rate, "" if own == rate else f"the schedule's, which replaces the optimizer's {own}", given, draft)
    given.leave({}, "no counterpart")
    section.leave({}, "no counterpart")


_DEFAULT = "DeepSpeed's default"


def _highest(rate: float, why: str, given: SectionKeys, draft: Draft) -> None:
    """Set the recipe's learning rate to the highest of the schedule."""
    if draft.get("recipe.optimizer.name") is None:
        draft.remark(given.place("warmup_max_lr"), rate, "write it as recipe.optimizer.lr")
    else:
        draft.set("recipe.optimizer.lr", rate, why)


def _warmup(given: SectionKeys, draft: Draft, *, cosine: bool) -> None:
    steps = given.whole("warmup_num_steps", least=0)
    kind = given.word("warmup_type", ("log", "linear"))
    if "warmup_num_steps" not in given:
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
    if least := given.number(lowest):
        draft.remark(given.place(lowest), least, "a warm-up of W steps begins with 1 / W of the rate")


def written_optimizer(recipe: Recipe, remarks: list[str]) -> dict[str, Any]:
    given = recipe.optimizer
    if isinstance(given, NamedOptimizer):
        remarks.append(f"recipe.optimizer = {given.name}: make it in the script, and hand it to deepspeed.initialize")
        return {}
    if isinstance(given, AdamW):
        settings = {"lr": given.lr, "betas": list(given.betas), "eps": given.eps, "weight_decay": given.weight_decay}
        made = {"type": "AdamW", "params": settings}
        if given.state != "full":
            remarks.append(f"recipe.optimizer.state = {given.state}: DeepSpeed's AdamW keeps its averages in full")
    else:
        settings = {"lr": given.lr, "momentum": given.momentum, "weight_decay": given.weight_decay}
        made = {"type": "SGD", "params": {**settings, "nesterov": given.nesterov}}
    if given.weight_decay and not given.decay_all:
        remarks.append(
            "recipe.optimizer.decay_all = false: DeepSpeed decays what it is handed; hand it two groups of "
            "parameters, the vectors (biases, norms) with weight_decay 0"
        )
    return {"optimizer": made}


def written_schedule(recipe: Recipe, remarks: list[str], said: set[str]) -> dict[str, Any]:
    """Write the schedule's section. DeepSpeed counts warm-up and decay in steps, so it needs the number of steps."""
    given, steps = recipe.schedule, recipe.steps
    if given.function is not None or given.hold or given.decay not in ("none", "linear", "cosine"):
        kind = f"function {given.function}" if given.function is not None else given.decay
        remarks.append(
            f"recipe.schedule = {kind}, hold {given.hold:g}: DeepSpeed's schedules are a warm-up with a linear or "
            "cosine decay after it; make it in PyTorch and hand it to deepspeed.initialize as lr_scheduler"
        )
        return {}
    if not given.warmup and given.decay == "none":
        return {}
    if steps is None and (given.decay != "none" or given.warmup < 1):
        remarks.append(
            f"recipe.schedule = {given.decay}, warm-up {given.warmup:g}: DeepSpeed wants a number of steps; "
            "a job with recipe.steps has one"
        )
        return {}
    warmup = int(given.warmup if given.warmup >= 1 else given.warmup * (steps or 0))
    settings: dict[str, Any] = {"warmup_num_steps": max(1, warmup), "warmup_type": "linear"}
    remarks.append(
        "recipe.schedule: DeepSpeed warms up over 2 steps at least, and its first step has the lowest rate"
    )
    if given.decay == "cosine":
        name, settings["cos_min_ratio"] = "WarmupCosineLR", given.final
    else:
        name = "WarmupDecayLR" if given.decay == "linear" else "WarmupLR"
        settings["warmup_max_lr"] = recipe.optimizer.lr
        if given.decay == "linear" and given.final:
            remarks.append(f"recipe.schedule.final = {given.final:g}: WarmupDecayLR goes down to 0")
    if given.decay != "none":
        settings["total_num_steps"] = steps
        said.add("recipe.steps")
    return {"scheduler": {"type": name, "params": settings}}
