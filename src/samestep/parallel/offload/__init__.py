"""Offload: state waits in the memory of the host or on its disk while it isn't computed with.

`memory` has the buffers; `activations` and `parameters` say what is moved there, and when. The optimizer's part is in
`parallel.optimizer`.

Who owns the memory: `HostMemory` keeps every buffer that it has ever made and lends it again; a `MappedFile` has no
name on disk and is gone with the process. Nothing here sends a message to another rank.
"""
