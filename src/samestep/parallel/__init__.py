"""How a layout is applied to a module: one file a dimension, applied in one place in one order."""
