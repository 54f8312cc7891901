#!/bin/bash
# A Ray cluster by hand, and a training of yours on it (laconic.integrations.ray, docs/integrations.md):
#   bash ray.sh head                     on the first machine
#   HEAD=10.0.0.1 bash ray.sh worker     on each of the others
#   HEAD=10.0.0.1 bash ray.sh submit python train.py     from a machine that has Ray
# All machines need the same RAY_AUTH_TOKEN, which `ray get-auth-token --generate` makes: Ray refuses others.
set -euo pipefail
HEAD="${HEAD:-127.0.0.1}"
case "${1:-}" in
  head) exec ray start --head --port 6379 --dashboard-host "${DASHBOARD_HOST:-127.0.0.1}" --block ;;
  worker) exec ray start --address "$HEAD:6379" --block ;;
  submit) shift; exec ray job submit --address "http://$HEAD:8265" --working-dir . -- "$@" ;;
  *) echo "usage: ray.sh head | worker | submit COMMAND..." >&2; exit 2 ;;
esac
