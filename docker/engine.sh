#!/usr/bin/env bash
# `run COMMAND…`: run a command with a Docker engine, the one that answers or, where none does, one of its own that ends
# with the command. An own engine touches nothing of the host's network: no iptables, no forwarding, no default bridge.
# Needs dockerd and root for that. Variables: DOCKER (the client), ENGINE_DATA (where an own engine keeps its images).
set -euo pipefail

docker=${DOCKER:-docker}
if [ "${1:-}" != run ] || [ $# -lt 2 ]; then
  echo "usage: docker/engine.sh run COMMAND…" >&2
  exit 2
fi
shift

if "$docker" info >/dev/null 2>&1; then
  exec "$@"
fi
# A client elsewhere on the PATH may lack the builder that comes with the engine's own package.
if [ -z "${DOCKER:-}" ] && [ -x /usr/bin/docker ]; then
  docker=/usr/bin/docker
fi
data=${ENGINE_DATA:-/var/lib/consilium-docker}
state=$(mktemp -d)
mkdir -p "$data"
dockerd --host "unix://$state/docker.sock" --data-root "$data" --exec-root "$state/exec" --pidfile "$state/pid" \
  --iptables=false --ip6tables=false --ip-forward=false --bridge=none --storage-driver=overlay2 >"$state/log" 2>&1 &
engine=$!
stop() {
  kill "$engine" 2>/dev/null || true
  wait "$engine" 2>/dev/null || true
  rm -rf "$state"
}
trap stop EXIT
export DOCKER=$docker DOCKER_HOST=unix://$state/docker.sock
export DOCKER_BUILD_FLAGS=${DOCKER_BUILD_FLAGS:---network=host}
for _ in $(seq 100); do
  "$docker" info >/dev/null 2>&1 && break
  kill -0 "$engine" 2>/dev/null || { tail -n 5 "$state/log" >&2; exit 1; }
  sleep 0.3
done
"$@"
