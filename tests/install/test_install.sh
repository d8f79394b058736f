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
add_executable(attend "$source/examples/attend.c")
target_link_libraries(attend PRIVATE fovea::fovea)
add_executable(attend_static "$source/examples/attend.c")
target_link_libraries(attend_static PRIVATE fovea::fovea_static)
END
[ ! -e "$place/usr/include/fovea/engine.h" ] || echo 'find_package(fovea 0.1 REQUIRED COMPONENTS engine)' >>"$place/project/CMakeLists.txt"
cmake -S "$place/project" -B "$place/project/build" -DCMAKE_PREFIX_PATH="$place/usr" >"$place/log" 2>&1 &&
    cmake --build "$place/project/build" >>"$place/log" 2>&1 || { cat "$place/log"; fail "find_package(fovea)"; }
for program in attend attend_static; do
    [ "$("$place/project/build/$program")" = "1.0 1.5 2.0" ] || fail "the CMake project's program $program"
done
cc -std=c11 "$source/examples/attend.c" $(pkg-config --cflags fovea) "$libraries/libfovea.a" \
    $(pkg-config --static --libs-only-other --libs-only-l fovea | sed 's/-lfovea//') -o "$place/attend"
[ "$("$place/attend")" = "1.0 1.5 2.0" ] || fail "examples/attend.c with libfovea.a"

# A project that takes the sources in: the compiler's flags alone, for the library takes minutes.
mkdir "$place/whole"
cat >"$place/whole/CMakeLists.txt" <<END
cmake_minimum_required(VERSION 3.25)
project(user C)
add_subdirectory("$source" fovea)
add_library(attend OBJECT "$source/examples/attend.c")
target_link_libraries(attend PRIVATE fovea::fovea)
if(FOVEA_TESTS)
  message(FATAL_ERROR "another project's tests")
endif()
END
cmake -S "$place/whole" -B "$place/whole/build" -G "Unix Makefiles" -DFOVEA_CUDA=OFF >"$place/log" 2>&1 &&
    cmake --build "$place/whole/build" --target attend/fast >>"$place/log" 2>&1 || { cat "$place/log"; fail "add_subdirectory"; }

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
