"""Writes the tables of docs/tested.md and docs/zh/tested.md from what `make test-cluster` has seen.

python tools/tested.py [build/cluster.json]
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from page_parts import markdown_table, write_parts

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"en": ROOT / "docs" / "tested.md", "zh": ROOT / "docs" / "zh" / "tested.md"}
HEADS = {
    "en": (
        "place",
        "command",
        "what was tried",
        "what was seen",
        "seconds to the first step",
        "seconds from the fault to the next step",
        "time limits that govern it",
    ),
    "zh": ("环境", "命令", "试了什么", "看到什么", "到第一步的秒数", "从故障到下一步的秒数", "起作用的时限"),
}
# Tests run in any order, and a table has one.
PLACES = (
    "torchrun",
    "hostfile, over SSH",
    "without SSH",
    "Slurm",
    "Open MPI",
    "horovodrun",
    "Ray",
    "SageMaker's variables",
    "PyTorchJob's variables",
)

# What tests say, as patterns, and in Chinese.
CHINESE = [
    (r"hostfile, over SSH", "hostfile，经 SSH"),
    (r"without SSH", "不经 SSH"),
    (r"2 ranks and 1", "2 个和 1 个 rank"),
    (
        r"each rank sees all three, and the sum of an all-reduce is right",
        "每个 rank 都看到全部三个，all-reduce 的和正确",
    ),
    (r"(SageMaker|PyTorchJob)'s variables", r"\1 的环境变量"),
    (r"2 hosts, a rank each", "2 台主机，各 1 个 rank"),
    (r"2 hosts", "2 台主机"),
    (r"from a third host, which has no rank", "从没有 rank 的第三台主机启动"),
    (r"(\S+) over 2 hosts", r"\1，跨 2 台主机"),
    (r"proof of (\S+)", r"\1 的验证"),
    (r"1 rank on one host, 2 on the other", "一台主机 1 个 rank，另一台 2 个"),
    (r"engine (\S+), hosts that find their own names on the loopback", r"引擎 \1，主机把自己的名字解析到回环地址"),
    (r"engine (\S+)", r"引擎 \1"),
    (
        r"3 hosts that find their own names on the loopback \(127\.0\.1\.1\)",
        "3 台主机把自己的名字解析到回环地址（127.0.1.1）",
    ),
    (r"2 hosts that find their own names on the loopback", "2 台主机把自己的名字解析到回环地址"),
    (r"2 jobs at once on the same 2 hosts", "同样的 2 台主机上同时运行 2 个任务"),
    (r"2 hosts with (\S+) Mbit/s between them", r"2 台主机，之间 \1 Mbit/s"),
    (r"2 hosts with (\S+) ms each way between them", r"2 台主机，单程延迟 \1 ms"),
    (r"2 hosts with (\S+) ms each way and 1 % of frames lost between them", r"2 台主机，单程延迟 \1 ms，丢包 1 %"),
    (
        r"2 hosts with (\S+) Mbit/s, (\S+) ms each way and (\S+) % of frames lost between them",
        r"2 台主机，之间 \1 Mbit/s，单程延迟 \2 ms，丢包 \3 %",
    ),
    (r"a checkpoint folder that the hosts don't share", "各主机不共享检查点目录"),
    (r"a host crashes, in a job that wants both", "任务需要两台主机，一台崩溃"),
    (r"the job ends after (\S+) s and names it", r"任务 \1 秒后结束并指出它"),
    (r"a host crashes and boots again", "一台主机崩溃后重新启动"),
    (r"the first host, which has rank 0, crashes and boots again", "第一台主机（rank 0 在那里）崩溃后重新启动"),
    (r"a host loses its power and boots again", "一台主机断电后重新启动"),
    (r"a rank is killed", "一个 rank 被杀"),
    (
        r"a host's agent gets SIGTERM, as where its machine is shut down",
        "一台主机的代理收到 SIGTERM，就像机器正在关机",
    ),
    (
        r"a host's cable is pulled, and put back after the other has gone on",
        "拔掉一台主机的网线，另一台继续之后再插回",
    ),
    (
        r"a host's cable is pulled while the other's rank waits in an all-reduce",
        "另一台的 rank 正在 all-reduce 中等待时，拔掉一台主机的网线",
    ),
    (r"a cable pulled for 3 s", "网线拔掉 3 秒"),
    (
        r"2 of 3 hosts crash at once and boot again; a checkpoint every (\S+) steps",
        r"3 台主机中的 2 台同时崩溃后重新启动；每 \1 步一个检查点",
    ),
    (
        r"2 of 3 hosts crash one by one and boot again; copies in memory every (\S+) steps",
        r"3 台主机中的 2 台先后崩溃后重新启动；每 \1 步在内存中留一份副本",
    ),
    (r"the host that serves the store loses its power", "提供 store 的主机断电"),
    (r"the losses of one process", "与单进程的损失相同"),
    (r"the losses of one process, to (\S+) in float32", r"与单进程的损失相同（float32，误差 \1 以内）"),
    (r"both have the losses of one process", "两个任务都与单进程的损失相同"),
    (r"same step, largest relative difference (\S+)", r"同一步，最大相对差 \1"),
    (r"its folders and hyperparameters, 2 containers", "它的目录和超参数，2 个容器"),
    (
        r"the losses of one process, in the first container's output folder",
        "与单进程的损失相同，写在第一个容器的输出目录里",
    ),
    (r"refused before the first step", "在第一步之前就被拒绝"),
    (r"the other ends after (\S+) s", r"另一台在 \1 秒后结束"),
    (r"the other goes on; the losses of one process", "另一台继续；与单进程的损失相同"),
    (r"all ranks start again; the losses of one process", "所有 rank 重新启动；与单进程的损失相同"),
    (
        r"all save after one step, the other goes on from there; the losses of one process",
        "都在同一步后存好，另一台从那里继续；与单进程的损失相同",
    ),
    (
        r"the other goes on, the host joins again; the losses of one process",
        "另一台继续，该主机重新加入；与单进程的损失相同",
    ),
    (r"survived; the losses of one process", "挺了过去；与单进程的损失相同"),
    (r"the losses of one process, and no host is lost", "与单进程的损失相同，没有主机被误判为失联"),
    (
        r"the other goes on alone, then with both; the global batch stays, the losses of one process",
        "剩下的一台独自继续，之后三台一起继续；全局 batch 不变，与单进程的损失相同",
    ),
    (
        r"the other ends after (\S+) s and names it; samestep train there goes on from the last checkpoint",
        r"另一台 \1 秒后结束并指出它；在那里运行 samestep train 从最后的检查点继续",
    ),
    (r"(--\S+) (\S+) s", r"\1 \2 秒"),
    (r"(--\S+) (\S+) s; (--\S+) (\S+) s", r"\1 \2 秒；\3 \4 秒"),
    (r"(--\S+) (\S+) s; hosts gather for (\S+) s", r"\1 \2 秒；主机集合 \3 秒"),
    (
        r"3 heartbeats missing, (\S+) s apart; hosts gather for (\S+) s",
        r"连缺 3 次心跳，每次间隔 \1 秒；主机集合 \2 秒",
    ),
    (
        r"no heartbeat for (\S+) s; hosts gather for (\S+) s",
        r"\1 秒没有心跳；主机集合 \2 秒",
    ),
]


def chinese(text: str) -> str:
    """A test's words in Chinese. Raises KeyError for words that are not known."""
    for pattern, words in CHINESE:
        if match := re.fullmatch(pattern, text):
            return match.expand(words)
    if not text or text in PLACES:
        return text  # a program's name
    raise KeyError(f"tools/tested.py has no Chinese for {text!r}")


def table(rows: Sequence[Mapping[str, Any]], language: str) -> str:
    """One line for each way that was tried; within a place, what was broken comes last."""
    say = chinese if language == "zh" else str
    lines: list[list[str]] = []
    for row in sorted(rows, key=_order):
        first, next_ = (_seconds(row[name]) for name in ("first_step_seconds", "recovery_seconds"))
        words = [say(row[name]) for name in ("tried", "seen")]
        lines.append([say(row["place"]), f"`{row['command']}`", *words, first, next_, say(row["limits"])])
    return markdown_table(HEADS[language], lines, align="l")


def _order(row: Mapping[str, Any]) -> Any:
    return PLACES.index(row["place"]), bool(row["limits"]), row["command"], row["tried"]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "cluster.json"
    rows = list(json.loads(file.read_text(encoding="utf-8")).values())
    for language, page in PAGES.items():
        write_parts(page, {"tested": table(rows, language)})
    print(f"{len(rows)} rows written to {' and '.join(str(page.relative_to(ROOT)) for page in PAGES.values())}")


if __name__ == "__main__":
    main()
