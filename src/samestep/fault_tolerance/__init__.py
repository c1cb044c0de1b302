"""Trainings that outlive their ranks' faults: who is how far, who is missing, what then."""
