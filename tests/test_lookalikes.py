"""What looks like YAML, a number, a text or a key to its writer and is none: the message says what to write."""

from pathlib import Path

import pytest
from fuzzing import command

pytestmark = pytest.mark.quick

START = "recipe:\n  task: regression\n"
NOT_A_COMMA = 'unknown key "recipe.optimizer.5"; a decimal number is written with a point, such as 0.5, not a comma'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "recipe\uff1a\n  task: x\n",
            "job.yaml:1 has a fullwidth colon (\\uff1a), which YAML doesn't know; write ':'",
        ),
        (
            "recipe: \uff5btask: x}\n",
            "job.yaml:1 has a fullwidth left curly bracket (\\uff5b), which YAML doesn't know",
        ),
        (
            "recipe:\n  task:\tx\n",
            r"found character '\t' that cannot start any token; put a space in place of the tab",
        ),
        ("recipe:\n\ttask: x\n", r"found character '\t' that cannot start any token; indent with spaces"),
        (START + "---\n", "but found another document; keep one, without ---"),
        (START + "\u00a0run: {}\n", "it has a no-break space (\\xa0) in it; write run"),
        (START + "  \uff53eed: 1\n", "it has a fullwidth latin small letter s (\\uff53) in it; write seed"),
        (START + "  optimizer: {name: sgd, lr: 1,5}\n", NOT_A_COMMA),
        (START + "  clip: 0,5\n", "recipe.clip is '0,5'; it should be a number, such as 0.5\n"),
        (START + "  clip: 3,000,000\n", "recipe.clip is '3,000,000'; it should be a number\n"),
        (START + "  seed: 0o17\n", "recipe.seed is '0o17'; it should be a whole number, such as 15"),
        (START + "  seed: \uff14\uff12\n", "it should be a whole number, such as 42"),
        (START + "  steps: \u22121\n", "it should be a whole number, such as -1"),
        (
            START + "name: 2024-02-29\n",
            "name is 2024-02-29; it should be text, in quotes: '2024-02-29' is a date in YAML",
        ),
        (START + "run: {folder: 2024-02-29}\n", "it should be a path, in quotes: '2024-02-29' is a date in YAML"),
        (
            START + "name: no\n",
            "name is false; it should be text (a word such as no or on stands in quotes), or null",
        ),
    ],
)
def test_what_looks_like_something_else(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text, encoding="utf-8")
    assert said in command(["train", str(file), "--print-config"]).replace(f"{tmp_path}/", "")


def test_spaces_around_a_key_of_set_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(START, encoding="utf-8")
    assert "recipe.batch is -8" in command(["train", str(file), "--print-config", "--set", "recipe.batch = -8"])
