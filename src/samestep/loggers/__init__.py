"""Services that a training's numbers and texts are sent to while it runs: one file and one line here each.

Read `base` first: what a logger is given, and when it is called. `registry` finds the classes, and checks them before
any rank starts; `opened` opens those that a job names, on rank 0 alone, and keeps a training going when one fails.
The services: `tensorboard_logger`, `wandb_logger`, `mlflow_logger`, `trackio_logger`, `swanlab_logger`, and
`prometheus_logger`, a file. Other packages add loggers by entry points (`samestep.loggers`).
"""

LOGGERS = {
    "mlflow": "samestep.loggers.mlflow_logger:MLflow",
    "prometheus": "samestep.loggers.prometheus_logger:Prometheus",
    "swanlab": "samestep.loggers.swanlab_logger:SwanLab",
    "tensorboard": "samestep.loggers.tensorboard_logger:TensorBoard",
    "trackio": "samestep.loggers.trackio_logger:Trackio",
    "wandb": "samestep.loggers.wandb_logger:WandB",
}
