#!/bin/sh
# Train with MBPO and collectors that never wait: scripts/run_async_mbpo.sh --task Isaac-Exploration-Rough-Drone-v0 --num_envs 64
cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-.venv/bin/python}" scripts/train_isaac_async.py "$@"
