"""Places: where a cluster is found, one file each."""
