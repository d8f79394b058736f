#!/usr/bin/env bash
# test_install.sh SOURCE BUILD: installs to a place of its own; a stranger's program builds there with
# pkg-config and with CMake, and runs; the headers are right on their own, in C and in C++.
set -euo pipefail
source=$1 build=$2
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
fail() { echo "FAILED: $*"; exit 1; }

cmake --install "$build" --prefix "$place/usr" >"$place/log" || { cat "$place/log"; fail "install"; }
PKG_CONFIG_PATH=$(dirname "$(find "$place/usr" -name fovea.pc)")
export PKG_CONFIG_PATH
libraries=$(dirname "$PKG_CONFIG_PATH")

cc -std=c11 -Wall -Wextra -Werror "$source/examples/attend.c" $(pkg-config --cflags --libs fovea) -o "$place/attend"
result=$(LD_LIBRARY_PATH=$libraries "$place/attend")
[ "$result" = "1.0 1.5 2.0" ] || fail "examples/attend.c printed '$result', not '1.0 1.5 2.0'"

mkdir "$place/project"
cat >"$place/project/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(user C)
find_package(fovea 0.1 REQUIRED)
add_executable(attend $source/examples/attend.c)
target_link_libraries(attend PRIVATE fovea::fovea)
END
cmake -S "$place/project" -B "$place/project/build" -DCMAKE_PREFIX_PATH="$place/usr" >"$place/log" 2>&1 &&
    cmake --build "$place/project/build" >>"$place/log" 2>&1 || { cat "$place/log"; fail "find_package(fovea)"; }
[ "$("$place/project/build/attend")" = "1.0 1.5 2.0" ] || fail "the CMake project's program"

for header in "$place"/usr/include/fovea/*.h; do
    cc -std=c11 -Wall -Wextra -Werror -pedantic -fsyntax-only $(pkg-config --cflags fovea) -x c "$header"
    ! command -v c++ >/dev/null || c++ -Wall -Wextra -Werror -fsyntax-only $(pkg-config --cflags fovea) -x c++ "$header"
done

if [ -e "$place/usr/include/fovea/engine.h" ]; then
    cc -std=c11 -Werror -x c - $(pkg-config --cflags --libs fovea-engine) -o "$place/engine" <<<'#include <fovea/engine.h>
int main(void) { return fv_version()[0] != 48; }'
    LD_LIBRARY_PATH=$libraries "$place/engine" || fail "a program with fovea-engine"
fi
"$place/usr/bin/fovea" --version
if [ -e "$libraries/libfovea-cuda.so" ] && env -u FOVEA_PLUGIN_PATH "$place/usr/bin/fovea" info | grep -q "neither beside"; then
    fail "the installed program does not find the plugin among the libraries"
fi
