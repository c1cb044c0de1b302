"""Offload: state waits in the memory of the host or on its disk while it isn't computed with.

`memory` has the buffers; `activations`, `optimizer` and `parameters` say what is moved there, and when.
"""
