"""Kinds of differences that proofs of scripts and of jobs report, with their texts in both languages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from samestep.display.page import Words

KINDS: Mapping[str, Words] = {
    # Samples
    "same-samples": Words(
        "every rank trains on the same samples: {samples} different ones in a step of {rows} rows",
        "每个 rank 都在训练相同的样本：一步 {rows} 行中只有 {samples} 个不同的样本",
    ),
    "padded-sampler": Words(
        "the sampler repeats {count} samples to give every rank as many (DistributedSampler pads)",
        "采样器重复了 {count} 个样本，使每个 rank 数量相同（DistributedSampler 的填充）",
    ),
    "lost-samples": Words(
        "{count} samples of this step are never trained on when the job is split",
        "切分之后，这一步有 {count} 个样本没有参与训练",
    ),
    "leftover-carried": Words(
        "gradients of the last {batches} micro-batches of an epoch were never stepped: they are added to this step's",
        "一个 epoch 最后 {batches} 个 micro-batch 的梯度没有用于更新：它们加到了这一步的梯度里",
    ),
    "step-skipped": Words(
        "the split run skips a batch of {count} samples that one process trains on",
        "切分运行跳过了一个有 {count} 个样本的批，而单个进程用它训练",
    ),
    "step-not-skipped": Words(
        "the split run trains on a batch of {count} samples that one process skips",
        "切分运行用一个有 {count} 个样本的批训练，而单个进程跳过了它",
    ),
    "data-differs": Words(
        "ranks {ranks} have other data than rank 0 under the same numbers: each makes or splits it at random",
        "rank {ranks} 与 rank 0 在相同编号下的数据不同：每个 rank 各自随机生成或划分数据",
    ),
    "repeated-samples": Words(
        "ranks shuffle each for itself: {count} samples come twice within an epoch, others never",
        "每个 rank 各自打乱：一个 epoch 内有 {count} 个样本出现两次，另一些从不出现",
    ),
    "same-order-each-epoch": Words(
        "the order of the first epoch is repeated in the next one (sampler.set_epoch is not called)",
        "下一个 epoch 重复了第一个 epoch 的顺序（没有调用 sampler.set_epoch）",
    ),
    "resume-repeats": Words(
        "after the resumption samples are repeated: step {step} trains on those of step {other}",
        "恢复之后重复了样本：第 {step} 步训练的是第 {other} 步的样本",
    ),
    "resume-skips": Words(
        "after the resumption samples are skipped: step {step} trains on those of step {other}",
        "恢复之后跳过了样本：第 {step} 步训练的是第 {other} 步的样本",
    ),
    "resume-other-order": Words(
        "after the resumption the samples come in another order",
        "恢复之后样本的顺序不同了",
    ),
    # Weights
    "weights-not-broadcast": Words(
        "ranks begin with different weights: those of rank 0 are not broadcast",
        "各 rank 的初始权重不同：没有广播 rank 0 的权重",
    ),
    "other-initial-weights": Words(
        "the split run begins with other weights than the run alone",
        "切分运行的初始权重与单独运行的不同",
    ),
    "not-initialised": Words(
        "{count} parameters hold no values before the first step: to_empty gave them memory, and nothing filled it",
        "{count} 个参数在第一步之前没有值：to_empty 只分配了内存，之后没有写入",
    ),
    "other-dtype": Words(
        "weights are {split} when the job is split, and {alone} in one process",
        "切分运行的权重是 {split}，单个进程是 {alone}",
    ),
    "weights-drift": Words(
        "ranks have different weights before this step, and began with equal ones",
        "各 rank 在这一步之前的权重不同，而开始时相同",
    ),
    "ranks-differ": Words(
        "ranks have different weights after the step, of equal gradients",
        "梯度相同，但这一步之后各 rank 的权重不同",
    ),
    # Gradients
    "not-reduced": Words(
        "no gradient is reduced: every rank steps by its own samples",
        "梯度没有做归约：每个 rank 只按自己的样本更新",
    ),
    "parameter-not-reduced": Words(
        "these parameters' gradients are never reduced: every rank has its own",
        "这些参数的梯度从不归约：每个 rank 各有一份",
    ),
    "missing-gradient": Words(
        "these parameters have no gradient when the job is split",
        "切分之后，这些参数没有梯度",
    ),
    "zero-alone": Words(
        "in one process all gradients of this step are 0, as where a batch is skipped; on several ranks they are not",
        "单个进程在这一步的梯度全为 0（例如跳过了一个批）；切分之后却不是",
    ),
    "zero-split": Words(
        "on several ranks all gradients of this step are 0, as where a batch is skipped; in one process they are not",
        "切分之后这一步的梯度全为 0（例如跳过了一个批）；单个进程却不是",
    ),
    "summed": Words(
        "gradients are {ratio:.3f} times as large: summed over {by} ranks, not averaged",
        "梯度是 {ratio:.3f} 倍：在 {by} 个 rank 上求了和，而不是平均",
    ),
    "divided-twice": Words(
        "gradients are {ratio:.3f} times as large: divided by the {by} ranks once too often",
        "梯度是 {ratio:.3f} 倍：多除了一次 rank 数 {by}",
    ),
    "accumulation-divisor": Words(
        "gradients are {ratio:.3f} times as large: the divisor of the accumulation over {by} micro-batches is wrong",
        "梯度是 {ratio:.3f} 倍：{by} 个 micro-batch 的累积除数不对",
    ),
    "lost-micro-batches": Words(
        "gradients are those of a part of the step's micro-batches",
        "梯度只来自这一步的一部分 micro-batch",
    ),
    "gradients-scaled": Words(
        "gradients are {ratio:.4g} times as large",
        "梯度是 {ratio:.4g} 倍",
    ),
    "some-gradients-scaled": Words(
        "the gradients of these parameters are {ratio:.4g} times as large, the others' are right",
        "这些参数的梯度是 {ratio:.4g} 倍，其余参数的梯度正确",
    ),
    "parts-weighted": Words(
        "the samples of ranks or micro-batches count {weights} times as much as they should",
        "各 rank 或 micro-batch 的样本所占的权重是应有的 {weights} 倍",
    ),
    "mean-of-means": Words(
        "a mean of means: each rank or micro-batch divides by its own {name} ({counts}), and the results count alike",
        "均值的均值：每个 rank 或 micro-batch 除以自己的 {name}（{counts}），结果却按同样的权重平均",
    ),
    "local-batch-statistics": Words(
        "batch norm takes the mean and the variance of each rank's own rows (SyncBatchNorm takes all ranks')",
        "批归一化用的是每个 rank 自己那些行的均值和方差（SyncBatchNorm 用全部 rank 的）",
    ),
    "lost-targets": Words(
        "the losses of all ranks count {split:.6g} targets, where one process counts {alone:.6g}: some have none",
        "所有 rank 的损失共计 {split:.6g} 个目标，而单个进程有 {alone:.6g} 个：有些没有计入",
    ),
    "padding-matters": Words(
        "what this module makes of a sample depends on how far its batch is padded: rows are {alone} long in one "
        "process, and {split} on ranks",
        "这个模块对样本的结果取决于批被填充到多长：单个进程的行长为 {alone}，各 rank 为 {split}",
    ),
    "loss-of-own-rows": Words(
        "all modules that were compared give the same outputs, and the loss is {split:.9g} (the mean over ranks) "
        "instead of {alone:.9g}, as where it is no mean over samples and each rank makes it of its own",
        "所有比较过的模块输出相同，而损失是 {split:.9g}（各 rank 的平均），应为 {alone:.9g}："
        "例如损失不是样本的平均，而每个 rank 只用自己的样本计算",
    ),
    "backward-differs": Words(
        "all modules that were compared give the same outputs, and losses are {apart:.1g} apart: what differs is "
        "done in the backward, with the gradients, or in a small part of the loss",
        "所有比较过的模块输出相同，损失只相差 {apart:.1g}：不同之处在反向传播里，在对梯度的处理里，"
        "或在损失的一小部分里",
    ),
    "further-parameters": Words(
        "the split run trains {count} parameters that one process doesn't have ({names}), such as copies of shared "
        "ones",
        "切分运行多训练了 {count} 个单个进程没有的参数（{names}），例如共享参数的副本",
    ),
    "weights-not-sent": Words(
        "ranks {ranks} have no optimizer and go on with weights of their own: those that rank {of} makes don't "
        "arrive",
        "rank {ranks} 没有优化器，仍用自己的权重继续：rank {of} 更新的权重没有送达",
    ),
    "own-draws": Words(
        "ranks are not the same after this, and each draws random numbers of its own that are not by samples "
        "({name}, shape {shape})",
        "此后各 rank 不再相同，而每个 rank 各自抽取与样本无关的随机数（{name}，形状 {shape}）",
    ),
    "weights-averaged": Words(
        "ranks step by their own gradients, and their weights are averaged: with this optimizer that is another step",
        "每个 rank 按自己的梯度更新，之后平均权重：对这个优化器来说，这是另一个步骤",
    ),
    "local-steps": Words(
        "every rank steps by its own samples {count} times before weights are averaged (Local SGD)",
        "每个 rank 先按自己的样本走 {count} 步，然后才平均权重（Local SGD）",
    ),
    "reduced-otherwise": Words(
        "gradients are not the mean of what each rank's own loss gives (all of them as one: {ratio:.4g} times it)",
        "梯度不是各 rank 自己的损失所给梯度的平均（合起来是它的 {ratio:.4g} 倍）",
    ),
    "forward-differs": Words(
        "for the same samples and weights this module gives other results",
        "样本和权重相同，这个模块给出的结果却不同",
    ),
    "gradients-differ": Words(
        "for the same samples and weights the gradients are others",
        "样本和权重相同，梯度却不同",
    ),
    # Clipping
    "clip-before-reduction": Words(
        "each rank clips its own gradient before they are reduced: norms {norms}",
        "每个 rank 在归约之前裁剪自己的梯度：范数 {norms}",
    ),
    "clip-local-norm": Words(
        "each rank clips by the norm of its own shards: norms {norms}",
        "每个 rank 按自己那份分片的范数裁剪：范数 {norms}",
    ),
    "clip-each-micro-batch": Words(
        "gradients are clipped {count} times in a step, before all micro-batches are added up",
        "一步之内裁剪了 {count} 次，micro-batch 还没有全部累加",
    ),
    "not-clipped": Words(
        "gradients are clipped alone, and not when the job is split",
        "单独运行时裁剪梯度，切分之后没有裁剪",
    ),
    # Optimizer
    "schedule-steps": Words(
        "the learning-rate schedule is stepped {by} times in each step",
        "学习率调度器在每一步里走了 {by} 次",
    ),
    "other-group": Words(
        "these parameters are in another group of the optimizer: their learning rate is {split:.4g} instead of "
        "{alone:.4g}, that of others",
        "这些参数在优化器的另一个组里：学习率是 {split:.4g}（其他参数的学习率），应为 {alone:.4g}",
    ),
    "learning-rate-scaled": Words(
        "the learning rate is {ratio:.4g} times as large ({split:.4g} instead of {alone:.4g})",
        "学习率是 {ratio:.4g} 倍（{split:.4g}，应为 {alone:.4g}）",
    ),
    "learning-rate": Words(
        "the learning rate is {split:.4g} instead of {alone:.4g}",
        "学习率是 {split:.4g}，应为 {alone:.4g}",
    ),
    "settings-differ": Words(
        "ranks have different settings of the optimizer: {name} is {values}",
        "各 rank 的优化器设置不同：{name} 为 {values}",
    ),
    "schedule-length": Words(
        "the schedule is longer than the training: it ends after {split} steps, one process takes {alone} or more, "
        "and each step has the same rate; the last one is {rate:.3g} (its length ignores the number of ranks)",
        "调度比训练更长：训练在 {split} 步后结束，单个进程则走 {alone} 步或更多，而每一步的学习率相同；"
        "最后的学习率是 {rate:.3g}（调度的长度没有考虑 rank 数）",
    ),
    "learning-rate-differs": Words(
        "ranks have different learning rates: {rates}",
        "各 rank 的学习率不同：{rates}",
    ),
    "weight-decay": Words(
        "weight decay is {split:.4g} instead of {alone:.4g} on {count} parameters",
        "{count} 个参数的权重衰减是 {split:.4g}，应为 {alone:.4g}",
    ),
    "optimizer-setting": Words(
        "the optimizer's {name} is {split} instead of {alone}",
        "优化器的 {name} 是 {split}，应为 {alone}",
    ),
    "not-in-optimizer": Words(
        "these parameters are not in the optimizer when the job is split",
        "切分之后，这些参数不在优化器里",
    ),
    "other-shape": Words(
        "these parameters have other shapes when the job is split ({split} instead of {alone}), and ranks' parts do "
        "not make up the whole",
        "切分之后这些参数的形状不同（{split}，应为 {alone}），各 rank 的部分合起来也不是完整的参数",
    ),
    "optimizer-state-lost": Words(
        "after the resumption the optimizer begins without its state: equal gradients, another update",
        "恢复之后优化器没有了原来的状态：梯度相同，更新不同",
    ),
    "optimizer-state-differs": Words(
        "after the resumption ranks make other updates of equal gradients: ranks {ranks} have loaded no state of the "
        "optimizer",
        "恢复之后梯度相同，而各 rank 的更新不同：rank {ranks} 没有加载优化器的状态",
    ),
    "update-differs": Words(
        "of equal gradients and settings the optimizer makes another update",
        "梯度和设置都相同，优化器的更新却不同",
    ),
    "weights-differ": Words(
        "these weights are others after the step; the gradients are not known",
        "这一步之后这些权重不同；梯度不得而知",
    ),
    "ends-early": Words(
        "the split run ends after {split} steps, and one process goes on",
        "切分运行在 {split} 步后结束，而单个进程继续训练",
    ),
    "steps-differ": Words(
        "the optimizer steps {split} times where it steps {alone} times alone",
        "优化器走了 {split} 步，单独运行时是 {alone} 步",
    ),
    # What no optimizer holds
    "copies-differ": Words(
        "ranks have different copies or averages of the weights ({copy}): each rank's follows its own",
        "各 rank 的权重副本或平均（{copy}）不同：每个 rank 只跟随自己的",
    ),
    "copy-differs": Words(
        "copied or averaged weights that no optimizer holds ({copy}) are others than in the run alone",
        "不属于任何优化器的权重副本或平均（{copy}）与单独运行的不同",
    ),
    "copy-not-updated": Words(
        "copied or averaged weights ({copy}) stay what they were at the beginning, and follow the training alone",
        "权重副本或平均（{copy}）一直停留在最初的值，而单独运行时会随训练更新",
    ),
    "copy-lost": Words(
        "after the resumption copied or averaged weights ({copy}) are not those of before: they begin anew",
        "恢复之后权重副本或平均（{copy}）不是之前的：它们重新开始了",
    ),
    "weights-changed": Words(
        "{who}: weights are changed between two steps, by no optimizer, and not on the others",
        "{who}：两步之间权重被改动，不是由优化器改动，而其他进程没有",
    ),
    "scaler-state-lost": Words(
        "after the resumption gradients are scaled by {split:.6g} instead of {alone:.6g}: the scaler's state is lost",
        "恢复之后梯度的缩放是 {split:.6g}，应为 {alone:.6g}：缩放器的状态丢失了",
    ),
    "scaler-differs": Words(
        "gradients are scaled by {split:.6g} instead of {alone:.6g}",
        "梯度的缩放是 {split:.6g}，应为 {alone:.6g}",
    ),
    "random-states-equal": Words(
        "after the resumption all ranks draw the same random numbers, and did not before: all load one rank's states",
        "恢复之后所有 rank 抽到相同的随机数，而之前不同：它们都加载了同一个 rank 的状态",
    ),
    # Buffers, random numbers, evaluation
    "buffers-differ": Words(
        "ranks have different buffers: each follows its own samples",
        "各 rank 的 buffer 不同：每个 rank 只跟随自己的样本",
    ),
    "buffer": Words("this buffer is another one", "这个 buffer 不同"),
    "equal-draws": Words(
        "all ranks draw the same random numbers: masks, noise or augmentation of different samples are equal",
        "所有 rank 抽到相同的随机数：不同样本的掩码、噪声或增强相同",
    ),
    "loss-differs": Words(
        "of equal gradients the loss that is reported is another one",
        "梯度相同，报告的损失却不同",
    ),
    "evaluation-differs": Words(
        "after equal steps the metrics of the held-out samples are others",
        "每一步都相同，留出样本的指标却不同",
    ),
    "evaluation-joined": Words(
        "what ranks make of their shares of the evaluation is {split:.6g} as a mean, one process has {alone:.6g}: "
        "shares of unlike sizes count alike, or what is averaged is no mean over samples ({shares})",
        "各 rank 由自己那份评估得出的数，平均是 {split:.6g}，而单个进程得到 {alone:.6g}："
        "大小不同的份额按同样的权重计算，或者被平均的数不是样本的平均（{shares}）",
    ),
    "evaluation-own-share": Words(
        "each rank evaluates a share of {count} samples, and their numbers are not joined: each is that of its share",
        "每个 rank 只评估 {count} 个样本中的一份，得出的数没有合并：每个数只是自己那份的",
    ),
    "evaluation-repeats": Words(
        "evaluation counts {count} samples more than once",
        "评估把 {count} 个样本算了不止一次",
    ),
    "evaluation-loses": Words(
        "evaluation leaves {count} samples out",
        "评估漏掉了 {count} 个样本",
    ),
}


class _Shown(str):
    """A number as it is shown, whatever format a text has for it."""

    def __format__(self, format_spec: str) -> str:
        return str(self)


def _told_apart(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Facts whose two numbers are shown with as many digits as tell them apart."""
    one, other = facts.get("alone"), facts.get("split")
    if not isinstance(one, float) or not isinstance(other, float) or f"{one:.4g}" != f"{other:.4g}" or one == other:
        return facts
    digits = next(digits for digits in range(5, 18) if f"{one:.{digits}g}" != f"{other:.{digits}g}")
    return {**facts, "alone": _Shown(f"{one:.{digits}g}"), "split": _Shown(f"{other:.{digits}g}")}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A difference, and what it looks like."""

    kind: str
    step: int  # of the optimizer, from 1; 0: before the first one
    what: str  # samples, initial weights, gradient, learning rate, parameters, buffers, evaluation
    relative: float  # how large it is
    module: str | None = None  # or parameter, where it is not in all
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> Words:
        return KINDS[self.kind].format(**_told_apart(self.facts))

    @property
    def place(self) -> Words:
        """The step, and the module or parameter where it is not in all."""
        en, zh = (f", {self.module}", f"，{self.module}") if self.module else ("", "")
        if not self.step:
            return Words(f"Before step 1{en}", f"第 1 步之前{zh}")
        return Words(f"Step {self.step}{en}", f"第 {self.step} 步{zh}")

    @property
    def line(self) -> str:
        """Where, what it looks like, and how large it is."""
        where = f"step {self.step}, {self.what}" if self.step else self.what
        module = f" of {self.module}" if self.module else ""
        size = f" (relative difference {self.relative:.2g})" if math.isfinite(self.relative) else ""
        return f"{where}{module}: {self.words.en}{size} [{self.kind}]"

    def to_json(self) -> dict[str, Any]:
        """`relative` is None where nothing can be measured, as of a gradient that is missing."""
        return {
            "kind": self.kind,
            "words": self.words.en,
            "step": self.step,
            "what": self.what,
            "module": self.module,
            "relative": self.relative if math.isfinite(self.relative) else None,
        }
