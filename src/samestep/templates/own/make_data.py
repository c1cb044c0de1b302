"""Makes the sample data: data/points.csv, points of three spiral arms. Delete it once your own data is there."""

import csv
import math
import random
from pathlib import Path

POINTS = 1500


def main() -> None:
    """Write the file next to this script, the same at every call."""
    draw = random.Random(0)
    file = Path(__file__).parent / "data" / "points.csv"
    file.parent.mkdir(exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["x", "y", "label"])
        for _ in range(POINTS):
            label, radius = draw.randrange(3), draw.random()
            angle = 4 * radius + 2.1 * label + draw.gauss(0, 0.2)
            rows.writerow([f"{radius * math.cos(angle):.4f}", f"{radius * math.sin(angle):.4f}", label])


if __name__ == "__main__":
    main()
