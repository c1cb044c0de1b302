"""The parts of the contract about one step: its loss, the parameters behind it, its draws, and that it repeats."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from samestep.contract.draw_switches import switch_of_draws
from samestep.contract.errors import ContractError, at, line_of
from samestep.contract.trial import FORWARD, LOSS, Held, LossAndGradients, Trial, Writes, held_in
from samestep.parallel.complex_parameters import as_real
from samestep.parallel.exact import generators
from samestep.parallel.exact.batch_norm import first_batch_norm
from samestep.tasks.base import Task
from samestep.tasks.turns import Turn

PARAMETERS, DRAWS, REPEATABLE = "parameters", "draws", "repeatable"

_OF_TASK = " of the task"

# Tolerance between two runs of one forward in float32: kernels may sum in another order.
_ROUNDING = 1e-5

# Relative difference between a loss in float32 and in float64 above which the forward is looked at again.
_SURELY_OTHER = 1e-3

# Eight ranks scale the loss by eight, and divide the summed gradients by eight. A power of two rounds nothing.
TIMES = 8
_NOT_LINEAR = 1e-3


def first_loss(trial: Trial) -> tuple[Tensor, float]:
    """Take a training forward of all samples; return its loss and count. Other samples are taken if none counts."""
    try:
        total, count = trial.loss(0, len(trial.sampled))
        if count == 0 and (others := trial.elsewhere()) is not None:
            return others
        return total, count
    except ContractError as error:
        # A layer that isn't registered with the model is not moved to its device and dtype.
        lost = next(unregistered(trial.model), None)
        if error.part == FORWARD and lost is not None:
            raise _not_registered(trial, *lost) from error
        raise


def check_total(trial: Trial, total: Tensor, count: float) -> None:
    """Raise ContractError for a sum and count, of all samples of a trial, that can't be trained with."""
    number = len(trial.sampled)
    where = line_of(trial.loss_function)
    if not total.requires_grad:
        raise ContractError(
            LOSS,
            "the sum needs no gradient: it was computed under torch.no_grad(), from a detached tensor or from "
            f"numbers; compute it from the model's output{where}",
        )
    if not math.isfinite(total.item()) and trial.job.run.on_nonfinite == "stop":
        raise ContractError(
            LOSS, f"the sum over samples 0 to {number - 1} is {total.item()}, with initial weights{where}"
        )
    if not math.isfinite(count) or count <= 0:
        raise ContractError(
            LOSS,
            f"the count of samples 0 to {number - 1} is {count:g}; give how many terms the sum is over, "
            f"above 0{where}",
        )


def check_registered(trial: Trial, total: Tensor) -> None:
    """Raise ContractError where a loss, with its graph, depends on parameters that the model doesn't register."""
    own = {id(parameter) for parameter in trial.model.parameters()}
    for leaf in _leaves(total):
        if id(leaf) not in own and (isinstance(leaf, nn.Parameter) or id(leaf) in trial.plain_leaves):
            held = (*_held(trial.model), *_held_by_task(trial.task))
            name, holder = next(
                ((name, holder) for name, holder, tensor in held if tensor is leaf), ("a parameter", "")
            )
            raise _not_registered(trial, name, holder)


def check_reached(turn: Turn, reached: Sequence[str]) -> None:
    """Raise ContractError where a turn's loss reaches none of the parameters that the turn steps."""
    if not any(turn.steps(name) for name in reached):
        examples = ", ".join([*reached[:3], *(["..."] if len(reached) > 3 else [])]) or "no parameter at all"
        raise ContractError(
            PARAMETERS,
            f"the loss reaches none of its own parameters ({', '.join(turn.parameters)}), but {examples}; have the "
            "forward of this turn use them, without detach() or torch.no_grad(), or give the turn the parameters "
            f"that its loss is of{line_of(turn.loss)}",
        )


def check_writes(trial: Trial, writes: Writes) -> None:
    """Raise ContractError if a training forward has written to a parameter."""
    if writes.written is not None:
        owner = trial.model.get_submodule(writes.written.rpartition(".")[0])
        raise ContractError(
            PARAMETERS,
            f"the training forward writes to {writes.written} ({type(owner).__name__}); a rank that sees other "
            "samples, holds a part of it or runs several forwards a step would write something else; use the changed "
            "value without writing it back, as torch.nn.utils.parametrizations do, a buffer for a moving average, "
            f"and max_norm=None for a table{at(writes.line)}",
        )


def loss_scale(trial: Trial, count: float) -> float:
    """Return the power of two nearest to the factor by which one process's step scales a sample's loss."""
    return 2.0 ** round(math.log2(len(trial.sampled) / count / trial.job.recipe.batch))


def check_linear_backward(trial: Trial, count: float) -> None:
    """Raise ContractError where a loss scaled by 8 does not give gradients scaled by 8.

    Ranks and micro-batches scale the loss by different factors and sum the gradients, so gradients can't be clamped
    on the way.
    """
    scale = loss_scale(trial, count)
    _, before = trial.loss_and_gradients(scale)
    _, after = trial.loss_and_gradients(TIMES * scale)
    names = [name for name, parameter in trial.model.named_parameters() if parameter.requires_grad]
    for name, small, large in zip(names, before, after, strict=True):
        if small is None or large is None or small.is_sparse or large.is_sparse:
            continue
        expected = as_real(small) * TIMES
        apart, most = (as_real(large) - expected).abs().max().item(), expected.abs().max().item()
        if math.isfinite(apart) and math.isfinite(most) and apart > _NOT_LINEAR * max(most, 1e-30):
            raise ContractError(
                PARAMETERS,
                f"of a loss {TIMES} times as large, the gradient of {name} is not {TIMES} times as large: a hook "
                "or an autograd.Function changes gradients by their size, and a rank or a micro-batch has only a "
                f"part of a gradient; use recipe.clip to limit its norm{line_of(type(trial.model))}",
            )


def check_draws(trial: Trial, states: tuple[generators.State, generators.State]) -> None:
    """Raise ContractError where a training forward's random draws depend on the process, not on the sample.

    `states`: of the generators before the forward and after it. What is drawn from Python's and NumPy's may decide
    nothing, which takes more forwards to find out; so this comes after the backward of that forward's graph.
    """
    number = len(trial.sampled)
    who = generators.that_matters(*states, trial.loss_and_gradients, same_numbers)
    if who is not None:
        module = _module_that_draws(trial)
        place = generators.line_that_draws(lambda: trial.loss(0, number), trial.device, who)
        if (setting := switch_of_draws(trial.model, lambda: _who_draws(trial))) is not None:
            raise ContractError(
                DRAWS,
                f"{module} draws from {who} generator of random numbers, so that every layout would draw others; "
                f"without it the model draws nothing there: use {setting} in its configuration{at(place)}",
            )
        raise ContractError(
            DRAWS,
            f"{module} draws from {who} generator of random numbers, so that every layout would draw others; draw "
            "with torch.rand, randn, randint, bernoulli or normal, of shape [samples, ...], which are answered by "
            f"sample number, or use nn.Dropout{at(place)}",
        )


def _who_draws(trial: Trial) -> str | None:
    """The owner of the generator that a training forward advances; None if it advances none."""
    before = generators.state(trial.device)
    trial.loss(0, len(trial.sampled))
    return generators.moved(before, generators.state(trial.device))


def same_numbers(first: LossAndGradients, second: LossAndGradients) -> bool:
    """Whether two losses and their gradients are the same but for rounding."""
    for one, other in zip((first[0], *first[1]), (second[0], *second[1]), strict=True):
        if (one is None) is not (other is None):
            return False
        if one is not None and other is not None and not one.is_sparse:
            apart = (as_real(one) - as_real(other)).abs().max().item() if one.numel() else 0.0
            if apart > _ROUNDING * max(as_real(one).abs().max().item() if one.numel() else 0.0, 1e-30):
                return False
    return True


def check_no_draws_compiled(trial: Trial) -> None:
    """Raise ContractError where a model to be compiled has drawn: compiled blocks draw from their own generator."""
    if trial.dropout.answered:
        name, what = trial.dropout.answered[0]
        raise ContractError(
            DRAWS,
            f"run.compile is true, and {name or 'the model'} ({type(trial.model.get_submodule(name)).__name__}) "
            f"draws by {what}; numbers that are the same for every layout are not compiled yet: use "
            f"{'recipe.dropout: false, ' * trial.job.recipe.dropout}a probability of 0, or run.compile: false",
        )


def differs_from_first(trial: Trial, loss: float, first: float) -> bool:
    """Whether a loss in float64 is another than the very first call's in float32, beyond what rounding explains.

    Batch norms take their running statistics in one of the two, so that their models' losses can't be compared.
    """
    if first_batch_norm(trial.model) is not None:
        return False
    return not abs(loss - first) <= _SURELY_OTHER * max(abs(first), 1e-30)


def check_repeatable(trial: Trial) -> float:
    """Raise ContractError where the same samples give a different loss the second time; return the loss's count."""
    total, count = trial.loss(0, len(trial.sampled))
    again, _ = trial.loss(0, len(trial.sampled))
    if abs(again.item() - total.item()) > _ROUNDING * max(abs(total.item()), 1e-30):
        raise ContractError(
            REPEATABLE,
            f"the same samples and weights give a loss of {total.item():.7g} and then {again.item():.7g}: the "
            f"forward or the loss keeps something from call to call{line_of(type(trial.model).forward)}; a step may "
            "run its forward any number of times, so keep state in the task's data or in buffers alone",
        )
    return count


def _leaves(total: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors in which backward accumulates gradients."""
    seen: set[Any] = set()
    waiting: list[Any] = [total.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [before for before, _ in node.next_functions]


def unregistered(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Find parameters in attributes that PyTorch doesn't register: their path, and the container's type."""
    own = {id(parameter) for parameter in model.parameters()}
    for name, holder, held in _held(model):
        if id(held) not in own and isinstance(held, nn.Parameter):
            yield name, holder


def _held(model: nn.Module) -> Iterator[Held]:
    """Yield every parameter in lists, dictionaries and plain attributes of a model's modules."""
    for path, module in model.named_modules():
        yield from held_in(module, path)


def _held_by_task(task: Task) -> Iterator[Held]:
    """Yield the parameters in a task's attributes, such as those of a loss with trained weights."""
    for name, holder, held in held_in(task, ""):
        yield name + _OF_TASK, holder, held


def _not_registered(trial: Trial, name: str, holder: str) -> ContractError:
    """Build the error for a parameter that the loss depends on but the model doesn't register."""
    held = f"{name} (in {holder})" if holder else name
    owner = type(trial.task if name.endswith(_OF_TASK) else trial.model)
    return ContractError(
        PARAMETERS,
        f"the loss depends on {held}, which is not registered with the model, so it would not be moved, trained, "
        "sharded or saved; use nn.Parameter, nn.ModuleList, nn.ModuleDict or nn.ParameterList in an attribute of a "
        f"module{line_of(owner.__init__)}",
    )


def _module_that_draws(trial: Trial) -> str:
    """Name the innermost module whose forward advances a random generator."""
    drawing: list[str] = []
    before: list[generators.State] = []

    def begin(module: nn.Module, arguments: Any) -> None:
        before.append(generators.state(trial.device))

    def end_of(name: str) -> Any:
        """Return a forward hook that records the innermost module in whose forward a generator has advanced."""

        def end(module: nn.Module, arguments: Any, output: Any) -> None:
            if generators.moved(before.pop(), generators.state(trial.device)) and not drawing:
                drawing.append(f"{name or 'the model'} ({type(module).__name__})")

        return end

    handles = []
    for name, module in trial.model.named_modules():
        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end_of(name))]
    try:
        trial.loss(0, len(trial.sampled))
    finally:
        for handle in handles:
            handle.remove()
    return drawing[0] if drawing else "the loss"
