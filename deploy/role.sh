#!/usr/bin/env bash
# One role of a run without Ray, started again while it dies.
#
#   role.sh trainer|evaluator RUN CONFIG
#   role.sh worker RUN CONFIG INDEX          no other worker of the run may have that number
#   role.sh task RUN CONFIG                  what this SLURM task is: 0 the trainer, 1 the evaluator, then workers 0, 1 …
#
# CONFIG is the run's own. Where Redis and the store are, and the secrets, come from the environment (after the file that
# STAGECOACH_ENV names, where it names one; cluster.env.example shows it). SIGTERM makes the role leave in order: a worker
# after its fragment, the trainer with a checkpoint; the run stays open, and the same command continues it.
#
# Exit code: 0 the run has ended or the role has left, 2 a mistake that a new start would make again, 1 it died too often.
set -euo pipefail

role=$1 run=$2 config=$3
if [[ -n ${STAGECOACH_ENV:-} ]]; then
  set -a
  # shellcheck source=/dev/null
  . "$STAGECOACH_ENV"
  set +a
fi
if [[ $role == task ]]; then
  case $SLURM_PROCID in
    0) role=trainer ;;
    1) role=evaluator ;;
    *) role=worker && set -- worker "$run" "$config" $((SLURM_PROCID - 2)) ;;
  esac
fi
case $role in
  trainer) command=(stagecoach.trainer_node "$run") ;;
  evaluator) command=(stagecoach.rollout_worker "$run" --evaluator) ;;
  worker) command=(stagecoach.rollout_worker "$run" --index "$4") ;;
  *) echo "Error: role $role: there are trainer, evaluator, worker and task" >&2 && exit 2 ;;
esac
command+=(--config "$config" --redis "$STAGECOACH__REDIS__URL" --store "$STAGECOACH__STORE__URL")
[[ -z ${STAGECOACH__STORE__ENDPOINT_URL:-} ]] || command+=(--endpoint-url "$STAGECOACH__STORE__ENDPOINT_URL")

child='' leaving='' deaths=0
trap 'leaving=1; [[ -z $child ]] || kill -TERM "$child" 2>/dev/null || true' TERM INT
while [[ -z $leaving ]]; do
  started=$SECONDS code=0
  "${STAGECOACH_PYTHON:-python}" -P -m "${command[@]}" & # -P: no module of this folder takes the place of ours
  child=$!
  [[ -z $leaving ]] || kill -TERM "$child" 2>/dev/null || true # the signal came before the trap knew the child
  wait "$child" || code=$?
  if [[ -n $leaving ]]; then # the signal ended that wait, not the role
    code=0
    wait "$child" || code=$?
    exit "$code"
  fi
  ((code != 0 && code != 2)) || exit "$code"
  ((SECONDS - started < 120)) && deaths=$((deaths + 1)) || deaths=1
  echo "${command[1]} ${role}${4:+-$4} died with exit code $code, $deaths times in a row" >&2
  ((deaths <= 10)) || exit 1
  sleep 1
done
