"""Imported last by the server that ranks are forked from, and by nobody else: what it has imported is to stay."""

import gc

# Else each rank's first collection writes to every page that it shares with the server, which then is copied.
gc.freeze()
gc.enable()
