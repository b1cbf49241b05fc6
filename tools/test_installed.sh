#!/usr/bin/env bash
# Runs pytest against the tfscale that is installed for an interpreter, away from the sources.
# Usage: tools/test_installed.sh PYTHON [pytest arguments]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
shift
away=$(mktemp -d)
trap 'rm -rf "$away"' EXIT
cp -r "$root/tests" "$root/recipes" "$root/tools" "$root/docs" "$root"/{README.md,Makefile,pyproject.toml} "$away"
cd "$away"
"$python" -m pytest tests --ignore=tests/unit/test_structure.py \
  --ignore=tests/unit/test_house.py --ignore=tests/unit/test_packaging.py --ignore=tests/bench "$@"
