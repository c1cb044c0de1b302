"""The right scripts of the zoo under many seeds: how often the prover tells a right training as another step.

    python tools/zoo.py --seeds 6 --json FILE

FILE keeps what came of each run as soon as it is there, and a call that was stopped goes on with the runs it lacks.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAME, REFUSED = "same step", "refused"


@dataclass(frozen=True, kw_only=True)
class SeededRun:
    """A right script under one seed."""

    name: str
    processes: int
    seed: int

    @property
    def key(self) -> str:
        return f"{self.name}, {self.processes} ranks, seed {self.seed}"


def run(
    names: Sequence[str], *, processes: int, seeds: int, file: Path, look: Callable[[SeededRun], dict[str, Any]]
) -> int:
    """Judge each script under seeds 0, 1, ...; 1 where a right one isn't told as the same step."""
    rows: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for seed in range(seeds):
        for name in names:
            at = SeededRun(name=name, processes=processes, seed=seed)
            if at.key in rows:
                continue
            rows[at.key] = look(at)
            print(f"{at.key:44} {rows[at.key]['seconds']:5.1f} s  {rows[at.key]['result']}", flush=True)
            file.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(summary(rows))
    return int(any(row["result"] != SAME for row in rows.values()))


def summary(rows: dict[str, Any]) -> str:
    alarms = [key for key, row in rows.items() if row["result"] not in (SAME, REFUSED)]
    refused = [key for key, row in rows.items() if row["result"] == REFUSED]
    lines = [f"{len(rows)} runs of right scripts: {len(alarms)} false alarms, {len(refused)} refused"]
    return "\n".join([*lines, *(f"  {key}: {rows[key]['words']}" for key in (*alarms, *refused))])
