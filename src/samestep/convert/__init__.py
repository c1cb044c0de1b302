"""Checkpoints of other tools, and to them: a format a file, a line each in formats.py."""
