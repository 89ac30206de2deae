#!/usr/bin/env bash
# Make python:3.11-slim from Debian packages, for a machine that reaches a Debian mirror but no image registry.
# Needs mmdebstrap and root. Only docker/image.sh calls this, and only when the real image can be neither found nor
# pulled. The stand-in carries the machine's own certificate authorities, because such a machine tends to need them.
set -euo pipefail

docker=${DOCKER:-docker}
tag=${1:-python:3.11-slim}
suite=bookworm  # its python3 is 3.11
needs() {
  printf '%s\n' "$tag can be neither found nor pulled, and a stand-in made of Debian packages needs $1." "To fix: $2" >&2
  exit 1
}
command -v mmdebstrap >/dev/null || needs mmdebstrap "apt-get install mmdebstrap"
[ "$(id -u)" = 0 ] || needs root "run this as root, or reach an image registry"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

echo "making $tag from Debian $suite" >&2
mmdebstrap --quiet --variant=minbase --include=python3.11,python3.11-venv,python3-pip,ca-certificates \
  "$suite" "$scratch/base.tar"
"$docker" import "$scratch/base.tar" "$tag-debian" >/dev/null

mkdir -p "$scratch/context/certificates"
find /usr/local/share/ca-certificates -name '*.crt' -exec cp -t "$scratch/context/certificates" {} + 2>/dev/null || true
cat >"$scratch/context/Dockerfile" <<DOCKERFILE
FROM $tag-debian
COPY certificates/ /usr/local/share/ca-certificates/
RUN update-ca-certificates && ln -sf python3.11 /usr/bin/python
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
DOCKERFILE
# shellcheck disable=SC2086  # flags are words
DOCKER_BUILDKIT=1 "$docker" build ${DOCKER_BUILD_FLAGS:-} --tag "$tag" "$scratch/context"
