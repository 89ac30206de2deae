#!/usr/bin/env bash
# Build the site's image by rootless Podman, as the user who calls this: no Docker engine, no root. Needs apt install podman
# uidmap slirp4netns. BASE as in docker/image.sh; BASE_TAR is a file system to make it of where no image registry is
# reached: mmdebstrap --variant=minbase --include=python3.11,python3.11-venv,python3-pip,ca-certificates bookworm base.tar
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
base=${BASE:-$(sed -n 's/^ARG BASE=//p' docker/Dockerfile)}
if [ -n "${BASE_TAR:-}" ]; then
  base=python:3.11-slim
  context=$(mktemp -d)
  trap 'rm -rf "$context"' EXIT
  mkdir "$context/certificates"
  find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$context/certificates" {} +
  podman import "$BASE_TAR" "$base-debian"
  cat >"$context/Dockerfile" <<DOCKERFILE
FROM $base-debian
COPY certificates/ /usr/local/share/ca-certificates/
RUN update-ca-certificates && ln -sf python3.11 /usr/bin/python
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
DOCKERFILE
  podman build --network=host --tag "$base" "$context"
fi
for folder in ${PIP_FIND_LINKS:-}; do
  [ ! -d "$folder" ] || find "$folder" -maxdepth 1 -name '*.whl' -exec cp --update -t docker/wheels {} +
done
podman build --network=host --file docker/Dockerfile --target site --tag consilium-site:local --build-arg BASE="$base" .
