"""The graph net of the examples: the same step under layouts, and graphs that differ in their edges alone."""

from pathlib import Path

import pytest
import torch
from proving import assert_same_steps

import samestep
from samestep.tasks.registry import resolve

EXAMPLE = Path(__file__).parent.parent / "examples" / "graph.py"


def recipe() -> samestep.Recipe:
    return samestep.Recipe(task=f"{EXAMPLE}:Graphs", args={"samples": 90, "held_out": 30}, batch=15, clip=1.0)


@pytest.mark.timeout(300)
def test_the_graph_net_takes_the_same_steps() -> None:
    same = recipe()
    assert_same_steps([(same, "dp2", {}), (same, "fsdp2", {})], steps=2)


def test_classes_differ_in_edges_alone() -> None:
    samples = resolve(recipe()).train_set()
    kinds, near = torch.zeros(3, 30), torch.zeros(3, 30)
    for number in range(90):
        features, pairs, label = samples[number]
        assert pairs.shape[1] == 2 * len(features)
        first = features[:, 0] > 0
        kinds[label, number // 3] = first.double().mean()
        near[label, number // 3] = (first[pairs[0]] == first[pairs[1]]).double().mean()
    assert (kinds.mean(1) - 0.5).abs().max() < 0.08
    like, unlike, mixed = near.mean(1).tolist()
    assert like > mixed + 0.15 > unlike + 0.3
