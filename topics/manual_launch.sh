#!/bin/bash
# Topic: no launcher. A rank is one command, with its place among the others in its environment.
#
#   bash topics/manual_launch.sh            two ranks; each says how far it has come
#   bash topics/manual_launch.sh late       rank 1 comes 10 s late: rank 0 waits for it
#   bash topics/manual_launch.sh missing    rank 1 never comes: rank 0 gives up after 10 s
#
# More words on the line are options of the training: bash topics/manual_launch.sh late --epochs 1
# On several machines you type the same commands, each on its machine: there MASTER_ADDR is the name
# of rank 0's machine, RANK counts on from machine to machine, and LOCAL_RANK starts at 0 on each.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
  "" | -*) when=now ;;
  late | missing) when=$1 && shift ;;
  *) echo "manual_launch.sh: there is no case $1, only late and missing" >&2 && exit 2 ;;
esac
[ "${BASH_VERSINFO[0]}" -ge 5 ] || { echo "manual_launch.sh: needs bash 5 or later" >&2 && exit 2; }

# Where the ranks meet: rank 0 listens there, the others call. WORLD_SIZE says how many to expect.
MASTER_PORT=$(python -c "import checks; print(checks.free_port())")
export MASTER_ADDR=127.0.0.1 MASTER_PORT WORLD_SIZE=2
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # or every rank takes all cores

# Runs the script named first. Only difference: init_process_group tells what it is doing.
telling='
import os, runpy, sys, time
import torch.distributed as dist

start, init, rank = time.monotonic(), dist.init_process_group, os.environ["RANK"]

def say(text):
    # One string, for one write: print() writes its words singly, and the ranks share a terminal.
    line = f"rank {rank} | {time.monotonic() - start:4.1f} s | {text}"
    sys.stdout.write(line + "\n")
    sys.stdout.flush()

def init_process_group(*args, **options):
    say("init: on my way to " + os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"])
    init(*args, **options)
    say("rendezvous: all " + os.environ["WORLD_SIZE"] + " ranks have met")
    dist.barrier()
    say("barrier: all ranks have passed")

dist.init_process_group = init_process_group
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
'

start() { # rank, then options
  local rank=$1
  echo "MASTER_ADDR=$MASTER_ADDR MASTER_PORT=$MASTER_PORT WORLD_SIZE=$WORLD_SIZE" \
    "RANK=$rank LOCAL_RANK=$rank python 03_multinode.py ${*:2}"
  RANK=$rank LOCAL_RANK=$rank python -c "$telling" 03_multinode.py "${@:2}" &
}

# What a launcher does beside starting: when one rank fails, or on Ctrl-C, it ends all the others.
# (Background processes of a script do not hear Ctrl-C. Nobody can do it after kill -9 of this one.)
trap 'kill -TERM $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

case $when in
  now) start 0 "$@" && start 1 "$@" ;;
  late) start 0 "$@" && sleep 10 && start 1 "$@" ;;
  missing) start 0 --timeout 10 "$@" ;;
esac
for _ in $(jobs -p); do
  wait -n # ends this script when a rank has failed
done
