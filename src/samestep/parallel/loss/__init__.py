"""The loss of a step: the sum over the global batch, however it is split into ranks and micro-batches.

- `step`: one interface for all kinds of losses, called for each micro-batch's output; read it first.
- `coupled`: losses that couple samples, whose calls see the rows of all ranks and micro-batches.
- `chunked_logits`: the output layer and its cross-entropy, some tokens at a time. `vocabulary`: the output layer
  sliced by the vocabulary, and the loss on slices of the logits.
"""
