"""Settings of a rank's recorder, in a file that the prover writes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

# as-is: nothing but the recorder. reversed: the rows of each batch in the opposite order, for the noise. moved: the
# first weights moved by one unit in the last place, where no batches pass through a DataLoader. halves: each forward
# of a model as two micro-batches.
Variant = Literal["as-is", "reversed", "moved", "halves"]

# The option that names the file: it ends what an engine's launcher puts before a script's arguments. Not "--", which
# torchrun takes for its own.
RECORDER = "--recorder="

SETTINGS = "settings.json"  # in a run's folder
FEWER_DEVICES = "alone-failed"  # of a run alone that failed, where it was told of the split run's accelerators


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """What a rank notes, and where."""

    folder: str  # in it each rank makes a folder of its own
    steps: int | None  # of the optimizer, after which the script is stopped; None: it runs to its end
    every: int = 1  # tensors are written in steps 1, 1 + every, ...; the rest of a step always is
    modules: str | None = None  # a pattern of names: of other parameters no tensors are written
    dropout: bool = False  # whether dropout stays on
    dtype: str | None = None  # torch.set_default_dtype before the script's first line
    seed: int | None = None  # of torch, numpy and random before the script's first line
    variant: Variant = "as-is"
    variables: Mapping[str, str] = field(default_factory=dict)  # of the environment, for the script
    follow: str | None = None  # the folder of a run whose batches this one is given
    times: int = 1  # how many times as large the batches of these samplers are made, for the lengths of DataLoaders
    widened: tuple[int, ...] = ()
    on: str | None = None  # cpu or gpu:N: where accelerators that the script names are
    tiny: bool = False  # whether models of transformers get two layers
    ranks: int = 1  # of the run, also where the script starts them
    devices: int = 1  # how many of them there are said to be
    together: int = 0  # micro-batches of all ranks of that run in one of this run; 0: one of each rank
    redraw: str | None = None  # the folder of a run whose random numbers this one is given, joined over ranks
    draws: bool = False  # whether random numbers are written, for such a run

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> "RecordSettings":
        return cls(**json.loads(file.read_text(encoding="utf-8")))
