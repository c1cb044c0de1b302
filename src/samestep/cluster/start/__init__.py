"""Ways to turn a command into ranks, one file each."""
