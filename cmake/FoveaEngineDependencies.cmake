# FOVEA_ENGINE and the interface library fovea_engine_dependencies: oneDNN for GEMM, PCRE2 for the
# tokenizers' regular expressions. Without them the library and the program still build; the program
# then has no `generate`.
find_package(PkgConfig QUIET)
# Not by oneDNN's own CMake package: Debian's asks for OpenCL, which we do not use.
find_path(DNNL_INCLUDE_DIR oneapi/dnnl/dnnl.h)
find_library(DNNL_LIBRARY dnnl)
mark_as_advanced(DNNL_INCLUDE_DIR DNNL_LIBRARY)
if(PkgConfig_FOUND)
  pkg_check_modules(pcre2 QUIET IMPORTED_TARGET libpcre2-8)
endif()

set(engine_missing "")
if(NOT PkgConfig_FOUND)
  list(APPEND engine_missing pkg-config)
endif()
if(NOT DNNL_INCLUDE_DIR OR NOT DNNL_LIBRARY)
  list(APPEND engine_missing libdnnl-dev)
endif()
if(NOT pcre2_FOUND)
  list(APPEND engine_missing libpcre2-dev)
endif()

set(engine_default ON)
if(engine_missing)
  set(engine_default OFF)
endif()
option(FOVEA_ENGINE "Build libfovea-engine and `fovea generate`" ${engine_default})

list(JOIN engine_missing " " engine_missing_text)
if(FOVEA_ENGINE AND engine_missing)
  message(FATAL_ERROR "FOVEA_ENGINE is ON, but these packages are missing: ${engine_missing_text}")
elseif(NOT FOVEA_ENGINE AND engine_missing)
  message(STATUS "libfovea-engine is left out; for it install: ${engine_missing_text}")
elseif(NOT FOVEA_ENGINE)
  message(STATUS "libfovea-engine is left out (FOVEA_ENGINE=OFF)")
else()
  add_library(fovea_engine_dependencies INTERFACE)
  # gomp: the OpenMP that Debian's oneDNN is built with; gemm.c holds it to one thread.
  target_include_directories(fovea_engine_dependencies SYSTEM INTERFACE ${DNNL_INCLUDE_DIR})
  target_link_libraries(fovea_engine_dependencies INTERFACE ${DNNL_LIBRARY} gomp PkgConfig::pcre2)
  target_compile_definitions(fovea_engine_dependencies INTERFACE PCRE2_CODE_UNIT_WIDTH=8)
endif()
