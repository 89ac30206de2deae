#!/bin/sh
# Admit the three sites: their node keys with the running SuperLink, their patient pools with the ledger.
set -eu

for site in site-1 site-2 site-3; do
  if consilium provision list /study | grep -q "^$site: "; then
    echo "$site is admitted already"
  else
    consilium provision approve /study "/study/requests/$site.json" --site "$site" --pool "$site" \
      --fingerprint "$(cat "/study/requests/$site.fingerprint")"
  fi
done
