"""What this process had imported when the file of a task's began to be imported."""

import sys

TORCHMETRICS = "torchmetrics" in sys.modules
