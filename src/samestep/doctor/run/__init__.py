"""What the files of a run tell."""
