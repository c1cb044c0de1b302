"""What each engine's scripts expect to find when they start: variables and arguments, one file an engine."""
