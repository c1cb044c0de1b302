"""A script of TensorFlow's for a parameter server: the chief schedules steps, the others wait for work for ever."""

import json
import os
import sys

import tensorflow as tf  # pyright: ignore[reportMissingImports]

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
    )
    server.join()

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    total = tf.Variable(0.0)


@tf.function
def step() -> None:
    total.assign_add(10.0)


for _ in range(4):
    coordinator.schedule(step)
coordinator.join()
said = {"rank": 0, "kind": resolver.task_type, "sum": float(total.numpy()), "device": total.device}
sys.stdout.write(json.dumps(said) + "\n")
sys.stdout.flush()
os._exit(0)  # TensorFlow's shutdown waits for a peer that may be gone
