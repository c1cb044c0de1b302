"""Makes the sample data: data/rows.jsonl, dates written two ways. Delete it once your own data is there."""

import json
import random
from datetime import date, timedelta
from pathlib import Path

ROWS = 800
MONTHS = [date(2000, month, 1).strftime("%B") for month in range(1, 13)]


def main() -> None:
    """Write the file next to this script, the same at every call."""
    draw = random.Random(0)
    days = [date(1950, 1, 1) + timedelta(days=draw.randrange(36500)) for _ in range(ROWS)]
    rows = [
        {"source": f"{day.day} {MONTHS[day.month - 1]} {day.year}", "target": day.strftime("%d.%m.%y")}
        for day in days
    ]
    file = Path(__file__).parent / "data" / "rows.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
