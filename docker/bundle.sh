#!/usr/bin/env bash
# Pack what a machine without internet needs into dist/offline/: images, compose files, documents, checksums and the lists
# of what the images contain; for machines without containers the package, with the versions of what it needs. Variables: DOCKER, TAG (local), BUNDLE (dist/offline).
# SIGNING_KEY: a study's keys/ledger.key, with which the checksums are signed; before there is one, docker/sign.sh later.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

docker=${DOCKER:-docker}
tag=${TAG:-local}
out=${BUNDLE:-dist/offline}
rm -rf "$out"
mkdir -p "$out/sbom"
for image in gateway server site dashboard; do
  "$docker" image inspect "consilium-$image:$tag" >/dev/null
  "$docker" run --rm --network none --entrypoint cat "consilium-$image:$tag" /opt/consilium/sbom/sbom.json >"$out/sbom/$image.json"
done
# server and site share their layers, so one archive holds them once
"$docker" save "consilium-gateway:$tag" "consilium-server:$tag" "consilium-dashboard:$tag" | gzip -1 >"$out/images-server.tar.gz"
"$docker" save "consilium-site:$tag" | gzip -1 >"$out/images-site.tar.gz"
"$docker" run --rm --network none --entrypoint sh "consilium-site:$tag" -c 'cd /opt/consilium/package && tar -c -- *.whl' |
  tar -x --no-same-owner -C "$out"
cp constraints.txt docker/requirements-party.txt docker/server.yml docker/behind.yml docker/site.yml README.md LICENSE "$out/"
cp -r docker/systemd docs "$out/"
docker/sign.sh "$out" ${SIGNING_KEY:+"$SIGNING_KEY"}
echo "$out: $(du -sh "$out" | cut -f1); check it as docs/deployment.md says"
