"""Makes the sample data: data/texts.csv, short sentences in three classes. Delete it once your own data is there."""

import csv
import random
from pathlib import Path

SAMPLES = 600
NOUNS = {
    "weather": ["rain", "storm", "wind", "sunshine", "snow", "fog"],
    "sport": ["match", "team", "goal", "race", "player", "coach"],
    "kitchen": ["soup", "bread", "salad", "oven", "recipe", "butter"],
}
FRAMES = [
    "the {0} was better than the {1} yesterday",
    "nobody expected such a {0} after the {1}",
    "we talked about the {0} and the {1} for hours",
    "tomorrow there will be another {0}",
]


def main() -> None:
    """Write the file next to this script, the same at every call."""
    draw = random.Random(0)
    file = Path(__file__).parent / "data" / "texts.csv"
    file.parent.mkdir(exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["text", "label"])
        for index in range(SAMPLES):
            label = list(NOUNS)[index % len(NOUNS)]
            day = draw.randrange(1000)  # equal texts would all go to one side of the split
            rows.writerow([f"day {day}: {draw.choice(FRAMES).format(*draw.sample(NOUNS[label], 2))}", label])


if __name__ == "__main__":
    main()
