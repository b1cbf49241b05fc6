#!/usr/bin/env bash
# Runs the tests with the lowest and the highest TensorFlow supported, each with a Keras of its
# time, in environments of their own under build/versions. One alone: VERSIONS=2.18/3.10
set -euo pipefail
cd "$(dirname "$0")/.."
for versions in ${VERSIONS:-2.18/3.10 2.21/3.15}; do
  tensorflow=${versions%/*}
  keras=${versions#*/}
  folder=build/versions/$tensorflow
  python=$folder/bin/python
  [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$folder"
  echo "TensorFlow $tensorflow, Keras $keras"
  "$python" -m pip install -q "pip>=25.1"  # knows dependency groups
  "$python" -m pip install -q "tensorflow==$tensorflow.*" "keras==$keras.*" "setuptools>=77.0.3" mpich
  "$python" -m pip install -q --no-build-isolation ".[mpich,recipes]" --group test
  # pip keeps an installed tfscale of the same version: this one is of the present sources.
  "$python" -m pip install -q --no-build-isolation --no-deps --force-reinstall .
  python3 tools/test_all.py --python "$python" --only "^[^C]" -- "$@"
done
