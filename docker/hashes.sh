#!/usr/bin/env bash
# Write what the images install, with the SHA-256 of every file pip may take: docker/requirements-{build,gateway,party}.txt.
# Run it after constraints.txt changed, where pip finds packages as an image build does
# (PIP_FIND_LINKS for a build of torch in a folder), on the machine's own kind of processor. Variables: PYTHON
# (python3.11); PLATFORM=aarch64 writes requirements-party-aarch64.txt alone, for that processor, on any machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3.11}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
if [ -n "${PLATFORM:-}" ]; then # the same versions, without torch: its build for a processor comes from its makers
  sed -E '/^(#|torch==)/d; s/ --hash.*//' docker/requirements-party.txt >"$scratch/names.txt"
  "$python" -m pip --disable-pip-version-check install --quiet --dry-run --ignore-installed --only-binary :all: --no-deps \
    --platform "manylinux_2_28_$PLATFORM" --platform "manylinux_2_17_$PLATFORM" --platform "manylinux2014_$PLATFORM" \
    --python-version 3.11 --implementation cp --target "$scratch/target" \
    --report "$scratch/party.json" -r "$scratch/names.txt"
  "$python" docker/hashes.py "$scratch/party.json" constraints.txt >"$scratch/party.txt"
  mv "$scratch/party.txt" "docker/requirements-party-$PLATFORM.txt"
  exit 0
fi
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
