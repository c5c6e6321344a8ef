#!/usr/bin/env bash
# What the head of a cluster runs beside Ray: Redis and, where asked for, an S3 server (rclone over a folder).
#
#   services.sh start redis [s3]     on the addresses of STAGECOACH__REDIS__URL and STAGECOACH__STORE__ENDPOINT_URL
#   services.sh stop                 ends both; what they hold stays
#
# A service that runs already is left alone, so this may stand in a cluster's start commands. Data, logs and process ids
# are in STAGECOACH_SERVICES (~/stagecoach-services), which only its owner may read. Secrets come from the environment
# (cluster.env.example names them); Redis gets their hashes in a file, rclone its keys by environment.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${STAGECOACH_SERVICES:-$HOME/stagecoach-services}
python=${STAGECOACH_PYTHON:-python}

fail() {
  echo "Error: $*" >&2
  exit 2
}

# Whether the process that NAME.pid names is alive and still that program.
alive() {
  local pid
  pid=$(cat "$folder/$1.pid" 2>/dev/null) && [[ -n $pid ]] && kill -0 "$pid" 2>/dev/null &&
    tr '\0' ' ' <"/proc/$pid/cmdline" | grep -qE 'redis-server|valkey-server|rclone'
}

wait_for() {
  local name=$1 host=$2 port=$3 tried
  for tried in $(seq 300); do
    if (: <>"/dev/tcp/$host/$port") 2>/dev/null && alive "$name"; then
      sleep 0.2 # another server may have this port: ours then ends
      alive "$name" || break
      echo "$name serves on $host:$port, its log is $folder/$name.log"
      return
    fi
    sleep 0.2
    ((tried < 15)) || alive "$name" || [[ ! -e $folder/$name.pid && $tried -lt 100 ]] || break # a daemon writes it late
  done
  echo "Error: $name does not serve on $host:$port; the end of $folder/$name.log:" >&2
  tail -n 5 "$folder/$name.log" >&2
  exit 1
}

start_redis() {
  local url=${STAGECOACH__REDIS__URL:-redis://127.0.0.1:6380/0} host port binary
  [[ $url =~ ^redis://([^:/@]+):([0-9]+)(/[0-9]+)?$ ]] || fail "STAGECOACH__REDIS__URL=$url is not redis://HOST:PORT/0"
  host=${BASH_REMATCH[1]} port=${BASH_REMATCH[2]}
  if ! alive redis; then
    mkdir -p "$folder/redis"
    binary=$(cat "$folder/redis.binary" 2>/dev/null) || true # another server may not read what this one wrote
    [[ -x $binary ]] ||
      binary=$("$python" -c 'from stagecoach.coordinator.services.redis_servers import redis_binary; print(redis_binary())')
    echo "$binary" >"$folder/redis.binary"
    "$python" "$here/make_acl.py" >"$folder/users.acl"
    {
      grep -vE '^(bind|port|dir|aclfile) ' "$here/redis.conf"
      if [[ $host == 127.0.0.1 ]]; then echo "bind 127.0.0.1"; else echo "bind 127.0.0.1 $host"; fi
      echo "port $port"
      echo "dir \"$folder/redis\""
      echo "logfile \"$folder/redis.log\""
      echo "pidfile \"$folder/redis.pid\""
      echo "daemonize yes"
      echo "aclfile \"$folder/users.acl\""
    } | "$binary" -
  fi
  wait_for redis "$host" "$port"
}

start_s3() {
  local url=${STAGECOACH__STORE__ENDPOINT_URL:-http://127.0.0.1:9000} bucket=${STAGECOACH__STORE__URL:-} host port binary
  [[ $url =~ ^http://([^:/@]+):([0-9]+)/?$ ]] || fail "STAGECOACH__STORE__ENDPOINT_URL=$url is not http://HOST:PORT"
  host=${BASH_REMATCH[1]} port=${BASH_REMATCH[2]}
  [[ $bucket =~ ^s3://([a-z0-9.-]+) ]] || fail "STAGECOACH__STORE__URL=$bucket is not s3://BUCKET/PREFIX"
  [[ -n ${AWS_ACCESS_KEY_ID:-} && -n ${AWS_SECRET_ACCESS_KEY:-} ]] ||
    fail "AWS_ACCESS_KEY_ID or AWS_SECRET_ACCESS_KEY is empty; no S3 server without keys"
  mkdir -p "$folder/s3/${BASH_REMATCH[1]}"
  if ! alive s3; then
    binary=$("$python" -c 'from stagecoach.coordinator.services.embedded import rclone_binary; print(rclone_binary())')
    RCLONE_AUTH_KEY="\"$AWS_ACCESS_KEY_ID,$AWS_SECRET_ACCESS_KEY\"" RCLONE_CONFIG=/dev/null \
      setsid nohup "$binary" serve s3 "$folder/s3" --addr "$host:$port" --vfs-cache-mode off \
      >>"$folder/s3.log" 2>&1 </dev/null &
    echo $! >"$folder/s3.pid"
  fi
  wait_for s3 "$host" "$port"
}

stop() {
  local name
  for name in redis s3; do
    if alive "$name"; then
      kill "$(cat "$folder/$name.pid")"
      for _ in $(seq 100); do
        alive "$name" || break
        sleep 0.1
      done
      if alive "$name"; then
        echo "Error: $name does not end; its process is $(cat "$folder/$name.pid")" >&2
        exit 1
      fi
      echo "$name has ended"
    fi
  done
}

umask 077
mkdir -p "$folder"
case "${1:-}" in
  start)
    shift
    (($#)) || fail "start what? redis, s3, or both"
    for service in "$@"; do
      case $service in
        redis) start_redis ;;
        s3) start_s3 ;;
        *) fail "start $service: there are redis and s3" ;;
      esac
    done
    ;;
  stop) stop ;;
  *) fail "usage: services.sh start redis [s3] | stop" ;;
esac
