#!/bin/sh
# Register the three sites' public node keys with the running SuperLink and their patient pools with the ledger.
set -eu

for site in site-1 site-2 site-3; do
  if grep -qs "\"name\": \"$site\"" /study/sites.json; then
    echo "$site is registered already"
  else
    consilium study register-site /study "$site" --node-key "/study/node-keys/$site.pub"
  fi
done
