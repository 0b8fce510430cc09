#!/usr/bin/env bash
# Start a script on this machine:  launch/local.sh models/train.py cifar10
#   NP=8          number of ranks (default: one per GPU, or 4 without GPUs)
#   GLOO=1        coordinate through Gloo instead of MPI
#   PYTHON=...    the Python to use instead of the first one in PATH
set -euo pipefail

[[ $# -gt 0 ]] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }

gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
np=${NP:-$((gpus > 0 ? gpus : 4))}

export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1} # huge pages, as with `hvdkit run`

# horovodrun prefixes each line with its rank; hvdkit sets what must be set before MPI starts (docs/settings.md).
exec horovodrun ${GLOO:+--gloo} -np "$np" "${PYTHON:-python}" "$@"
