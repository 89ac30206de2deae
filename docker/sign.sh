#!/usr/bin/env bash
# `sign.sh FOLDER [KEY]`: write FOLDER/SHA256SUMS of every file in FOLDER, and SHA256SUMS.sig with the consortium's key in
# KEY (a study's keys/ledger.key). Who unpacks it checks with the consortium.pem of the startup kit, which came another way:
#   openssl pkeyutl -verify -rawin -pubin -inkey kit/consortium.pem -sigfile SHA256SUMS.sig -in SHA256SUMS
#   sha256sum --check SHA256SUMS
set -euo pipefail

key=${2:+$(realpath "$2")}
cd "$1"
rm -f SHA256SUMS SHA256SUMS.sig
# The first line keeps this signature apart from all others by the same key; sha256sum takes it for a comment.
sums=$(find . -type f -print0 | sort -z | xargs -0 sha256sum)
printf '# consilium/bundle/v1\n%s\n' "$sums" >SHA256SUMS
if [ -z "$key" ]; then
  echo "$1: SHA256SUMS is not signed; sign it with \`docker/sign.sh $1 STUDY/keys/ledger.key\`" >&2
  exit 0
fi
openssl pkeyutl -sign -rawin -inkey "$key" -in SHA256SUMS -out SHA256SUMS.sig
