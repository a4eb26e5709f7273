#!/usr/bin/env bash
# Builds the null device for the CUDA build of torch of one Python: build.sh PYTHON FOLDER
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=$1
out=$2
mkdir -p "$out"
site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# Prints the first file of the installed NVIDIA packages whose path matches.
find_file() { find "$site/nvidia" -path "$1" | sort | head -n 1; }

# The headers of the packages that torch depends on lack crt/, which the native observer's shim replaces.
shim=$here/../../memtrace/recording/observers/native/cuda_shim
include=${CUDA_INCLUDE:-$(dirname "$(find_file '*/include/cuda_runtime_api.h')")}
flags="-std=c++20 -O2 -fPIC -fvisibility=hidden -Wall -Wextra -I$include -idirafter $shim"
cxx="${CXX:-g++} $flags -shared"

$cxx "$here/device.cpp" "$here/driver.cpp" "$here/crash_report.cpp" -lpthread -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1"

$cxx "$here/nvml.cpp" "$out/libcuda.so.1" -Wl,-soname,libnvidia-ml.so.1 -Wl,--disable-new-dtags -Wl,-rpath,'$ORIGIN' \
  -o "$out/libnvidia-ml.so.1"

name=$(basename "$(find_file '*/libcudart.so.*')")
echo "$name { global: *; };" > "$out/version.map"
# $ORIGIN is for the loader, not for the shell.
$cxx "$here/runtime.cpp" "$out/libcuda.so.1" -Wl,-soname,"$name" -Wl,--version-script="$out/version.map" \
  -Wl,--disable-new-dtags -Wl,-rpath,'$ORIGIN' -o "$out/$name"

for library in libcublas libcublasLt; do
  real=$(find_file "*/$library.so.*")
  name=$(basename "$real")
  light=$([ $library = libcublasLt ] && echo -DLIGHT || true)
  ${CXX:-g++} $flags $light -c "$here/blas.cpp" -o "$out/own.o"
  nm --defined-only "$out/own.o" | awk '$2 == "T" {print $3}' | sort > "$out/own.txt"
  nm -D --defined-only "$real" | awk '$2 ~ /[TWi]/ {sub(/@.*/, "", $3); print $3}' | sort -u | comm -23 - "$out/own.txt" \
    | sed 's/.*/int &(void) { return 0; }/' > "$out/rest.c"
  echo "$name { global: *; };" > "$out/version.map"
  ${CC:-gcc} -w -O1 -fPIC -shared "$out/rest.c" "$out/own.o" -Wl,-soname,"$name" \
    -Wl,--version-script="$out/version.map" -o "$out/$name"
done

# A function that is missing would show up as an undefined symbol when torch is imported, or at its first use.
for library in "$site"/torch/lib/*.so; do nm -D --undefined-only "$library"; done \
  | awk '/@libcudart/ {sub(/@.*/, "", $2); print $2}' | sort -u > "$out/own.txt"
missing=$(nm -D --defined-only "$out"/libcudart.so.* | awk '{sub(/@.*/, "", $3); print $3}' | sort -u | comm -13 - "$out/own.txt")
[ -z "$missing" ] || { echo "Add to runtime.cpp, because this version of torch imports it:" $missing >&2; exit 1; }
rm -f "$out"/own.o "$out"/own.txt "$out"/rest.c "$out"/version.map
