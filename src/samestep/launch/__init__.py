"""Where a job runs: its devices, its ranks, and how they are started."""
