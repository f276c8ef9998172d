#!/usr/bin/env bash
# Fits the library of concepts to models, one after the other: a pack with its card and report for each.
#
#   bash scripts/benchmarks/fit_models.sh OUT MODEL...
#   DEVICE=cpu LAYERS=8,10,12 bash scripts/benchmarks/fit_models.sh packs demo
#
# DEVICE: cuda unless given. LAYERS: as of `probemon library fit`. CONCEPTS: all unless given. A model that fails is named
# at the end, and the others are fitted; the same command again fits what is missing or had other LAYERS or CONCEPTS.
set -uo pipefail
[ $# -ge 2 ] || { sed -n '2,8p' "$0" >&2; exit 2; }
out=$1; shift
probemon=$(command -v probemon || echo .venv/bin/probemon)
mkdir -p "$out"; failed=()
for model in "$@"; do
  if [ -d "$model" ]; then short=$(basename "$model"); else short=${model//\//-}; fi
  name=concepts-${short,,}
  pack=$out/$name states=$out/states-$name
  asked="layers ${LAYERS:-auto}, concepts ${CONCEPTS:-all}"
  [ "$(cat "$pack.asked" 2>/dev/null)" = "$asked" ] && { echo "== $model: $pack is there"; continue; }
  echo "== $model"
  if "$probemon" library fit "$model" --out "$pack" --name "$name" --device "${DEVICE:-cuda}" --layers "${LAYERS:-auto}" \
      ${CONCEPTS:+--concepts "$CONCEPTS"} --states "$states" --report "$pack.html" --overwrite
  then
    rm -rf "$states"
    "$probemon" inspect "$pack" > "$pack.txt" || failed+=("$model")
    "$probemon" library evaluate "$pack" --model "$model" --device "${DEVICE:-cuda}" --json > "$pack.tests.json" &&
      echo "$asked" > "$pack.asked" || failed+=("$model")
  else
    failed+=("$model")
  fi
done
[ ${#failed[@]} = 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
