#!/usr/bin/env bash
# `up`: bring the federation up, follow the study to its end, check its ledger, copy the results to docker-out/.
# `down`: remove containers, networks and volumes. Variables: DOCKER, COMPOSE (by default `docker compose`, else
# docker-compose), OUT (docker-out), and CONSILIUM_QUERIES, CONSILIUM_STEPS, CONSILIUM_SEED for the study.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

docker=${DOCKER:-docker}
out=${OUT:-docker-out}
if [ -z "${COMPOSE:-}" ]; then
  if "$docker" compose version >/dev/null 2>&1; then
    COMPOSE="$docker compose"
  elif command -v docker-compose >/dev/null; then
    COMPOSE="docker-compose"
  else
    printf '%s\n' "Docker has no compose: neither \`$docker compose\` nor \`docker-compose\` is there." \
      "To fix: install one (on Debian: apt-get install docker-compose)." >&2
    exit 1
  fi
fi
read -ra compose <<<"$COMPOSE"
export COMPOSE_PROJECT_NAME=${COMPOSE_PROJECT_NAME:-consilium}

in_study() {  # a command in a fresh container on the study's volume, without touching the others
  "${compose[@]}" run --rm --no-deps -T --entrypoint "$1" server "${@:2}"
}

up() {
  local started=$SECONDS id status key site
  if ! "${compose[@]}" up -d --no-build; then
    "${compose[@]}" logs --tail 40 || true
    return 1
  fi
  echo "the federation is up after $((SECONDS - started)) s"
  id=$("${compose[@]}" ps -a -q study)
  "$docker" logs --follow "$id" &
  status=$("$docker" wait "$id")
  wait $! || true
  echo "the study ended with status $status after $((SECONDS - started)) s"

  rm -rf "$out"
  mkdir -p "$out"
  echo '*' >"$out/.gitignore"
  in_study consilium study status /study --json >"$out/status.json" || true
  # The ledger is checked against the key that a site was given, not against whatever key lies beside the ledger.
  key=$("${compose[@]}" exec -T site-1-worker sed -n 's/^signing_key = "\([0-9a-f]*\)"$/\1/p' /site/site.toml) || status=1
  in_study consilium verify /study/ledger.sqlite --public-key "$key" | tee "$out/verify.txt" || status=1
  for site in 1 2 3; do
    "${compose[@]}" exec -T "site-$site-worker" consilium site status --site-dir /site >"$out/site-$site.txt" || status=1
  done
  "${compose[@]}" stop server >/dev/null  # so that nobody writes to the ledger while it is copied
  in_study tar -C /study -cf - bundle ledger.sqlite events.jsonl study.toml | tar -C "$out" -xf - || status=1
  "${compose[@]}" start server >/dev/null
  [ -e "$out/bundle" ] || status=1
  echo "results in $out/ after $((SECONDS - started)) s; \`make docker-down\` removes the federation"
  return "$status"
}

case "${1:-}" in
  up) up ;;
  down) "${compose[@]}" down --volumes --remove-orphans --timeout 60 ;;
  *) echo "usage: docker/demo.sh up|down" >&2; exit 2 ;;
esac
