#!/bin/bash
# Topic: several nodes without a scheduler. One ssh a node starts torchrun there, in this folder.
#
#   bash topics/ssh_launch.sh "n1 n2"                     all GPUs of two nodes; rank 0 is on n1
#   NPROC=2 bash topics/ssh_launch.sh "n1 n2" --epochs 2  two ranks a node; options of the training
#   bash topics/ssh_launch.sh "$(sort -u "$PBS_NODEFILE" | xargs)"    the nodes that PBS gave you
#
# Each node needs this folder and torchrun at the same paths, and lets you in without a password.
# PORT is where the ranks meet (default: by the number of this process, so that two jobs do not
# collide), SSH the command with its options ("ssh -p 2222").
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra nodes <<<"${1:-}"
[ ${#nodes[@]} -gt 0 ] || { echo 'ssh_launch.sh: which nodes? bash topics/ssh_launch.sh "n1 n2"' >&2; exit 2; }
[ "${BASH_VERSINFO[0]}" -ge 5 ] || { echo "ssh_launch.sh: needs bash 5 or later" >&2 && exit 2; }
read -ra ssh <<<"${SSH:-ssh}"
torchrun=(env OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$(command -v torchrun)")
torchrun+=(--nnodes="${#nodes[@]}" --nproc-per-node="${NPROC:-gpu}")
torchrun+=(--master-addr="${nodes[0]#*@}" --master-port="${PORT:-$((20000 + $$ % 10000))}")

# When a node fails, or on Ctrl-C, all others are ended: with a terminal (-tt), torchrun there gets
# a SIGHUP as soon as its ssh is gone.
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
for number in "${!nodes[@]}"; do
  command=("${torchrun[@]}" --node-rank="$number" 03_multinode.py "${@:2}")
  "${ssh[@]}" -tt -o BatchMode=yes "${nodes[number]}" \
    "cd $(printf %q "$PWD") && exec $(printf '%q ' "${command[@]}")" </dev/null &
done
for _ in "${nodes[@]}"; do
  wait -n # ends this script when a node has failed
done
