"""Who talks to whom, and how."""
