"""The page of a job's proofs opens without a network, draws, and has every verdict and reason in both languages."""

import re
from html import unescape
from math import inf
from pathlib import Path

import chromium
import pytest

from samestep.display.proofs_page import page
from samestep.script_proof.kinds import Finding
from samestep.verification.matrix import MatrixRow
from samestep.verification.proof import Proof


def proof(layout: str, difference: float, departure: Finding | None = None) -> Proof:
    names = ("loss", "grad_norm", "parameters", "metrics")
    return Proof(
        layout=layout,
        dtype="float64",
        steps=3,
        max_relative_difference=dict.fromkeys(names, difference),
        tolerance=1e-10,
        worst_parameter="weight",
        by_step={"loss": [difference] * 3, "grad_norm": [difference] * 3},
        departure=departure,
    )


SUMMED = Finding(kind="gradients-scaled", step=1, what="gradient", relative=1.0, facts={"ratio": 2.0})
ROWS = {
    "same": MatrixRow(job="reviews", layout="dp2", proof=proof("dp2", 2.5e-16)),
    "differs": MatrixRow(job="reviews", layout="fsdp2", proof=proof("fsdp2", inf, SUMMED)),
    "refused": MatrixRow(job="reviews", layout="tp2", reason='layout "tp2": nothing can be <sliced>'),
    "failed": MatrixRow(job="reviews", layout="pp2", failure="ValueError: planted"),
}


def test_it_opens_without_a_network_and_draws(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(list(ROWS.values())), encoding="utf-8")
    opened = chromium.open_page(file, tmp_path)
    assert opened.console == []
    assert opened.fetched == []
    for name in ("differences", "steps"):
        plot = re.search(rf'id="{name}".*?</noscript>', opened.document, re.DOTALL)
        assert plot is not None
        assert "main-svg" in plot[0], name
    assert "the same step: 1, NOT the same step: 1, refused: 1, failed: 1" in opened.document
    assert "同一步：1，不是同一步：1，被拒绝：1，失败：1" in opened.document


@pytest.mark.parametrize("name", ROWS)
def test_the_verdict_and_its_reason_stand_in_both_languages(name: str) -> None:
    row = ROWS[name]
    text = page([row]).split("<h1>")[-1]
    verdict = {
        "same": ("dp2: the same step", "dp2：同一步", "good"),
        "differs": ("fsdp2: NOT the same step", "fsdp2：不是同一步", "bad"),
        "refused": ("tp2: refused", "tp2：被拒绝", "good"),
        "failed": ("pp2: failed", "pp2：失败", "bad"),
    }[name]
    assert f'<p class="{verdict[2]}"><span lang="en">{verdict[0]}</span><span lang="zh">{verdict[1]}</span>' in text
    words = row.reason or row.failure
    if words is not None:
        assert words in unescape(text)
        assert "<sliced>" not in text
        assert 'id="steps"' not in text
    if name == "differs":
        assert SUMMED.line in unescape(text)
        assert SUMMED.words.zh in unescape(text)


def test_a_first_difference_before_the_first_step_is_told_with_its_module_in_both_languages() -> None:
    weights = Finding(
        kind="other-initial-weights", step=0, what="initial weights", relative=0.5, module="layers.0.weight"
    )
    text = unescape(page([MatrixRow(job="reviews", layout="dp2", proof=proof("dp2", 0.5, weights))]))
    assert "first difference: initial weights of layers.0.weight: the split run begins with other weights" in text
    assert "首个差异：第 1 步之前，layers.0.weight：切分运行的初始权重与单独运行的不同" in text
