"""Imported last by the server that ranks are forked from, and by no other process: its imports are to stay."""

import gc
import signal

# From now on the server waits for its starter's end by itself.
signal.setitimer(signal.ITIMER_REAL, 0)
signal.signal(signal.SIGALRM, signal.SIG_DFL)

# Else each rank's first collection writes to every page that it shares with the server, which then is copied.
gc.freeze()
gc.enable()
