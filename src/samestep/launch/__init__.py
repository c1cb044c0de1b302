"""From hosts to running ranks: where a job's hosts are found, how its ranks start, and how the hosts notice faults.

In the order of reading:

- `environments`: places that offer hosts. `cluster`, `filters`: the hosts and slots that a job takes of them.
- `device`: which device a rank computes on, and the back end of its messages. `world`: the ranks' process group.
- `local`: starts the ranks of one host. `fork_server`: so that a start takes tenths of a second.
- `launcher`, `starter`, `ssh`, `controller`: bring an agent up on every host, and end them all.
- `agent`, `elastic_agent`, `worker`, `rank_entry`: one host's ranks, by PyTorch's elastic agent.
- `handshake`, `consistency`, `clock_skew`: what hosts agree on before they begin. `rendezvous`, `rounds`: each round.
- `node_heartbeat`: notices hosts that died. `failure`: which rank failed first, and why.
- `affinity`, `network`, `forwarded_env`, `logs`, `memory`: cores, addresses, variables, output, memory.
- `script_env`: what scripts of other engines expect.
"""
