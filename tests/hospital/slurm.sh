#!/usr/bin/env bash
# Start a Slurm of one node from Debian's packages: apt install slurm-wlm munge. As root; slurm.sh stop ends it.
set -euo pipefail
if [ "${1:-start}" = stop ]; then
  for name in slurmd slurmctld munged; do
    for pid in $(pgrep -x "$name"); do kill "$pid"; done
  done
  exit 0
fi
host=$(hostname -s)
install -d -o slurm -g slurm /var/lib/slurm/slurmd /var/lib/slurm/slurmctld /var/log/slurm
install -d -o munge -g munge /run/munge
cat >/etc/slurm/slurm.conf <<CONF
ClusterName=hospital
SlurmctldHost=$host
MpiDefault=none
ProctrackType=proctrack/linuxproc
ReturnToService=2
SlurmdSpoolDir=/var/lib/slurm/slurmd
StateSaveLocation=/var/lib/slurm/slurmctld
SlurmUser=slurm
TaskPlugin=task/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
NodeName=$host CPUs=$(nproc) RealMemory=$(($(awk '/MemTotal/ {print $2}' /proc/meminfo) / 2048)) State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
pgrep -x munged >/dev/null || runuser -u munge -- munged
pgrep -x slurmctld >/dev/null || slurmctld
pgrep -x slurmd >/dev/null || slurmd
for _ in $(seq 50); do sinfo -h -o %T | grep -q idle && exit 0; sleep 0.2; done
sinfo
exit 1
