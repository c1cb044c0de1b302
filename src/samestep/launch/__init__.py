"""From hosts to running ranks: where a job's hosts are found, how its ranks start, and how the hosts notice faults.

In the order of reading:

- `options`: what the user may say, each option declared once.
- `environments`: places that offer hosts. `filters`: the hosts and slots that a job takes of them.
- `device`: which device a rank computes on, and the back end of its messages. `world`: the ranks' process group.
- `node_spec`: what one host does in a job. `launcher`, `starter`, `ssh`, `controller`: start a `remote_agent` on
  every host, and end them all.
- `elastic_agent`: PyTorch's elastic agent, which starts one host's ranks and looks after them. Two ways lead to it:
  `agent` for a command on one host or many, `local` for a function on this host.
- `worker`, `rank_entry`: what a rank is. `pickled_calls`: a function and its arguments on their way to one.
  `fork_server` (`fork_server_main`): has it started in tenths of a second.
- `handshake`, `consistency`: what hosts agree on before they begin, in the store of `store_address`.
- `signed_store`: what agents believe of a store, signed with the `job_secret`.
- `rendezvous`, `membership`, `rounds`: each round. `rank_rendezvous`: of ranks that srun or mpirun started.
- `node_heartbeat`: notices hosts that died. `failure`: which rank failed first, and why. `endings`: how a process
  ended.
- `affinity`, `network`, `forwarded_env` and its `forwarded_names`, `logs`, `memory`: cores, addresses, variables,
  output, memory.
- `compiler_cache`: the folder from which torch.compile loads.
- `script_env`: what scripts of other engines expect.

A job from its start to its end:

    1. find hosts        `environments` looks at variables, files or a scheduler; `filters` takes what was asked for
    2. start the agents  `launcher` makes a NodeSpec a host; ssh, srun or Ray start `remote_agent` there (or each
                         host's own command is its agent); `controller` reads what they print
    3. shake hands       agents meet in the job's store, compare versions, scripts, commands (300 s for all to come)
    4. meet              a round begins: rendezvous, a store for this round, ranks numbered by node rank
    5. run               each agent starts its ranks and looks after them; heartbeats between hosts every 0.5 s
    6. end of a round    a rank failed, a host was silent for 8 s, or one wants to join: ranks end, causes are posted,
                         and unless the restarts are used up, 4 begins again from the last checkpoint
    7. end of the job    outcomes go to the controller, which picks the first failure and tells it

With one host 1, 2, 3 and the heartbeats fall away; `elastic_agent` is the same.

`environments` and `script_env` import only the modules below them: `affinity`, `memory`, `device`, `network`,
`fork_server`, `options`, `node_spec`, `starter` (`FOUNDATIONS` in `tests/test_house.py`).
"""
