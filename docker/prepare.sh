#!/bin/sh
# The demo's preparation, in a container of its own: deals synthetic patients to three hospitals, defines and publishes
# the study, and does at each hospital what its administrator would do, with the `consilium` command alone. It can play
# every party because one host holds all of them; in a real study each line runs at the party it names. Steps that are
# done are not repeated.
set -eu

study=/study
scratch=${TMPDIR:-/tmp}/prepare
queries=${CONSILIUM_QUERIES:-16}
seed=${CONSILIUM_SEED:-0}
steps=${CONSILIUM_STEPS:-200}
sites="site-1 site-2 site-3"

if [ -e "$study/prepared" ]; then
  echo "already prepared"
  exit 0
fi

# Synthetic patients: 12 a hospital, public volumes and label maps of other cases, some held out.
maps=24 validation=4 test=16
rm -rf "$scratch"
cases=$((12 * 3 + queries + maps + validation + test))
consilium data synth --out "$scratch/all" --cases "$cases" --hospitals 3 --seed "$seed"
consilium data split --data "$scratch/all" --out "$scratch/split" --public-images "$queries" --label-maps "$maps" \
  --validation "$validation" --test "$test" --seed "$seed"

# The consortium.
if [ ! -e "$study/study.toml" ]; then
  consilium study init "$study" --name compose --labels background,anterior,posterior \
    --spacing 1.4,1.4,1.4 --grid 32,32,32 --queries "$queries" --quorum 2 --epsilon 8 --delta 1e-3
fi
# The recipes change no guarantee; small networks suit small phantoms and two cores.
sed -i -e '/^\[teacher\]/,/^\[/ {s/^channels = .*/channels = [8, 16, 32]/; s/^steps = .*/steps = '"$steps"'/}' \
  -e '/^\[student\]/,/^\[/ {s/^channels = .*/channels = [8, 16, 32]/; s/^steps = .*/steps = '$((2 * steps))'/}' "$study/study.toml"
consilium study publish "$study" --images "$scratch/split/public/images"
consilium codec fit "$study" --label-maps "$scratch/split/public/label-maps" --sites 3
consilium provision server "$study" --host gateway

# Each hospital: its data, its directory from its kit, its teacher. It sends the consortium its join request.
mkdir -p "$study/requests"
set -- "$scratch"/split/sites/*
for site in $sites; do
  home=/sites/$site
  if [ ! -e "$home/site.toml" ]; then
    rm -rf "$home/data"
    cp -r "$1" "$home/data"
    consilium provision kit "$study" "$site" --out "$scratch/kits/$site"
    consilium site init --kit "$scratch/kits/$site" --data "$home/data" --site-dir "$home" | tail -n 1 >"$home/fingerprint"
  fi
  cp "$home/request.json" "$study/requests/$site.json"
  cp "$home/fingerprint" "$study/requests/$site.fingerprint"  # what the site's administrator reads out
  shift
done
pids=
for site in $sites; do
  consilium site consent --site-dir "/sites/$site" --by "whoever runs this on one machine for $site" --yes >/dev/null
  consilium site train --site-dir "/sites/$site" --seed "$seed" &
  pids="$pids $!"
done
for pid in $pids; do
  wait "$pid"
done

rm -rf "$scratch"
touch "$study/prepared"
