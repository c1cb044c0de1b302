"""The table of docs/is-my-training-right.md with scripts of other projects, from what `verify --script` has written.

    samestep verify --script "-m trl.scripts.sft ..." --processes 2 --json build/scripts/trl-2.json
    python benchmarks/public_scripts.py trl build/scripts/trl-2.json build/scripts/trl-4.json [--docs]

The scripts and what they load are not part of this repository: `SCRIPTS` names them and their arguments. A call
replaces what was kept of one script under as many ranks; others stay. What was looked up about a run by hand is its
`remark` in benchmarks/measured/public-scripts.json, in both languages; a new run of the same script has none.
`--docs` writes the table into both pages.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from page_parts import MeasuredTable, markdown_table

RANKS = (2, 4)
SCRIPTS: Mapping[str, Mapping[str, str]] = {
    "trl": {
        "en": "[TRL](https://github.com/huggingface/trl) 1.16.0, `-m trl.scripts.sft` (transformers' Trainer)",
        "zh": "[TRL](https://github.com/huggingface/trl) 1.16.0，`-m trl.scripts.sft`（transformers 的 Trainer）",
    },
    "lightning": {
        "en": "[Lightning](https://github.com/Lightning-AI/pytorch-lightning), its example "
        "`fabric/language_model/train.py`, with `LT_CLI_USED=1 LT_ACCELERATOR=cpu LT_STRATEGY=ddp LT_DEVICES=2` "
        "(or 4) before it, and `LT_DEVICES=1` alone",
        "zh": "[Lightning](https://github.com/Lightning-AI/pytorch-lightning)，其示例 "
        "`fabric/language_model/train.py`，前面加 `LT_CLI_USED=1 LT_ACCELERATOR=cpu LT_STRATEGY=ddp LT_DEVICES=2`"
        "（或 4），单独运行时 `LT_DEVICES=1`",
    },
    "accelerate-accumulation": {
        "en": "[Accelerate](https://github.com/huggingface/accelerate), its example "
        "`by_feature/gradient_accumulation_for_autoregressive_models.py --cpu --gradient_accumulation_steps 2`",
        "zh": "[Accelerate](https://github.com/huggingface/accelerate)，其示例 "
        "`by_feature/gradient_accumulation_for_autoregressive_models.py --cpu --gradient_accumulation_steps 2`",
    },
    "accelerate-nlp": {
        "en": "Accelerate, its example `nlp_example.py --cpu`",
        "zh": "Accelerate，其示例 `nlp_example.py --cpu`",
    },
    "imagenet": {
        "en": "[PyTorch's examples](https://github.com/pytorch/examples), `imagenet/main.py --dummy --no-accel -j 0 "
        "--dist-url env:// --dist-backend gloo --seed 1`, with `-b 4` on 2 ranks, `-b 2` on 4 and `-b 8` alone",
        "zh": "[PyTorch 的示例](https://github.com/pytorch/examples)，`imagenet/main.py --dummy --no-accel -j 0 "
        "--dist-url env:// --dist-backend gloo --seed 1`，2 个 rank 用 `-b 4`，4 个用 `-b 2`，单独用 `-b 8`",
    },
    "trl-dpo": {
        "en": "TRL 1.16.0, `-m trl.scripts.dpo --max_steps 6 --use_cpu`; a folder of pairs of answers, a Llama "
        "of two layers of 32",
        "zh": "TRL 1.16.0，`-m trl.scripts.dpo --max_steps 6 --use_cpu`；一个成对回答的文件夹，两层、宽 32 的 Llama",
    },
    "trl-reward": {
        "en": "TRL 1.16.0, `-m trl.scripts.reward --max_steps 6 --use_cpu`; likewise",
        "zh": "TRL 1.16.0，`-m trl.scripts.reward --max_steps 6 --use_cpu`；同上",
    },
    "nanogpt": {
        "en": "[nanoGPT](https://github.com/karpathy/nanoGPT), `train.py config/train_shakespeare_char.py`, "
        "`--on cpu`, with two layers of 32, "
        "`--dropout=0.0 --compile=False --dtype=float32 --gradient_accumulation_steps=4`",
        "zh": "[nanoGPT](https://github.com/karpathy/nanoGPT)，`train.py config/train_shakespeare_char.py`，"
        "`--on cpu`，两层、宽 32，`--dropout=0.0 --compile=False --dtype=float32 --gradient_accumulation_steps=4`",
    },
    "mingpt-ddp": {
        "en": "PyTorch's examples, `distributed/minGPT-ddp`, `--on cpu --seed 0`, two layers of 32, batches of "
        "8, without `use_amp`; its text, and boto3 as a module without functions",
        "zh": "PyTorch 的示例，`distributed/minGPT-ddp`，`--on cpu --seed 0`，两层、宽 32，批为 8，不用 "
        "`use_amp`；用它自己的文本，boto3 是一个没有函数的模块",
    },
    "minimind": {
        "en": "[minimind](https://github.com/jingyaogong/minimind), `trainer/train_pretrain.py`, `--on cpu`, "
        "two layers of 64, `--batch_size 4 --accumulation_steps 2`; 400 lines of text and a tokenizer made of them",
        "zh": "[minimind](https://github.com/jingyaogong/minimind)，`trainer/train_pretrain.py`，`--on cpu`，"
        "两层、宽 64，`--batch_size 4 --accumulation_steps 2`；400 行文本，分词器由它们训练",
    },
    "ignite-cifar10": {
        "en": "[ignite](https://github.com/pytorch/ignite), `cifar10/main.py run --backend gloo`, "
        "`--on cpu`; in place of torchvision 400 random images and a small convolution with batch norm",
        "zh": "[ignite](https://github.com/pytorch/ignite)，`cifar10/main.py run --backend gloo`，"
        "`--on cpu`；用 400 张随机图像和一个带 batch norm 的小卷积网络代替 torchvision",
    },
    "fsdp2": {
        "en": "PyTorch's examples, `distributed/FSDP2/example.py`, `--on cpu --seed 0`",
        "zh": "PyTorch 的示例，`distributed/FSDP2/example.py`，`--on cpu --seed 0`",
    },
    "lightning-transformer": {
        "en": "Lightning, its example `pytorch/basics/transformer.py` with `PL_TRAINER_DEVICES=2 "
        "PL_TRAINER_ACCELERATOR=cpu "
        "PL_TRAINER_STRATEGY=ddp` before it, and `PL_TRAINER_DEVICES=1` alone; a text of words in random order",
        "zh": "Lightning 的示例 `pytorch/basics/transformer.py`，前面加 `PL_TRAINER_DEVICES=2 "
        "PL_TRAINER_ACCELERATOR=cpu "
        "PL_TRAINER_STRATEGY=ddp`，单独运行时 `PL_TRAINER_DEVICES=1`；文本由随机排列的单词组成",
    },
    "tensor-parallel": {
        "en": "PyTorch's examples, `distributed/tensor_parallelism/tensor_parallel_example.py`, `--on cpu --seed 0 "
        "--alone-processes 2`",
        "zh": "PyTorch 的示例，`distributed/tensor_parallelism/tensor_parallel_example.py`，`--on cpu --seed 0 "
        "--alone-processes 2`",
    },
    "sequence-parallel": {
        "en": "PyTorch's examples, `distributed/tensor_parallelism/sequence_parallel_example.py`, `--on cpu "
        "--seed 0`",
        "zh": "PyTorch 的示例，`distributed/tensor_parallelism/sequence_parallel_example.py`，`--on cpu --seed 0`",
    },
    "fsdp-tp": {
        "en": "PyTorch's examples, `distributed/tensor_parallelism/fsdp_tp_example.py`, `--on cpu "
        "--alone-processes 2`",
        "zh": "PyTorch 的示例，`distributed/tensor_parallelism/fsdp_tp_example.py`，`--on cpu --alone-processes 2`",
    },
    "glue": {
        "en": "[transformers](https://github.com/huggingface/transformers), `run_glue_no_trainer.py "
        "--max_train_steps 6 "
        "--per_device_train_batch_size 8 --seed 1`, with `ACCELERATE_USE_CPU=true` before it; a BERT of two "
        "layers of 32",
        "zh": "[transformers](https://github.com/huggingface/transformers)，`run_glue_no_trainer.py "
        "--max_train_steps 6 "
        "--per_device_train_batch_size 8 --seed 1`，前面加 `ACCELERATE_USE_CPU=true`；两层、宽 32 的 BERT",
    },
    "sentence-transformers": {
        "en": "[sentence-transformers](https://github.com/huggingface/sentence-transformers), "
        "`training/nli/training_nli.py`, `--on cpu --seed 0`; the same BERT, random pairs of sentences",
        "zh": "[sentence-transformers](https://github.com/huggingface/sentence-transformers)，"
        "`training/nli/training_nli.py`，`--on cpu --seed 0`；同一个 BERT，随机的句子对",
    },
    "pyg": {
        "en": "[PyG](https://github.com/pyg-team/pytorch_geometric), its example `pytorch_lightning/gin.py`, "
        "`--on cpu "
        "--seed 0`; 300 random graphs",
        "zh": "[PyG](https://github.com/pyg-team/pytorch_geometric)，其示例 `pytorch_lightning/gin.py`，`--on cpu "
        "--seed 0`；300 个随机图",
    },
}
WORDS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "script": "script",
        "ranks": "{} ranks",
        "same": "the same step",
        "figures": ": {steps} steps, gradients within {gradients}, noise {noise}",
        "other": "not the same step: `{kind}`",
        "first": ", in step {first_step}",
        "none": "no verdict",
    },
    "zh": {
        "script": "脚本",
        "ranks": "{} 个 rank",
        "same": "同一步",
        "figures": "：{steps} 步，梯度相差不超过 {gradients}，噪声 {noise}",
        "other": "不是同一步：`{kind}`",
        "first": "，在第 {first_step} 步",
        "none": "没有结论",
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("files", type=Path, nargs="+", help="JSON files of `samestep verify --script`")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    options = parser.parse_args()
    found = [row_of(options.script, json.loads(file.read_text(encoding="utf-8"))) for file in options.files]
    rows = merged(TABLE.kept(), found)
    print(markdown(rows, "en"))
    if options.docs:
        TABLE.keep(rows)


def row_of(script: str, proof: Mapping[str, Any]) -> dict[str, Any]:
    """What is shown of a proof: of the same step the largest difference of gradients beside the largest noise."""
    first = proof["first_difference"]
    return {
        "script": script,
        "ranks": proof["processes"],
        "same_step": proof["same_step"],
        "steps": proof["steps"],
        "gradients": max((each["gradient"] or 0.0 for each in proof["curve"]), default=0.0),
        "noise": max((each["gradient_noise"] or 0.0 for each in proof["curve"]), default=0.0),
        "kind": proof["kind"],
        "first_step": first["step"] if first else None,
    }


def merged(known: Sequence[Mapping[str, Any]], found: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    rows = {(row["script"], row["ranks"]): row for row in (*known, *found)}
    return [rows[key] for key in sorted(rows, key=lambda key: (list(SCRIPTS).index(key[0]), key[1]))]


def markdown(rows: Sequence[Mapping[str, Any]], language: str) -> str:
    by_place = {(row["script"], row["ranks"]): row for row in rows}
    lines = [
        [title[language], *(cell(by_place.get((script, ranks)), language) for ranks in RANKS)]
        for script, title in SCRIPTS.items()
    ]
    words = WORDS[language]
    return markdown_table([words["script"], *(words["ranks"].format(each) for each in RANKS)], lines, align="l")


def cell(row: Mapping[str, Any] | None, language: str) -> str:
    """The verdict, its figures where they are known, and what was remarked about the run."""
    if row is None:
        return ""
    words = WORDS[language]
    shown = {**row, **{name: small(row[name]) for name in ("gradients", "noise") if row.get(name) is not None}}
    if row["same_step"] is None:  # the script was refused
        told = words["none"]
    elif row["same_step"]:
        told = words["same"] + (words["figures"].format(**shown) if "gradients" in shown else "")
    else:
        told = words["other"].format(**shown) + (words["first"].format(**shown) if row.get("first_step") else "")
    return told + row.get("remark", {}).get(language, "")


def small(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


TABLE = MeasuredTable(
    name="public-scripts", part="benchmarks/public_scripts.py", page="docs/is-my-training-right.md", text=markdown
)


if __name__ == "__main__":
    main()
