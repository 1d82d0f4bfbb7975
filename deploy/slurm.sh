#!/usr/bin/env bash
# swell on Slurm: a Ray cluster inside one allocation, and swell's control plane on its first node.
#
#   sbatch --nodes=4 --gres=gpu:2 deploy/slurm.sh
#
# Every node needs the same Python environment (VENV) and sees SWELL_HOME under the same path. When the time is up
# Slurm ends the steps; jobs have saved their state by then (see --signal) and go on in the next allocation.
#SBATCH --job-name=swell
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120

set -euo pipefail

VENV=${VENV:-$HOME/swell-venv}
export SWELL_HOME=${SWELL_HOME:-$HOME/.swell}
PORT=${RAY_PORT:-6379}

# shellcheck source=/dev/null
source "$VENV/bin/activate"

# Whoever reaches Ray runs code as you: a token that only you can read.
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="$SWELL_HOME/ray-slurm.token"
mkdir -p "$SWELL_HOME"
if [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
    (umask 077 && python -c 'import secrets; print(secrets.token_hex(32), end="")' > "$RAY_AUTH_TOKEN_PATH")
fi

# Between hosts Ray would send that token in clear. Each node has the home's authority sign a certificate for its own
# addresses; who can read SWELL_HOME can join. The addresses are those by which the others reach the node.
TLS='eval "$(python -m swell.engines.ray.tls "$SWELL_HOME" $(hostname --all-ip-addresses))"'

# A node that is cut off from the head goes on for a minute (docs/guides/ray.md).
HEALTH='{"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 20, "gcs_rpc_server_reconnect_timeout_s": 120}'

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head_ip=$(srun --nodes=1 --ntasks=1 --nodelist="$head_node" hostname --ip-address | awk '{print $1}')
gpus=${SLURM_GPUS_ON_NODE:-0}

srun --nodes=1 --ntasks=1 --overlap --nodelist="$head_node" \
    bash -c "$TLS"' && exec "$@"' bash \
    ray start --head --block --node-ip-address="$head_ip" --port="$PORT" \
    --num-cpus="${SLURM_CPUS_PER_TASK:-1}" --num-gpus="$gpus" --disable-usage-stats --system-config="$HEALTH" &

for _ in $(seq 60); do
    if python -c "import socket; socket.create_connection(('$head_ip', $PORT), 1)" 2>/dev/null; then
        break
    fi
    sleep 1
done

others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
    srun --nodes="$others" --ntasks="$others" --overlap --exclude="$head_node" \
        bash -c "$TLS"' && exec "$@"' bash \
        ray start --address="$head_ip:$PORT" --block \
        --num-cpus="${SLURM_CPUS_PER_TASK:-1}" --num-gpus="$gpus" --disable-usage-stats &
fi

# The control plane must be on a node of the cluster: this script runs on the first one.
eval "$TLS"
swell up --engine ray --address "$head_ip:$PORT" &
control=$!

# Before the time is up: jobs save their state. The Ray steps are ended by Slurm.
trap 'swell down || true; exit 0' TERM
wait "$control"
