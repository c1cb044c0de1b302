"""The command line: one thin file a command, which parses its options and calls a function of the package.

`main` finds the command and turns errors into one message and an exit code. `job_options`, `cluster_options` and
`launch_options` declare what several commands have.
"""
