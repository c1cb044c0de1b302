"""What each engine is and can do, from its `Abilities`: `python tools/engine_table.py` writes the pages' tables.

It also writes the table of the methods of `samestep compare`. `tests/test_docs.py` compares all in both languages.
An ability has its words here, once; what an engine is, it says itself.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from page_parts import ROOT, markdown_table, write_parts

from samestep.comparison.methods import METHODS
from samestep.engines import ENGINES
from samestep.engines.base import Abilities
from samestep.engines.registry import resolve

PAGES = {"en": ROOT / "docs" / "engines" / "README.md", "zh": ROOT / "docs" / "zh" / "engines" / "README.md"}
ENGINE_PART, PART = "engines", "abilities"
_TITLES = {"en": ("what", "key", "engines"), "zh": ("能力", "键", "引擎")}
_ALL, _NONE = {"en": "all", "zh": "全部"}, {"en": "none", "zh": "无"}

# Ability -> the key of a job that wants it, if one does, and what it is.
WORDS: Mapping[str, tuple[str, str, str]] = {
    "same_step": ("", "the same step as one process", "与单进程同样的一步"),
    "checkpoints": ("run.checkpoint", "checkpoints that any layout resumes", "任何布局都能接着训练的检查点"),
    "skips": ("run.on_nonfinite", "`skip` and `rollback`", "`skip` 和 `rollback`"),
    "own_optimizers": (
        "recipe.groups",
        "any optimizer by name, and groups of parameters",
        "按名字给出的任何优化器，以及参数组",
    ),
    "averages": ("recipe.average", "a moving average of the weights", "权重的滑动平均"),
    "adapters": ("recipe.adapter", "low-rank adapters", "低秩适配器"),
    "master_weights": ("recipe.master_weights", "bf16 parameters with float32 copies", "bf16 参数，带 float32 副本"),
    "attention_dropout": ("recipe.attention_dropout", "attention without its dropout", "不用注意力的 dropout"),
    "sends_less": ("recipe.communication", "methods that send less", "少发送的方法"),
    "several_losses": ("", "losses of several terms", "由几项组成的损失"),
    "turns": ("", "steps in turns", "轮流的步"),
    "gathers": ("", "losses that compare samples", "比较样本的损失"),
    "batch_buffers": (
        "",
        "buffers that a forward fills (`batch_buffers()`)",
        "由前向填写的缓冲区（`batch_buffers()`）",
    ),
    "complex_parameters": ("", "complex parameters", "复数参数"),
    "compiles": ("run.compile", "compiled blocks", "编译的块"),
    "chunks_loss": ("run.loss_chunk", "logits in chunks", "分块的 logits"),
    "ordered": ("run.reduction", "the same bits (`ordered`)", "逐位相同（`ordered`）"),
    "profiles": ("run.profile", "where a step's time goes", "一步的时间用在哪里"),
    "buckets": ("run.bucket_mb", "the size of buckets", "桶的大小"),
    "shared_memory": ("run.transport", "shared memory on a host", "主机内用共享内存"),
    "sparse_rows": ("run.sparse_rows", "rows of embeddings that were used", "只发送用到的嵌入行"),
    "shares_replicas": ("run.share_replicas", "one copy for the replicas of a host", "一台主机的副本共用一份"),
    "float32_matmul": ("run.float32_matmul", "the precision of float32 products", "float32 矩阵乘的精度"),
}
_OTHERS = ("about", "axes", "stages", "precisions", "recompute", "offload", "attention", "config", "packages")

_ENGINE_TITLES = {
    "en": ("engine", "what takes the step", "layouts", "proved in", "installed by"),
    "zh": ("引擎", "由谁走步", "布局", "证明所用精度", "安装"),
}
# Layouts that split a mesh axis, without those by stages of ZeRO.
_OF_AXIS = {"replicate": "dpN", "tensor": "tpN", "pipeline": "ppN", "context": "cpN", "expert": "epN"}
_OF_STAGE = {1: "zero1xN", 2: "zero2xN", 3: "fsdpN"}
_NOT_PROVED = {"en": "not the same step", "zh": "不是同一步"}
_WITH_SAMESTEP = {"en": "is part of samestep", "zh": "随 samestep 安装"}


METHOD_PART = "methods"
METHOD_PAGES = {"en": ROOT / "docs" / "compare.md", "zh": ROOT / "docs" / "zh" / "compare.md"}
_METHOD_TITLES = {
    "en": ("name", "what trains", "engine", "layout", "started by", "by default"),
    "zh": ("名称", "训练什么", "引擎", "布局", "由什么启动", "默认比较"),
}
_HANDWRITTEN = {"en": "none: plain PyTorch", "zh": "无：纯 PyTorch"}
_N = 7777  # processes, a number that is in no name


def engine_rows(language: str) -> str:
    """A row for each engine: what it says of itself, the layouts by its axes, and how it is installed."""
    separator = ", " if language == "en" else "、"
    rows = []
    for name in ENGINES:
        able = resolve(name).abilities
        if able.about is None:
            raise SystemExit(f"engine {name}: its abilities have no `about`, which says what takes the step")
        layouts = [layout for axis, layout in _OF_AXIS.items() if axis in able.axes]
        layouts += [_OF_STAGE[stage] for stage in sorted(able.stages)] * ("shard" in able.axes)
        proved = ("float64" if "fp64" in able.precisions else "float32") if able.same_step else _NOT_PROVED[language]
        installed = dict.fromkeys(command.partition(", ")[0] for command in able.packages.values())
        rows.append(
            [
                _linked(name, PAGES[language]),
                getattr(able.about, language),
                separator.join(f"`{layout}`" for layout in layouts or ["single"]),
                proved,
                separator.join(f"`{command.removeprefix('use ')}`" for command in installed)
                or _WITH_SAMESTEP[language],
            ]
        )
    return markdown_table(_ENGINE_TITLES[language], rows, align="lllll")


def _linked(name: str, page: Path) -> str:
    """The engine's name, linked to its page or its family's, where it has one."""
    for target in (f"{name}.md", f"{name.partition('-')[0]}.md", f"../{name}.md"):
        if (page.parent / target).is_file():
            return f"[`{name}`]({target})"
    return f"`{name}`"


def ability_table(language: str) -> str:
    """A row for each ability, with the engines that declare it. Raises SystemExit for one without words."""
    rows = []
    names = [field.name for field in fields(Abilities) if field.name not in _OTHERS]
    if sorted(names) != sorted(WORDS):
        raise SystemExit(f"WORDS in tools/engine_table.py has other abilities: {sorted({*names} ^ {*WORDS})}")
    separator = ", " if language == "en" else "、"
    for name, (key, english, chinese) in WORDS.items():
        able = [engine for engine in ENGINES if getattr(resolve(engine).abilities, name)]
        others = [engine for engine in ENGINES if engine not in able]
        shown = separator.join(f"`{engine}`" for engine in able) or _NONE[language]
        if able and len(others) < len(able):
            but = separator.join(f"`{engine}`" for engine in others)
            shown = _ALL[language] + ({"en": f" but {but}", "zh": f"，除了 {but}"}[language] if others else "")
        rows.append([english if language == "en" else chinese, f"`{key}`" if key else "", shown])
    for name in ("precisions", "recompute", "offload", "attention"):
        rows += _values(name, separator)
    return markdown_table(_TITLES[language], rows, align="lll")


def _values(name: str, separator: str) -> list[list[str]]:
    """A row for each value of an option that some engines have and others don't."""
    by_value: dict[str, list[str]] = {}
    for engine in ENGINES:
        for value in getattr(resolve(engine).abilities, name):
            by_value.setdefault(value, []).append(engine)
    key = "recipe.precision" if name == "precisions" else "run.layout"
    return [
        [
            f"`{value}`" if name == "precisions" else f"`{name}={value}`",
            f"`{key}`",
            separator.join(f"`{engine}`" for engine in able),
        ]
        for value, able in sorted(by_value.items())
        if len(able) < len(ENGINES)
    ]


def method_table(language: str) -> str:
    """A row for each method that `samestep compare` knows by name, those first that it compares by default."""
    yes = {"en": "yes", "zh": "是"}[language]
    methods = sorted((method.of(_N) for method in METHODS), key=lambda method: not method.default)
    rows = [
        [
            f"`{_with_n(method.name)}`",
            _with_n(getattr(method.title, language)),
            f"`{method.engine}`" if method.engine in ENGINES else _HANDWRITTEN[language],
            f"`{_with_n(method.layout)}`",
            method.start.name if method.start.name in ("samestep", "python") else f"`{method.start.name}`",
            yes if method.default else "",
        ]
        for method in methods
    ]
    return markdown_table(_METHOD_TITLES[language], rows, align="llllll")


def _with_n(text: str) -> str:
    return text.replace(str(_N), "N")


def main() -> None:
    for language, file in METHOD_PAGES.items():
        write_parts(file, {METHOD_PART: method_table(language)})
    for language, file in PAGES.items():
        write_parts(file, {ENGINE_PART: engine_rows(language), PART: ability_table(language)})


if __name__ == "__main__":
    main()
