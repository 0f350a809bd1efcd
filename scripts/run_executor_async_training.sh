#!/bin/sh
# Train a defender with a process pool: scripts/run_executor_async_training.sh --n-workers 50
cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-.venv/bin/python}" workflow_rl/executor_async_train_workflow_rl.py "$@"
