#!/bin/bash
# A private Slurm cluster of a few nodes on one Linux machine, to practise sbatch and to test with.
#
#   laptop_cluster.sh start               start it and wait until every node is idle
#   laptop_cluster.sh exec COMMAND...     run a command on it: sbatch, srun, squeue, scontrol ...
#   laptop_cluster.sh status              show the nodes
#   laptop_cluster.sh stop                end it, its jobs too, and remove its folder
#   laptop_cluster.sh run COMMAND...      start, exec COMMAND, stop; the exit code is COMMAND's
#
# To see how jobs die (NODE is n1, n2 ...):
#   laptop_cluster.sh kill NODE           power-off: end every process of that node
#   laptop_cluster.sh killd NODE          end slurmd alone; the node's jobs live on
#   laptop_cluster.sh boot NODE           start the node again
#   laptop_cluster.sh node NODE COMMAND   run a command on a node, outside Slurm    (namespaces)
#   laptop_cluster.sh link NODE up|down   plug in or pull its network cable         (namespaces)
#
# Slurm, its commands and the processes of a job are real. CPUs, memory and GPUs are made up: a
# node claims more than there is, so that a batch file written for a real cluster is accepted as
# it is. torch sees no GPU. Jobs run in your directory, on your files.
#
# Two ways to get nodes, chosen by who you are (LAPTOP_MODE overrides the choice):
#   namespaces  for root. A node has its own address, host name, processes and /dev/shm, and no
#               way to the internet, as on many clusters.
#   ports       for everybody else. Nodes are slurmds on 127.0.0.1; they share your host name.
#               Jobs on several nodes need the package libnss-wrapper to find the name n1.
#
# Settings, read by start:
#   LAPTOP_DIR    its folder (a new one under ${TMPDIR:-/tmp}); set it to have two clusters
#   LAPTOP_NODES  nodes (2)                 LAPTOP_GPUS  pretended GPUs of each (4, may be 0)
#   LAPTOP_CPUS   pretended CPUs of each (72)   LAPTOP_MEM   pretended MB of each (500000)
#   LAPTOP_CONF   more lines for slurm.conf     LAPTOP_PORT  first port of ports mode (17000)
#   LAPTOP_KEEP   if not empty, stop keeps the folder: the daemons' logs are in log/
set -euo pipefail

SELF=$(readlink -f "$0")
PATH=$PATH:/usr/sbin:/sbin
APT="apt-get install --no-install-recommends slurmctld slurmd slurm-client munge iproute2"
LAPTOP_DIR=$(readlink -m "${LAPTOP_DIR:-${TMPDIR:-/tmp}/laptop-cluster-$(id -u)}")
CONF=$LAPTOP_DIR/slurm.conf

usage() { sed -n '2,/^set -e/{/^set -e/d; s/^# \{0,1\}//p}' "$SELF"; }
fail() { echo "laptop_cluster.sh: $*" >&2; exit 1; }
nodes() { seq -f 'n%.0f' "$LAPTOP_NODES"; }
is_up() { [ -e "$LAPTOP_DIR/up" ]; }
for_root() { [ "$LAPTOP_MODE" = namespaces ] || fail "$1 works in namespaces mode only: be root"; }

# Everything that belongs to the cluster has SLURM_CONF=this cluster's file in its environment: the
# daemons get it here, the jobs from slurmd. So nothing is ever ended by a number in an old file.
ours() { grep -qszxF "SLURM_CONF=$CONF" "/proc/$1/environ"; }
processes() { grep -lszxF "SLURM_CONF=$CONF" /proc/[0-9]*/environ | cut -d/ -f3 || true; }

write_config() {
  local i gpus="" controller auth address port
  if [ "$LAPTOP_MODE" = namespaces ]; then
    # Nobody else reaches the private network, so there is nobody to keep out.
    controller="login(10.99.0.1)" auth="AuthType=auth/none
CredType=cred/none"
  else
    # Other users of this machine reach 127.0.0.1: a secret key of our own keeps them out.
    controller="$(hostname -s)(127.0.0.1)" auth="AuthType=auth/munge
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny"
  fi
  if [ "$LAPTOP_GPUS" -gt 0 ]; then
    gpus="Gres=gpu:$LAPTOP_GPUS"
    # Slurm wants a character device for each GPU, and sets CUDA_VISIBLE_DEVICES only then.
    # Root makes copies of /dev/null; others lend the names of their terminals, which nobody opens.
    local device=/dev/tty
    if mknod "$LAPTOP_DIR/dev/nvidia0" c 1 3 2>/dev/null; then
      device=$LAPTOP_DIR/dev/nvidia
      for ((i = 1; i < LAPTOP_GPUS; i++)); do mknod "$device$i" c 1 3; done
    fi
    echo "Name=gpu File=${device}[0-$((LAPTOP_GPUS - 1))]" >"$LAPTOP_DIR/gres.conf"
  else
    : >"$LAPTOP_DIR/gres.conf"
  fi
  echo "CgroupAutomount=no" >"$LAPTOP_DIR/cgroup.conf"
  cat >"$CONF" <<CONFIG
ClusterName=laptop
SlurmctldHost=$controller
SlurmctldPort=$LAPTOP_PORT
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
$auth
# cred_expire is also how long a requeued job waits: 5 s is the least, 120 s the default.
AuthInfo=socket=$LAPTOP_DIR/munge/socket,cred_expire=5
StateSaveLocation=$LAPTOP_DIR/state
SlurmdSpoolDir=$LAPTOP_DIR/spool-%n
SlurmctldPidFile=$LAPTOP_DIR/pid/slurmctld
SlurmdPidFile=$LAPTOP_DIR/pid/slurmd-%n
SlurmctldLogFile=$LAPTOP_DIR/log/slurmctld.log
SlurmdLogFile=$LAPTOP_DIR/log/slurmd-%n.log
JobCompType=jobcomp/filetxt
JobCompLoc=$LAPTOP_DIR/log/jobs.txt
MailProg=/bin/true
# No cgroups, no pinning, no accounting: they would touch the machine or need a database.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
# Believe the made-up hardware below.
SlurmdParameters=config_overrides
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Short waits everywhere: a student looks on, or a test.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5,requeue_delay=1
ReturnToService=2
KillWait=5
CompleteWait=0
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout=20
TCPTimeout=2
MessageTimeout=10
BatchStartTimeout=10
$LAPTOP_CONF
CONFIG
  for ((i = 1; i <= LAPTOP_NODES; i++)); do
    mkdir "$LAPTOP_DIR/spool-n$i"
    if [ "$LAPTOP_MODE" = namespaces ]; then address=10.99.0.$((10 + i)) port=6818
    else address=127.0.0.1 port=$((LAPTOP_PORT + i)); fi
    echo "NodeName=n$i NodeHostName=n$i NodeAddr=$address Port=$port CPUs=$LAPTOP_CPUS Sockets=2" \
      "CoresPerSocket=$((LAPTOP_CPUS / 2)) ThreadsPerCore=1 RealMemory=$LAPTOP_MEM $gpus"
  done >>"$CONF"
  echo "PartitionName=laptop Nodes=$(nodes | paste -sd,) Default=YES MaxTime=INFINITE" >>"$CONF"
}

# The names of the nodes, for namespaces mode (a private /etc/hosts) and for libnss-wrapper.
write_hosts() {
  local i
  if [ "$LAPTOP_MODE" = namespaces ]; then
    printf '%s\n' "127.0.0.1 localhost" "10.99.0.1 login"
    # The second line spares a warning of torch, which looks names up by IPv6 address too.
    for ((i = 1; i <= LAPTOP_NODES; i++)); do
      printf '%s n%d\n' "10.99.0.$((10 + i))" "$i" "::ffff:10.99.0.$((10 + i))" "$i"
    done
  else
    printf '%s localhost %s\n' 127.0.0.1 "$(nodes | paste -sd' ')" ::1 "$(nodes | paste -sd' ')"
  fi >"$LAPTOP_DIR/hosts"
}

# Run a command where sbatch works: with the cluster's configuration, in the current directory.
on_login() {
  is_up || fail "the cluster is not running: $0 start"
  local settings=(SLURM_CONF="$CONF")
  # sbatch hands these on to the job. A node pretends to have many cores: without a limit every
  # rank would start a thread for each. What jobs leave in TMPDIR goes away with the cluster.
  settings+=(OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TMPDIR="$LAPTOP_DIR/tmp")
  if [ "$LAPTOP_MODE" = namespaces ]; then
    enter "$(<"$LAPTOP_DIR/pid/login")" env "${settings[@]}" "$@"
  else
    if [ -n "$WRAPPER" ]; then
      settings+=(LD_PRELOAD="$WRAPPER" NSS_WRAPPER_HOSTS="$LAPTOP_DIR/hosts")
    fi
    env "${settings[@]}" "$@"
  fi
}

# Enter all namespaces of a process, keeping the current directory.
enter() { nsenter --target "$1" --mount --uts --net --pid --ipc --wdns="$PWD" -- "${@:2}"; }

wait_until_idle() {
  local deadline=$((SECONDS + 30))
  until [ "$(on_login sinfo -h -N -o %T 2>/dev/null | grep -cx idle)" = "$LAPTOP_NODES" ]; do
    ! grep -qs fatal: "$LAPTOP_DIR"/log/*.log && [ $SECONDS -lt $deadline ] || return 1
    sleep 0.1
  done
}

# ---- inside the namespaces ---------------------------------------------------------------------

# This runs on the login host: its namespaces hold those of all nodes, so that to end its first
# process ends everything. Only this namespace sees the mounts, addresses and names made here.
run_login() {
  hostname login
  mount --make-rprivate /
  mount -t tmpfs tmpfs /run # ip netns keeps its files there
  mount --bind "$LAPTOP_DIR/hosts" /etc/hosts
  ip link set lo up
  ip link add switch type bridge
  ip address add 10.99.0.1/24 dev switch
  ip link set switch up
  slurmctld -f "$CONF"
  for node in $(nodes); do boot_node "$node"; done
  touch "$LAPTOP_DIR/up"
  stay
}

# Plug a node into the switch and start its first process; called on the login host.
boot_node() {
  local node=$1 number=${1#n}
  ip netns delete "$node" 2>/dev/null || true
  ip link delete "to-$node" 2>/dev/null || true
  ip netns add "$node"
  ip link add "to-$node" type veth peer name eth0 netns "$node"
  ip link set "to-$node" master switch up
  ip -n "$node" address add "10.99.0.$((10 + number))/24" dev eth0
  ip -n "$node" link set lo up
  ip -n "$node" link set eth0 up
  setsid nsenter --net="/run/netns/$node" unshare --mount --uts --ipc --pid --fork --kill-child \
    --mount-proc bash "$SELF" __node "$node" >>"$LAPTOP_DIR/log/$node.out" 2>&1 </dev/null &
  echo $! >"$LAPTOP_DIR/pid/unshare-$node" # as the login host counts processes
}

run_node() {
  hostname "$1"
  mount -t tmpfs -o mode=1777 tmpfs /dev/shm
  slurmd -D -N "$1" -f "$CONF" &
  stay
}

# A first process (PID 1) must not end, and must wait for orphans: bash does so by itself.
stay() { while :; do sleep 3600 & wait $! || true; done; }

# ---- commands ----------------------------------------------------------------------------------

start() {
  local missing=() tool mode=ports

  for tool in slurmctld slurmd sbatch munged ip; do
    command -v $tool >/dev/null || missing+=("$tool")
  done
  if [ "$(id -u)" = 0 ]; then
    # Root in a container may lack the right to make namespaces.
    if unshare --mount --net --pid --fork --uts --ipc true 2>/dev/null; then mode=namespaces; fi
  fi
  [ ${#missing[@]} = 0 ] || fail "${missing[*]} not found. Debian, Ubuntu: $APT"
  [[ $LAPTOP_DIR != *[[:space:]]* && $LAPTOP_DIR != /run/* ]] ||
    fail "LAPTOP_DIR must have no spaces and not be in /run: $LAPTOP_DIR"
  if [ -e "$LAPTOP_DIR" ] && [ ! -e "$LAPTOP_DIR/settings" ]; then
    rmdir "$LAPTOP_DIR" 2>/dev/null || fail "$LAPTOP_DIR holds something else: set LAPTOP_DIR"
  fi
  (LAPTOP_KEEP="" "$SELF" stop) # one that was left behind

  LAPTOP_MODE=${LAPTOP_MODE:-$mode} LAPTOP_NODES=${LAPTOP_NODES:-2} LAPTOP_GPUS=${LAPTOP_GPUS:-4}
  LAPTOP_CPUS=${LAPTOP_CPUS:-72} LAPTOP_MEM=${LAPTOP_MEM:-500000} LAPTOP_CONF=${LAPTOP_CONF:-}
  LAPTOP_PORT=${LAPTOP_PORT:-17000}
  WRAPPER=$(find /usr/lib* -name libnss_wrapper.so -print -quit 2>/dev/null || true)
  case $LAPTOP_MODE in namespaces | ports) ;; *) fail "LAPTOP_MODE is namespaces or ports" ;; esac
  mkdir -p "$LAPTOP_DIR"
  chmod 755 "$LAPTOP_DIR"
  mkdir "$LAPTOP_DIR"/{state,log,pid,dev,tmp}
  mkdir -m 700 "$LAPTOP_DIR/munge"
  chmod 1777 "$LAPTOP_DIR/tmp"
  declare -p LAPTOP_MODE LAPTOP_NODES LAPTOP_GPUS LAPTOP_PORT WRAPPER >"$LAPTOP_DIR/settings"
  write_config
  write_hosts

  if [ "$LAPTOP_MODE" = namespaces ]; then start_namespaces; else start_ports; fi
  wait_until_idle || give_up
  echo "$LAPTOP_NODES nodes are idle ($LAPTOP_MODE). Next: $0 exec sbatch FILE"
  if [ "$LAPTOP_MODE" = ports ] && [ -z "$WRAPPER" ]; then
    echo "For jobs on several nodes: apt-get install libnss-wrapper, then start again"
  fi
}

# Say why the start failed: the daemons tell it in their logs alone.
give_up() {
  local reason
  unset SLURM_CONF # or stop, which inherits it, would end itself
  reason=$(grep -hs fatal: "$LAPTOP_DIR"/log/*.log | head -1 || true)
  reason=${reason:-$(cat "$LAPTOP_DIR"/log/*.out 2>/dev/null | tail -1 || true)}
  LAPTOP_KEEP=1 "$SELF" stop
  fail "could not start: ${reason:-no reason given}. The logs are in $LAPTOP_DIR/log"
}

start_namespaces() {
  SLURM_CONF=$CONF setsid unshare --mount --net --pid --uts --ipc --fork --kill-child --mount-proc \
    --propagation private bash "$SELF" __login >"$LAPTOP_DIR/log/login.out" 2>&1 </dev/null &
  local outer=$! deadline=$((SECONDS + 20))
  echo $outer >"$LAPTOP_DIR/pid/unshare"
  until is_up; do
    if ! kill -0 $outer 2>/dev/null || [ $SECONDS -ge $deadline ]; then
      give_up
    fi
    sleep 0.05
  done
  pgrep -P $outer >"$LAPTOP_DIR/pid/login"
}

start_ports() {
  local m=$LAPTOP_DIR/munge
  (umask 077 && head -c 128 /dev/urandom >"$m/key")
  export SLURM_CONF=$CONF # for the daemons; stop finds them by it
  munged --force --key-file="$m/key" --socket="$m/socket" --pid-file="$m/pid" --log-file="$m/log" \
    --seed-file="$m/seed" 2>>"$LAPTOP_DIR/log/start.out" || give_up
  slurmctld -f "$CONF" 2>>"$LAPTOP_DIR/log/start.out" || give_up
  local node
  for node in $(nodes); do
    slurmd -N "$node" -f "$CONF" 2>>"$LAPTOP_DIR/log/start.out" || give_up
  done
  unset SLURM_CONF
  touch "$LAPTOP_DIR/up"
}

stop() {
  local pids outer deadline=$((SECONDS + 10))
  [ -e "$LAPTOP_DIR/settings" ] || return 0
  if ours $$; then exec env -u SLURM_CONF "$SELF" stop; fi # called from a shell on the cluster
  outer=$(cat "$LAPTOP_DIR/pid/unshare" 2>/dev/null || echo none)
  if ours "$outer"; then kill -9 "$outer"; fi # the kernel then ends all that was inside
  if [ "$LAPTOP_MODE" = ports ] && is_up; then
    on_login timeout 5 scancel --user "$(id -un)" 2>/dev/null || true
  fi
  rm -f "$LAPTOP_DIR/up"
  while pids=$(processes) && [ -n "$pids" ] && [ $SECONDS -lt $deadline ]; do
    if [ "$LAPTOP_MODE" = ports ]; then
      # First politely, which lets slurmd and the jobs tidy up.
      local signal=TERM
      [ $SECONDS -lt $((deadline - 8)) ] || signal=KILL
      kill -$signal $pids 2>/dev/null || true
    fi
    sleep 0.1
  done
  [ -z "$pids" ] || fail "still running:" $pids
  if [ -z "${LAPTOP_KEEP:-}" ]; then rm -rf "$LAPTOP_DIR"; fi
}

# The first process of a node, as the login host counts.
node_pid() {
  local pid
  pid=$(cat "$LAPTOP_DIR/pid/unshare-$1" 2>/dev/null) && pid=$(on_login pgrep -P "$pid") ||
    fail "$1 is not running"
  echo "$pid"
}

kill_node() {
  if [ "$LAPTOP_MODE" = namespaces ]; then
    on_login kill -9 "$(node_pid "$1")"
  else
    kill -9 "$(<"$LAPTOP_DIR/pid/slurmd-$1")"
  fi
}

kill_slurmd() {
  if [ "$LAPTOP_MODE" = namespaces ]; then
    on_login pkill -9 -P "$(node_pid "$1")" -x slurmd
  else
    kill -9 "$(<"$LAPTOP_DIR/pid/slurmd-$1")"
  fi
}

boot() {
  if [ "$LAPTOP_MODE" = namespaces ]; then
    ! (node_pid "$1") >/dev/null 2>&1 || fail "$1 is running"
    on_login bash "$SELF" __boot "$1"
  else
    SLURM_CONF=$CONF slurmd -N "$1" -f "$CONF"
  fi
}

command=${1:-help}
shift || true
case $command in
help | -h | --help) usage; exit ;;
esac
# What start was told holds for the other commands too.
if [ "$command" != start ] && [ -e "$LAPTOP_DIR/settings" ]; then . "$LAPTOP_DIR/settings"; fi
case $command in
start | stop | exec | run | status | __login) ;;
node | kill | killd | boot | link | __node | __boot)
  [[ $command == __* ]] || is_up || fail "the cluster is not running: $0 start"
  nodes | grep -qxF -- "${1:-}" || fail "$command needs a node: $(nodes | paste -sd' ')" ;;
*) fail "no command $command; see $0 --help" ;;
esac
case $command in
exec | run) [ $# -gt 0 ] || fail "$command needs a command, such as sbatch FILE" ;;
esac
case $command in
start) start ;;
stop) stop ;;
exec) on_login "$@" ;;
run)
  trap '"$SELF" stop' EXIT
  "$SELF" start >&2
  "$SELF" exec "$@" ;;
status) on_login sinfo -N -o "%N %T %c %m %G %E" ;;
node)
  for_root node
  pid=$(node_pid "$1")
  on_login nsenter --target "$pid" --mount --uts --net --pid --ipc --wdns="$PWD" -- "${@:2}" ;;
kill) kill_node "$1" ;;
killd) kill_slurmd "$1" ;;
boot) boot "$1" ;;
link)
  for_root link
  case ${2:-} in up | down) ;; *) fail "link needs up or down" ;; esac
  on_login ip link set "to-$1" "$2" ;;
__login) run_login ;;
__node) run_node "$1" ;;
__boot) boot_node "$1" ;;
esac
