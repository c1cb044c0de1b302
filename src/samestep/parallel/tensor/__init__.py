"""Tensor parallel: each rank of a group holds a slice of the matrices and computes with it (Shoeybi et al. 2019)."""
