"""Makes the sample data: data/text.txt, sentences of a small grammar. Delete it once your own data is there."""

import random
from pathlib import Path

SENTENCES = 2000
DETERMINERS = ["a", "the", "every", "no"]
ADJECTIVES = ["small", "red", "quiet", "old", "happy"]
NOUNS = ["cat", "ship", "teacher", "river", "garden", "machine"]
VERBS = ["sees", "follows", "paints", "remembers", "finds"]


def main() -> None:
    """Write the file next to this script, the same at every call."""
    draw = random.Random(0)

    def thing() -> str:
        return " ".join(draw.choice(words) for words in (DETERMINERS, ADJECTIVES, NOUNS))

    lines = [f"{thing()} {draw.choice(VERBS)} {thing()}.\n" for _ in range(SENTENCES)]
    file = Path(__file__).parent / "data" / "text.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
