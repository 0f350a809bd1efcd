#!/bin/bash
# A training on several nodes of a Slurm cluster. In the root of a clone with a .venv, on a file system that all nodes see:
#   sbatch deploy/slurm.sh my_package.envs:MyEnv --total-steps 1000000
# The first node runs Ray's head and the learner, the others run one worker per CPU.
#SBATCH --job-name=freerun
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --exclusive
#SBATCH --time=04:00:00
# The job goes on if a node fails: freerun runs the lost episodes again on the others.
#SBATCH --no-kill
# Two minutes before the time is up, this script hears of it and lets the run write its last checkpoint.
#SBATCH --signal=B:TERM@120
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate

# A token of this job, in a file that only its user can read: others may have accounts on these nodes.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/.ray/freerun_token_$SLURM_JOB_ID" RAY_USAGE_STATS_ENABLED=0
(umask 077 && mkdir -p ~/.ray && python -c "import secrets; print(secrets.token_hex(32), end='')" >"$RAY_AUTH_TOKEN_PATH")
steps=()
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"; kill "${steps[@]}" 2>/dev/null || true' EXIT

# The first address of this node. Put the one of the fast network here if it is another.
read -r head_ip _ <<<"$(hostname -I)"
address="$head_ip:6379"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# Each node is a step of its own, so that the end of one does not end the others.
on_node() {
  srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --nodelist="$1" "${@:2}" &
  steps+=($!)
}
on_node "${nodes[0]}" ray start --head --node-ip-address="$head_ip" --port=6379 --num-cpus=0 --include-dashboard=false --block
tries=0
until (exec 3<>"/dev/tcp/$head_ip/6379") 2>/dev/null; do
  if ((++tries == 60)); then
    echo "Ray's head has not started on ${nodes[0]}" >&2
    exit 1
  fi
  sleep 2
done
for node in "${nodes[@]:1}"; do
  on_node "$node" ray start --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" --block
done

num_workers=$(((${#nodes[@]} - 1) * SLURM_CPUS_PER_TASK))
python deploy/wait_for_cpus.py "$num_workers" --ray-address "$address"
freerun train "$@" --mode ray --ray-address "$address" --num-workers "$num_workers" --cpus-per-worker 1 &
run=$!
trap 'kill -TERM "$run"' TERM
status=0
wait "$run" || status=$?
# The signal ends the first `wait`, while the run still writes its checkpoint.
if kill -0 "$run" 2>/dev/null; then
  status=0
  wait "$run" || status=$?
fi
exit "$status"
