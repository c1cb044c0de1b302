"""Columns of the comparison's two tables, of time and of what it took, for the terminal and for the page."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from samestep.comparison.methods import SINGLE_CORE
from samestep.display.columns import SharedColumn
from samestep.display.page import Words
from samestep.display.tables import formatted

if TYPE_CHECKING:  # a comparison writes the page that has these columns
    from samestep.comparison.results import Comparison, ComparisonRow

Columns: TypeAlias = "Sequence[SharedColumn[ComparisonRow]]"


def known_columns() -> Columns:
    """The columns of the table of time that every row has, measured or not."""
    return [
        _method(),
        SharedColumn(None, Words("engine", "引擎"), lambda row: row.method.engine, words=True),
        SharedColumn(None, Words("layout", "布局"), lambda row: row.method.layout, words=True),
        SharedColumn("ranks", Words("processes", "进程数"), lambda row: str(row.processes), whole=True),
    ]


def time_columns(comparison: "Comparison") -> Columns:
    """The columns of time of measured rows."""
    whole = partial(SharedColumn, whole=True)

    def seconds(row: "ComparisonRow") -> str:
        return formatted(row.seconds, "{:.2f}")

    def spread(row: "ComparisonRow") -> str:
        times = [run.seconds for run in row.runs]
        return f"{min(times):.2f} - {max(times):.2f}"

    def speed_up(row: "ComparisonRow") -> str:
        return formatted(comparison.speed_up(row), "{:.2f}")

    def over_core(row: "ComparisonRow") -> str:
        return formatted(comparison.speed_up(row, SINGLE_CORE), "{:.2f}")

    def samples(row: "ComparisonRow") -> str:
        return formatted(row.median(lambda run: run.samples_per_second), "{:,.0f}")

    def step(row: "ComparisonRow") -> str:
        return formatted(row.median(lambda run: run.step_seconds), "{:.1f}", 1e-3)

    def startup(row: "ComparisonRow") -> str:
        return formatted(row.median(lambda run: run.startup_seconds), "{:.1f}")

    return [
        whole("seconds", Words("seconds of training, median", "训练秒数（中位数）"), seconds, key="seconds"),
        whole("min - max", Words("min - max", "最小 - 最大"), spread),
        whole("x single", Words("times one process", "相对单进程"), speed_up, key="speed_up"),
        whole("x one\ncore", Words("times one core", "相对单核"), over_core),
        whole("samples/s", Words("samples/s", "样本/秒"), samples),
        whole("steps", Words("steps", "步数"), lambda row: f"{row.runs[0].steps:,}"),
        whole("ms a step", None, step),
        whole("start-up,\ns", Words("start-up, s", "启动（秒）"), startup),
    ]


def cost_columns(comparison: "Comparison") -> Columns:
    """The columns of memory, traffic, score, and agreement with one process."""
    metric = (comparison.metric_name or "metric").replace("_", " ")

    def rank_memory(row: "ComparisonRow") -> str:
        return formatted(row.largest_memory, "{:,.0f}", 1e6)

    def all_memory(row: "ComparisonRow") -> str:
        return formatted(row.all_memory, "{:,.0f}", 1e6)

    def sent(row: "ComparisonRow") -> str:
        return formatted(row.sent, "{:,.2f}", 1e6)

    def difference(row: "ComparisonRow") -> str:
        return f"{row.same_step.difference:.1e}" if row.same_step else ""

    def tolerance(row: "ComparisonRow") -> str:
        return f"{row.same_step.tolerance:.2g}, {row.same_step.precision}" if row.same_step else ""

    return [
        _method(),
        SharedColumn("engine", None, lambda row: row.method.engine, words=True),
        SharedColumn("precision", Words("precision", "精度"), lambda row: row.precision, words=True),
        SharedColumn("MB of\na rank", Words("MB, largest rank", "MB，最大的 rank"), rank_memory),
        SharedColumn("MB of\nall", Words("MB, all ranks", "MB，全部 rank"), all_memory),
        SharedColumn("MB\nsent", Words("MB sent, step and rank", "MB，每步每 rank 发送"), sent),
        SharedColumn(metric, metric, lambda row: formatted(row.metric, "{:.4f}")),
        SharedColumn(None, Words("largest difference of the first losses", "前几步损失的最大差异"), difference),
        SharedColumn(None, Words("tolerance", "容差"), tolerance),
        # In the terminal wrapped where the parameter that differs has a long name.
        SharedColumn("same step", Words("same step", "同一步"), verdict, key="same_step", words=True),
    ]


def _method() -> "SharedColumn[ComparisonRow]":
    return SharedColumn(
        "method", Words("method", "方法"), lambda row: row.method.name, key="method", least=17, words=True
    )


def verdict(row: "ComparisonRow") -> str:
    """Describe a row's first steps: within tolerance or not, how far apart, in which precision."""
    if not row.synchronous:
        return "asynchronous"
    if row.same_step is None:
        return ""
    held = row.same_step
    if held.parameters is not None and not held.parameters.same and held.difference < held.tolerance:
        return f"NO, {held.parameters.parameter} in {held.precision}"
    if held.norms is not None and not held.norms.same and held.difference < held.tolerance:
        return f"NO, gradient norms by {held.norms.difference:.0e} in {held.precision}"
    return f"{'yes' if held.same else 'NO'}, {held.difference:.0e} in {held.precision}"
