#!/bin/bash
# Rehearse a job script without Slurm: this machine is both of its nodes.
#     RANKS=1 bash 03_ddp_torchrun/cluster/rehearse.sh \
#         03_ddp_torchrun/cluster/slurm.sbatch 03_ddp_torchrun/train.py --checkpoint=gpt.pt
#
# What the script asks for in its #SBATCH lines is not looked at; it must write options of
# srun as --name=value. With LIMIT=20 the nodes get, after 20 seconds, the signal that
# Slurm sends before the time of a job is up.

set -euo pipefail
[ -f "${1:-}" ] || {
    echo "rehearse.sh: no job script '${1:-}'; see its first lines" >&2
    exit 2
}
export LIMIT=${LIMIT:-} QUEUE=$(mktemp -d)
trap 'rm -rf "$QUEUE"' EXIT

# What Slurm sets: a job's number, of which the script makes a port, and its cores.
export SLURM_JOB_ID=$$ SLURM_JOB_NODELIST=both SLURM_JOB_NUM_NODES=2
cores=$(($(getconf _NPROCESSORS_ONLN) / 2))
export SLURM_CPUS_PER_TASK=$((cores > 0 ? cores : 1))

scontrol() {
    case $1 in
        show) printf '%s\n' localhost 127.0.0.1 ;; # one machine, by two names
        requeue) echo "rehearse: queued again" && touch "$QUEUE/again" ;;
    esac
}

# Start the command once on each node; end both when one has failed.
srun() (
    while [[ $1 == -* ]]; do shift; done
    tasks=() node=0
    trap 'kill "${tasks[@]}" 2> /dev/null || true' EXIT
    for name in $(scontrol show); do
        SLURM_NODEID=$node SLURM_PROCID=$node SLURMD_NODENAME=$name \
            ${LIMIT:+timeout --foreground -s USR1 "$LIMIT"} "$@" &
        tasks+=($!) node=$((node + 1))
    done
    wait -n && wait -n
)

export -f scontrol srun
while true; do
    rm -f "$QUEUE/again"
    bash "$@"
    [ -e "$QUEUE/again" ] || break
done
