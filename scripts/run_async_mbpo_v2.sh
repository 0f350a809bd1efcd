#!/bin/sh
# Train with MBPO and one collector that works while the learner updates: scripts/run_async_mbpo_v2.sh --task Isaac-Exploration-Rough-Drone-v0 --num_envs 64
cd "$(dirname "$0")/.." || exit 1
exec "${PYTHON:-.venv/bin/python}" scripts/train_isaac_async_v2.py "$@"
