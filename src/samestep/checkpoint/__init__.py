"""Checkpoints: a training's state on disk, the same whatever layout wrote it."""
