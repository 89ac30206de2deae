#!/usr/bin/env bash
# `run COMMAND…`: run a command with a Docker engine, the one that answers or, where none does, one of its own that ends
# with the command. An own engine touches nothing of the host's network: no iptables, no forwarding, no default bridge.
# Needs dockerd and root for that, and says so where one is missing. Variables: DOCKER (the client), ENGINE_DATA (where an
# own engine keeps its images).
set -euo pipefail

install="On Debian: apt-get install docker.io docker-compose; where no image registry can be reached, mmdebstrap as well."
stop_with() {
  printf '%s\n' "$@" >&2
  exit 1
}

docker=${DOCKER:-docker}
if [ "${1:-}" != run ] || [ $# -lt 2 ]; then
  echo "usage: docker/engine.sh run COMMAND…" >&2
  exit 2
fi
shift

command -v "$docker" >/dev/null ||
  stop_with "Docker is not installed: there is no command \`$docker\`." "To fix: install it. $install"
if "$docker" info >/dev/null 2>&1; then
  exec "$@"
fi
command -v dockerd >/dev/null ||
  stop_with "No Docker engine answers, and there is no \`dockerd\` to start one with." \
    "To fix: start Docker, or install its engine. $install"
[ "$(id -u)" = 0 ] ||
  stop_with "No Docker engine answers, and only root can start one." "To fix: start Docker, or run this command as root."
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
answers=no
for _ in $(seq "${ENGINE_TRIES:-200}"); do
  if "$docker" info >/dev/null 2>&1; then answers=yes; break; fi
  kill -0 "$engine" 2>/dev/null || break
  sleep 0.3
done
if [ "$answers" = no ]; then
  tail -n 5 "$state/log" >&2
  stop_with "The Docker engine that was started does not answer; its last lines stand above." \
    "To fix: what they say, or start Docker yourself and run this again."
fi
"$@"
