"""From hosts to running ranks: where a job's hosts are found, how its ranks start, and how the hosts notice faults.

In the order of reading:

- `environments`: places that offer hosts. `cluster`, `filters`: the hosts and slots that a job takes of them.
- `device`: which device a rank computes on, and the back end of its messages. `world`: the ranks' process group.
- `local`: starts the ranks of one host, which meet by `single_node_rendezvous`. `fork_server` (`fork_server_first`,
  `fork_server_last`): so that a start takes tenths of a second.
- `node_spec`: what one host does in a job. `launcher`, `starter`, `ssh`, `controller`: bring a `remote_agent` up on
  every host, and end them all.
- `agent`, `elastic_agent`, `torch_elastic`, `worker`, `rank_entry`: one host's ranks, by PyTorch's elastic agent.
- `handshake`, `consistency`, `clock_skew`: what hosts agree on before they begin, in the store of `store_address`.
- `rendezvous`, `rounds`: each round. `rank_rendezvous`: of ranks that srun or mpirun started.
- `node_heartbeat`: notices hosts that died. `failure`: which rank failed first, and why.
- `affinity`, `network`, `forwarded_env`, `logs`, `memory`: cores, addresses, variables, output, memory.
- `script_env`: what scripts of other engines expect.
"""
