"""TensorFlow's distribution strategies as engines, on Keras counterparts of a task's PyTorch model and loss."""
