"""Which sample is trained on when, and how samples reach a rank."""
