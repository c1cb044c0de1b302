"""The comparison: many methods train one job, each in processes of its own, and are held side by side.

The package is not called `compare`, which is the function's name: `samestep.compare` would be one or the other.
"""
