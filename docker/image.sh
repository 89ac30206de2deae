#!/usr/bin/env bash
# Build the images consilium-server, -site, -dashboard and -gateway. Variables: DOCKER (the client), TAG (local),
# BASE (by default one image, by its digest, as in docker/Dockerfile; python:3.11-slim for whatever the registry has under that
# name or, where none can be reached, for a stand-in made of Debian packages), DOCKER_BUILD_FLAGS (words for `docker build`), PIP_INDEX_URL, PIP_EXTRA_INDEX_URL (handed to pip), PIP_FIND_LINKS (folders whose wheels come along).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

docker=${DOCKER:-docker}
tag=${TAG:-local}
base=${BASE:-$(sed -n 's/^ARG BASE=//p' docker/Dockerfile)}

for folder in ${PIP_FIND_LINKS:-}; do
  if [ -d "$folder" ]; then
    find "$folder" -maxdepth 1 -name '*.whl' -exec cp --update -t docker/wheels {} +
  fi
done

if ! "$docker" image inspect "$base" >/dev/null 2>&1 && ! "$docker" pull "$base"; then
  case $base in
    *@sha256:*)
      echo "The base image $base is named by its digest and cannot be pulled." >&2
      echo "To fix: reach an image registry; where there is none, BASE=python:3.11-slim $0 makes a stand-in of Debian packages." >&2
      exit 1
      ;;
  esac
  docker/base-image.sh "$base"
fi

# shellcheck disable=SC2086  # flags are words
for image in gateway server site dashboard; do
  DOCKER_BUILDKIT=1 "$docker" build ${DOCKER_BUILD_FLAGS:-} --file docker/Dockerfile --target "$image" \
    --tag "consilium-$image:$tag" --build-arg BASE="$base" \
    ${PIP_INDEX_URL:+--build-arg PIP_INDEX_URL} ${PIP_EXTRA_INDEX_URL:+--build-arg PIP_EXTRA_INDEX_URL} .
done
