#!/usr/bin/env bash
# Installs the wheel, then the sdist, each into an empty environment in a folder without the sources, and runs the demo.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$root/examples/gpt.py" "$work/"
cd "$work"
for package in "$root"/dist/memtrace-*.whl "$root"/dist/memtrace-*.tar.gz; do
  echo "== $(basename "$package")"
  rm -rf env run.memtrace report.html
  "${PYTHON:-python3}" -m venv env
  # shellcheck disable=SC2086  # TORCH may carry pip options
  env/bin/python -m pip install -q ${TORCH:-torch==2.13.0}
  env/bin/python -m pip install -q "$package"
  env/bin/python gpt.py --steps 5 --record run.memtrace
  env/bin/memtrace summary run.memtrace
  env/bin/memtrace report run.memtrace -o report.html
  test -s report.html
done
