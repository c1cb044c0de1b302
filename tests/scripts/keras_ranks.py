"""A script of TensorFlow's for several workers, which finds the others in TF_CONFIG."""

import argparse
import json
import os
import sys

import tensorflow as tf  # pyright: ignore[reportMissingImports]

parser = argparse.ArgumentParser()
parser.add_argument("--times", type=float, required=True)
options = parser.parse_args()

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
os._exit(0)  # TensorFlow's shutdown waits for a peer that may be gone
