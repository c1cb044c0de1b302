"""The part of the contract about evaluation: held-out samples, scores that metrics take, and no draws."""

import warnings
from collections.abc import Mapping
from typing import Any

from samestep.contract.errors import ContractError, at, line_of, said
from samestep.contract.samples import MOST
from samestep.contract.trial import Trial, Writes
from samestep.data.nests import equal
from samestep.data.sample_draws import sample_of
from samestep.data.types import as_batch
from samestep.recipe import EarlyStop
from samestep.tasks.base import Task
from samestep.training.early_stop import check_number
from samestep.training.evaluation import check_metrics, named_parts, on_cpu, plain

EVALUATION = "evaluation"


def check_evaluation(trial: Trial) -> None:
    """Raise ContractError where held-out samples can't be scored, which a training would find at its end."""
    task = trial.task
    with said(EVALUATION, "eval_set()"):
        samples = task.eval_set()
        if samples is None or len(samples) == 0:
            return
        few = [sample_of(samples, index) for index in range(min(MOST // 3, len(samples)))]
        sample_of(samples, len(samples) - 1)
        batch = as_batch(task.collate(few))
    layout = trial.layout
    if task.held_out_tried() and layout.pipeline == 1 and trial.job.recipe.early_stop is None:
        return
    scored: list[Any] = []
    with said(EVALUATION, "the model's forward in evaluation mode"), Writes(trial.model) as writes:
        who = trial.moved_generator(
            lambda: scored.append(trial.evaluate(batch)), lambda: trial.evaluate(batch), equal
        )
    if who is not None:
        raise ContractError(
            EVALUATION,
            f"the model draws from {who} generator of random numbers in evaluation mode, where every layout would "
            "draw others; draw only while self.training, or, where that code is another's, let eval_set() give None "
            f"and evaluate in one process{line_of(type(trial.model).forward)}",
        )
    if writes.written is not None and layout.pipeline > 1:
        raise ContractError(
            EVALUATION,
            f'layout "{layout}": the forward of {type(trial.model).__name__} writes to {writes.written} in '
            f"evaluation mode{at(writes.line)}, of which stages of other ranks have a placeholder; use "
            f"dp{layout.size} or fsdp{layout.size}",
            complete=True,
        )
    output, batch = scored[0]
    with said(EVALUATION, "metrics()", of=task.metrics):
        metrics = task.metrics()
        check_metrics(metrics)
    if not metrics:
        return  # nothing is scored
    written = type(task).scores is not Task.scores
    with said(EVALUATION, "scores()", of=task.scores if written else type(task)):
        scores = on_cpu(task.scores(output, batch))
    for name, metric in metrics.items():
        with said(EVALUATION, f"metric {name}, updated with what scores() gives,"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of too few samples to say anything
            metric.update(*scores)
    _check_early_stop(trial.job.recipe.early_stop, metrics, task)


def _check_early_stop(spec: EarlyStop | None, metrics: Mapping[str, Any], task: Task) -> None:
    """Raise ContractError where the metric that is to end a training is not one number."""
    if spec is None or spec.metric not in metrics:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            computed = {
                name: plain(named_parts(metric, metric.compute()), task.class_names())
                for name, metric in metrics.items()
            }
    except Exception:  # of too few samples, such as those of one class alone
        return
    with said(EVALUATION, "metrics()", of=task.metrics):
        check_number(spec, computed)
