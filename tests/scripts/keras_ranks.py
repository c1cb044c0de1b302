"""A script of TensorFlow's for several workers, which finds the others in TF_CONFIG."""

import argparse
import json
import os
import sys
from contextlib import suppress
from typing import Any

import tensorflow as tf  # pyright: ignore[reportMissingImports]
from tensorflow.python.eager import context  # pyright: ignore[reportMissingImports]

parser = argparse.ArgumentParser()
parser.add_argument("--times", type=float, required=True)
options = parser.parse_args()

cluster: Any = context.context()
strategy = tf.distribute.MultiWorkerMirroredStrategy()
resolver = strategy.cluster_resolver


@tf.function
def reduced() -> tf.Tensor:
    def of_a_replica() -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, tf.constant(options.times * (resolver.task_id + 1))
        )

    return strategy.run(of_a_replica)


said = {
    "rank": resolver.task_id,
    "size": strategy.num_replicas_in_sync,
    "sum": float(reduced()),
    "local": [int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])],
    "threads": tf.config.threading.get_intra_op_parallelism_threads() or int(os.environ["TF_NUM_INTRAOP_THREADS"]),
}
sys.stdout.write(json.dumps(said) + "\n")
sys.stdout.flush()

# A rank that ends takes away what its peers still fetch from it: all are done first, and rank 0, whom they ask, is
# the last.
workers = range(strategy.num_replicas_in_sync)
cluster.set_config_key_value(f"done/{resolver.task_id}", "yes")
for worker in workers:
    cluster.get_config_key_value(f"done/{worker}")
with suppress(tf.errors.OpError):  # who is asked, or waited for, may have left already
    cluster.set_config_key_value(f"leaves/{resolver.task_id}", "yes")
for worker in workers if resolver.task_id == 0 else ():
    with suppress(tf.errors.OpError):
        cluster.get_config_key_value(f"leaves/{worker}")
os._exit(0)  # TensorFlow's shutdown waits for a peer that may be gone
