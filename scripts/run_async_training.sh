#!/bin/sh
# Train a defender with workers that hand over whole episodes: scripts/run_async_training.sh --n-workers 50
cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-.venv/bin/python}" workflow_rl/async_train_workflow_rl.py "$@"
