#!/usr/bin/env bash
# A run on machines of your own, over plain SSH: the roles without Ray, and without a coordinator.
#
#   TRAINER_HOST=node1 WORKER_HOSTS="node2 node3" deploy/ssh.sh install      once: Stagecoach of this checkout, on each
#   TRAINER_HOST=node1 WORKER_HOSTS="node2 node3" WORKERS_PER_HOST=4 deploy/ssh.sh start examples/cartpole.yaml my-run
#   deploy/ssh.sh leave my-run                   the roles leave, the trainer with a checkpoint; the run stays open
#   deploy/ssh.sh again examples/cartpole.yaml my-run      and continues
#   deploy/ssh.sh logs my-run                    the last lines of each role
#
# ┌─ Edit, or set in the environment ─────────────────────────────────────────────────────────────────────────────────
trainer_host=${TRAINER_HOST:-node1}         # the trainer and the evaluator run there
read -ra worker_hosts <<<"${WORKER_HOSTS:-node2 node3}"
workers_per_host=${WORKERS_PER_HOST:-4}
env_file=${STAGECOACH_ENV:-$HOME/stagecoach.env}   # passwords and addresses; cluster.env.example shows it
read -ra ssh <<<"${SSH:-ssh}"               # e.g. "ssh -i ~/.ssh/cluster -l me"
# shellcheck disable=SC2016 # $HOME over there
remote_python=${REMOTE_PYTHON:-'$HOME/stagecoach-venv/bin/python'}  # each machine's; `install` makes the default
# └───────────────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# Redis and the store must be there, and be reached from here and from each machine by the addresses in that file
# (`services.sh start redis s3` on one machine makes both). The config's folder travels to ~/stagecoach-runs/RUN on each
# machine, with your own environment in it; the secrets go to a file there that only you may read. Nothing is started
# again when a machine dies: `again` (after `leave`) does that. Roles that die alone are started again (role.sh).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${STAGECOACH_PYTHON:-python}

fail() {
  echo "Error: $*" >&2
  exit 2
}

# on HOST COMMAND: standard input goes along.
on() {
  "${ssh[@]}" -o BatchMode=yes "$1" "$2" || fail "$1 does not do what it is asked; try: ${ssh[*]} $1"
}

hosts() {
  printf '%s\n' "$trainer_host" "${worker_hosts[@]}" | sort -u
}

prepare() {
  local config=$1 run=$2 again=$3
  [[ -r $env_file ]] || fail "$env_file cannot be read; cluster.env.example shows what stands in it"
  set -a
  # shellcheck source=/dev/null
  . "$env_file"
  set +a
  [[ -n ${STAGECOACH__REDIS__URL:-} && -n ${STAGECOACH__STORE__URL:-} ]] ||
    fail "$env_file must say where Redis and the store are: STAGECOACH__REDIS__URL, STAGECOACH__STORE__URL"
  [[ -n $again ]] || "$python" -m stagecoach prepare "$config" --run-id "$run" || exit
}

# The config's folder, the resolved config, the secrets and role.sh go to a machine.
bring() {
  local host=$1 config=$2 run=$3 folder="stagecoach-runs/$3"
  on "$host" "umask 077 && mkdir -p $folder/code && cat > $folder/stagecoach.env" <"$env_file"
  on "$host" "cat > $folder/role.sh" <"$here/role.sh"
  tar -C "$(dirname "$config")" --exclude=.git --exclude=.venv --exclude=runs --exclude=__pycache__ -cz . |
    on "$host" "tar -xz -C $folder/code"
  "$python" -m stagecoach config "$config" | on "$host" "cat > $folder/code/.stagecoach-run.yaml"
}

# start HOST RUN NAME ROLE [INDEX]: in the background over there, with its log and process id in the run's folder.
start() {
  local host=$1 run=$2 name=$3 role=$4 index=${5:-}
  on "$host" "cd stagecoach-runs/$run/code && export STAGECOACH_ENV=\"\$HOME/stagecoach-runs/$run/stagecoach.env\" \
    STAGECOACH_PYTHON=\"$remote_python\"; { setsid nohup bash ../role.sh $role $run .stagecoach-run.yaml $index \
    >>../$name.log 2>&1 </dev/null & echo \$! >../$name.pid; }" </dev/null
  echo "$name runs on $host; its log is ~/stagecoach-runs/$run/$name.log there"
}

start_all() {
  local config=$1 run=$2 host index=0
  [[ $run =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail "run id $run: letters, digits, '.', '_' and '-'"
  prepare "$config" "$run" "${3:-}"
  for host in $(hosts); do bring "$host" "$config" "$run"; done
  start "$trainer_host" "$run" trainer trainer
  start "$trainer_host" "$run" evaluator evaluator
  for host in "${worker_hosts[@]}"; do
    for _ in $(seq "$workers_per_host"); do
      start "$host" "$run" "worker-$index" worker "$index"
      index=$((index + 1))
    done
  done
}

# Builds a wheel here; each machine needs python3 with venv, and a package index for what the wheel requires.
install_all() {
  local host
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  "$python" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" "$here/.." || fail "$here/.. cannot be built into a wheel"
  for host in $(hosts); do
    # shellcheck disable=SC2016 # $pip over there
    tar -C "$here/.." -c constraints.txt -C "$wheels" . |
      on "$host" 'rm -rf stagecoach-wheel && mkdir stagecoach-wheel && tar -x -C stagecoach-wheel &&
        { test -x stagecoach-venv/bin/python || python3 -m venv stagecoach-venv; } &&
        cd stagecoach-wheel && pip="../stagecoach-venv/bin/python -m pip" && $pip uninstall -qqy stagecoach &&
        $pip install --quiet -c constraints.txt ./*.whl'
    echo "installed on $host"
  done
}

each_role() {
  local host
  for host in $(hosts); do
    on "$host" "cd stagecoach-runs/$1 && for pid in *.pid; do $2; done" </dev/null
  done
}

# shellcheck disable=SC2016 # what stands in single quotes is for the shell over there
case "${1:-}" in
  install) install_all ;;
  start) start_all "${2:?CONFIG is missing}" "${3:?RUN is missing}" ;;
  again) start_all "${2:?CONFIG is missing}" "${3:?RUN is missing}" again ;;
  leave) each_role "${2:?RUN is missing}" 'kill $(cat $pid) 2>/dev/null && echo "${pid%.pid} leaves" || true' ;;
  logs) each_role "${2:?RUN is missing}" 'echo "== ${pid%.pid}"; tail -n 3 ${pid%.pid}.log' ;;
  *) fail "usage: ssh.sh install, ssh.sh start|again CONFIG RUN, ssh.sh leave|logs RUN" ;;
esac
