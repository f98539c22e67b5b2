#!/usr/bin/env bash
# Two hosts with plain torchrun. Run it on both, at about the same time, in the same folder of the same code:
#
#   on the first host:     NODE_RANK=0 MASTER_ADDR=first-host examples/torchrun_two_hosts.sh
#   on the second host:    NODE_RANK=1 MASTER_ADDR=first-host examples/torchrun_two_hosts.sh
#
# Optional settings: NPROC (ranks on each host, default 2), MASTER_PORT (default 29500), and, as arguments, a script with
# its arguments (default examples/plain_loop.py). On several hosts, ranks on CPUs communicate through Gloo.
#
# Tested in two network namespaces on one machine (docs/clusters.md). Tests on GPUs: docs/gpu-status.md. If Gloo picks a
# network that the other host cannot reach, set GLOO_SOCKET_IFNAME=eth0, or for NCCL, NCCL_SOCKET_IFNAME.
set -euo pipefail

NODE_RANK=${NODE_RANK-${SLURM_NODEID-}} # set by srun --ntasks-per-node 1
: "${NODE_RANK:?set NODE_RANK to 0 on the first host and to 1 on the second}"
: "${MASTER_ADDR:?set MASTER_ADDR to a name or address of the first host that both hosts can reach}"
if [ $# -eq 0 ]; then
    set -- "$(dirname "${BASH_SOURCE[0]}")/plain_loop.py"
fi

# When a rank fails, torchrun on its host exits and the store goes away. Ranks on the other host, which query the store
# about failed ranks, would then log warnings with C++ stack traces. Their one-line error already says what happened.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL-ERROR}

exec torchrun \
    --nnodes 2 \
    --node-rank "$NODE_RANK" \
    --nproc-per-node "${NPROC:-2}" \
    --master-addr "$MASTER_ADDR" \
    --master-port "${MASTER_PORT:-29500}" \
    "$@"
