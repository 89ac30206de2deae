#!/usr/bin/env bash
# Write what the images install, with the SHA-256 of every file pip may take: docker/requirements-{build,gateway,party}.txt.
# Run it after constraints.txt changed, where pip finds packages as an image build does
# (PIP_FIND_LINKS for a build of torch in a folder), on the machine's own kind of processor. Variable: PYTHON (python3.11).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3.11}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for image in build gateway party; do
  case $image in
    build) wanted=("setuptools>=77") ;;
    gateway) wanted=(cryptography httpx starlette uvicorn) ;;
    party) wanted=(.) ;;
  esac
  "$python" -m pip --disable-pip-version-check install --quiet --dry-run --ignore-installed --only-binary :all: \
    --report "$scratch/$image.json" -c constraints.txt "${wanted[@]}"
  "$python" docker/hashes.py "$scratch/$image.json" constraints.txt >"$scratch/$image.txt"
  mv "$scratch/$image.txt" "docker/requirements-$image.txt"
done
