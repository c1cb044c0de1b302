"""TensorFlow started in this process: quietly, with as many threads as PyTorch has, and with the devices wanted."""

import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from samestep import environment
from samestep.engines.keras.layers import Tools
from samestep.engines.precision import parameter_dtype
from samestep.errors import UserError

# What the engines need, and what installs it.
PACKAGES: Mapping[str, str] = dict.fromkeys(("tensorflow", "tf_keras"), 'pip install "samestep[tensorflow]" would do')


def start(precision: str, device: torch.device, *, replicas: int = 1) -> Tools:
    """Import TensorFlow and set it up, unless this process has done so; its devices then stay as they are.

    A CPU becomes `replicas` logical devices. Of the accelerators the process gets the one of `device`, or all where
    several replicas are asked for, and takes their memory as it is needed, since PyTorch is there too. Raises
    UserError where TensorFlow sees no accelerator and PyTorch does.
    """
    with _quiet(), environment.tensorflow_settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what TensorFlow's own modules say of each other while they are loaded
        tf = importlib.import_module("tensorflow")
        keras = importlib.import_module("tf_keras")
        there = tf.config.list_physical_devices("GPU")
        if device.type != "cpu" and not there:
            raise UserError(
                "PyTorch has accelerators here and TensorFlow sees none; a TensorFlow that is built for them "
                "in place of tensorflow-cpu, or --device cpu, would do"
            )
        wanted = [] if device.type == "cpu" else there if replicas > 1 else there[device.index or 0 :][:1]
        with suppress(RuntimeError):  # it runs already
            threads = torch.get_num_threads()
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
            tf.config.set_visible_devices(wanted, "GPU")
            for each in wanted:
                tf.config.experimental.set_memory_growth(each, True)
            parts = [tf.config.LogicalDeviceConfiguration() for _ in range(replicas if not wanted else 1)]
            tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    tf.get_logger().setLevel("ERROR")
    return Tools(tf=tf, keras=keras, dtype=str(parameter_dtype(precision)).removeprefix("torch."))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what libraries write while they are loaded, from C++ past every logger, and show it if that fails."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            kept.seek(0)
            os.write(before, kept.read())
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)
