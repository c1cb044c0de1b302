"""The doctor: what works on this machine, and what went wrong in a run. Each problem has its remedy."""
