"""The table of models and layouts that `tools/models.py` writes: 40 types of transformers, and models of other kinds.

Read `entry` (what the table knows of a model), then `zoo` (which models there are, a file a kind), `declared` (which
pairs are impossible), `worker` (what a rank does), `measure` (starts ranks and judges a pair) and `page`.
"""
