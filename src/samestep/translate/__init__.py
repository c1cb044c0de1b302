"""Other tools' configurations to job files, and back: a reader or a writer a file, a line each in formats.py."""
