"""Jobs as an expert would write them by hand, in plain PyTorch: what engines are measured against."""
