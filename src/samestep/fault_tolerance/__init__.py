"""Fault tolerance: status of ranks, detection of stragglers and hangs, restarts.

In the order of reading:

- `rank`: what a rank does for it, step by step; `status`: what it writes where its starter can read it, of
  itself and of its job.
- `watchdog`: reads that in the starting process, and ends a round that makes no progress; `stacks` and `pace`
  tell who is at fault, `stopped` which processes are stopped.
- `policy`: what a job asks for, and how it goes on; `fault`: its report. Rounds: `launch/rounds.py`.
- `signals` (a first and a second one), `preemption` (signals with notice), `nonfinite` (losses that are NaN),
  `injection` (faults on purpose, for drills).
- `scratch`: folders that don't outlive their process.
- `lease`: one training at a time in a folder; `lease_owner`: which process that is; `lease_file`: the files.

Who runs where. In each rank: the loop's thread writes a status at each step (a store into mapped memory, no system
call), and one thread (`Heartbeat`) writes counts and looks for a notice twice a second. In the starting process of
each host: one thread (`Watchdog`) reads the statuses of its ranks ten times a second. They share a folder in memory,
and no socket: a rank that is stuck in a kernel, or holds Python's lock, is seen all the same. The process that
starts a training's ranks, or rank 0 where a launcher starts them, renews the lease in a thread.
"""
