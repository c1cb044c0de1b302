"""TensorFlow's distribution strategies as engines, on Keras counterparts of a task's PyTorch model and loss.

Read `from_torch` first (how the counterpart is found; `layers` is its table), then `engine` and `trainer` (the
synchronous strategies), then `parameter_server` (TensorFlow's ParameterServerStrategy).
"""
