"""Offload: activations, optimizer state or parameters wait in the memory of the host or on its disk."""
