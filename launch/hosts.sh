#!/usr/bin/env bash
# Start a script on several hosts over ssh:  HOSTS=node1:4,node2:4 launch/hosts.sh models/train.py cifar10
#   HOSTS=...     hosts and their slots, or HOSTFILE=... with one host per line: node1 slots=4
#   RESTARTS=3    restarts after failures (default 3), from the newest checkpoint
#   MIN_NP=4      fewest ranks to continue with if hosts are lost (default: all)
#   SSH_ARGS=...  arguments for ssh, e.g. "-p 2222 -i key"
#   PYTHON=...    the Python to use instead of the first one in PATH
# Every host needs the same environment at the same path, and ssh login without a password.
set -euo pipefail

[[ $# -gt 0 && -n ${HOSTS:-}${HOSTFILE:-} ]] || { sed -n '2,8s/^# //p' "$0" >&2; exit 2; }

exec hvdkit run ${HOSTS:+-H "$HOSTS"} ${HOSTFILE:+--hostfile "$HOSTFILE"} ${SSH_ARGS:+--ssh-args="$SSH_ARGS"} \
    --max-restarts "${RESTARTS:-3}" ${MIN_NP:+--min-np "$MIN_NP"} --logs "${LOGS:-logs}" -- "${PYTHON:-python}" "$@"
