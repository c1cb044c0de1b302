"""Pipeline parallel: a model cut into stages, which ranks run one after the other for many micro-batches.

In the order of reading:

- `units`: the modules between whose calls a model can be cut. `partition`: where it is cut, found from a trace.
- `stage`: a rank's own part of the model; `blanks` stand for the rest; `stage_run`: one forward of one stage.
- `schedule`: the order of a rank's actions (PyTorch's schedules). `p2p`: the messages between stages.
- `early_gradients`: replicas average gradients while the last backwards run.
- `runner`: the whole pipeline as a model that engines step. `timeline`: what each rank did when.

Of a step's samples, micro-batch m goes through stage 0, 1, ... and back. Ranks of one pipeline differ along the
pipeline axis alone; each has the inputs of its micro-batches (embeddings, masks and targets are made of them where
they are needed), so that only what stages compute travels. The last stage's rank has the loss.
"""
