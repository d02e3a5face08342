# Sourced by the other scripts: what they run tells nobody that it was run.
export DO_NOT_TRACK=true HF_HUB_DISABLE_TELEMETRY=1 MLFLOW_DISABLE_TELEMETRY=true
