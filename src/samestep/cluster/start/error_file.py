"""Error file: a rank writes why it ends, in PyTorch's form, for whoever started it."""

import json
import time
from contextlib import suppress
from pathlib import Path


def tell(file: Path, message: str) -> None:
    """Write a failure's message where the elastic agent looks for it."""
    now = time.time()
    extra = {"py_callstack": message, "timestamp": str(int(now)), "time": now}
    with suppress(OSError):  # the message stands on standard error as well
        file.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
