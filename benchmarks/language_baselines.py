"""Baseline perplexities of counting models on a language model's held-out text, to compare a training's with.

    python benchmarks/language_baselines.py [JOB.yaml]

Three predictions of the next token: uniform; by the frequencies of tokens in the training set; and by counts of
bigrams, smoothed by those frequencies: (pairs + s * frequency) / (tokens + s). Of several s it uses the best one on
the last tenth of the training set, with counts of the rest.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from samestep import jobfile
from samestep.data.tokenizer import IGNORED
from samestep.data.types import Samples
from samestep.tasks.registry import resolve

STRENGTHS = (3, 10, 30, 100, 300, 1000)
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "language.yaml"

Pairs = NDArray[np.int64]  # [pairs, 2]: a token and the next one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", type=Path, default=EXAMPLE)
    options = parser.parse_args()
    task = resolve(jobfile.load(options.job).job.recipe)
    samples = task.eval_set()
    if samples is None:
        raise SystemExit(f"{options.job} holds nothing out, so there is nothing to guess")
    train, held_out = pairs_of(task.train_set()), pairs_of(samples)
    tokens = 1 + int(max(train.max(), held_out.max()))
    most = len(train) * 9 // 10
    best = min(STRENGTHS, key=lambda strength: of_pairs(train[:most], train[most:], tokens, strength))
    print(f"{len(train):,} tokens to count, {len(held_out):,} held out, {tokens:,} different ones")
    print(f"perplexity of equal chances: {tokens}")
    print(f"of frequencies: {of_frequencies(train, held_out, tokens):.1f}")
    print(f"of pairs, smoothed with s = {best}: {of_pairs(train, held_out, tokens, best):.1f}")


def pairs_of(samples: Samples) -> Pairs:
    found: list[Pairs] = []
    for number in range(len(samples)):
        inputs, targets = samples[number]
        known = targets != IGNORED
        found.append(np.stack([inputs[known], targets[known]], axis=1))
    return np.concatenate(found)


def of_frequencies(train: Pairs, held_out: Pairs, tokens: int) -> float:
    return perplexity(_frequencies(train, tokens)[held_out[:, 1]])


def of_pairs(train: Pairs, held_out: Pairs, tokens: int, strength: float) -> float:
    counts = np.zeros((tokens, tokens))
    np.add.at(counts, (train[:, 0], train[:, 1]), 1)
    before, after = held_out.T
    smoothed = counts[before, after] + strength * _frequencies(train, tokens)[after]
    return perplexity(smoothed / (counts.sum(axis=1)[before] + strength))


def _frequencies(train: Pairs, tokens: int) -> NDArray[np.float64]:
    """Each token's share of the targets, with one added to each count, so that none is zero."""
    counts = np.bincount(train[:, 1], minlength=tokens) + 1.0
    return counts / counts.sum()


def perplexity(chances: NDArray[np.float64] | Sequence[float]) -> float:
    return float(np.exp(-np.log(chances).mean()))


if __name__ == "__main__":
    main()
