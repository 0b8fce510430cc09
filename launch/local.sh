#!/usr/bin/env bash
# Start a script on this machine:  launch/local.sh models/train.py cifar10
#   NP=8          how many ranks (default: one per GPU, without GPUs 4)
#   GLOO=1        coordinate through Gloo instead of MPI
#   PYTHON=...    another Python than the one that is found first
set -euo pipefail

[[ $# -gt 0 ]] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }

gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
np=${NP:-$((gpus > 0 ? gpus : 4))}

export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1} # huge pages, as `hvdkit run` has them

# horovodrun numbers its ranks' lines; hvdkit sets what must be set before MPI starts (docs/settings.md).
exec horovodrun ${GLOO:+--gloo} -np "$np" "${PYTHON:-python}" "$@"
