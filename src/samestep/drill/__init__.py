"""Drills: a job is trained under one fault after the other, and held beside its undisturbed run."""
