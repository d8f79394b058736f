# libfovea-cuda.so, the plugin for NVIDIA GPUs: where nvcc is found. The CUDA run-time is linked statically and
# loads the driver itself, so that the plugin needs libc alone.
option(FOVEA_CUDA "Build the CUDA plugin where nvcc is found" ON)
set(FOVEA_CUDA_ARCHITECTURES "80;90a" CACHE STRING
  "GPUs that the plugin has machine code for, e.g. 80;86;89;90a; the last but letters is there as PTX too")
option(FOVEA_CUDA_EACH_ARRIVES "Hopper's kernels for racecheck: each lane arrives, who arrives waits (hopper/handover.cuh)" OFF)

if(NOT FOVEA_CUDA OR FOVEA_SANITIZE OR FOVEA_FUZZ)
  return()
endif()
include(CheckLanguage)
find_program(FOVEA_NVCC nvcc PATHS /usr/local/cuda/bin)
if(FOVEA_NVCC AND NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  set(CMAKE_CUDA_COMPILER ${FOVEA_NVCC})
endif()
set(CMAKE_CUDA_ARCHITECTURES OFF) # the flags are below
if(NOT CMAKE_CUDA_COMPILER)
  check_language(CUDA)
endif()
if(NOT CMAKE_CUDA_COMPILER)
  message(STATUS "The CUDA plugin is left out; for it install: nvcc, 12.4 or later")
  return()
endif()
execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE nvcc_version ERROR_QUIET)
string(REGEX REPLACE ".*release ([0-9.]+).*" "\\1" nvcc_version "${nvcc_version}")
if(NOT nvcc_version VERSION_GREATER_EQUAL 12.4)
  message(STATUS "The CUDA plugin is left out: nvcc is of release ${nvcc_version}, wanted is 12.4 or later")
  return()
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)

set(cuda_code "")
foreach(architecture IN LISTS FOVEA_CUDA_ARCHITECTURES)
  list(APPEND cuda_code -gencode=arch=compute_${architecture},code=sm_${architecture})
  string(REGEX REPLACE "[a-z]$" "" newest ${architecture})
endforeach()
list(APPEND cuda_code -gencode=arch=compute_${newest},code=compute_${newest}) # for what comes after
set(hopper_code -gencode=arch=compute_90a,code=sm_90a)

set(cuda_flags -std=c++20 -Werror=all-warnings
  -Xcompiler=-Wall,-Wextra,-Wshadow,-Wno-psabi,-Wno-missing-field-initializers,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics)
# A kernel whose registers do not suffice is a fault, not a slow kernel.
if(NOT FOVEA_CUDA_EACH_ARRIVES)
  list(APPEND cuda_flags -Xptxas=-warn-spills,-warn-lmem-usage,-Werror)
endif()

# fovea_cuda_kernels: for all GPUs; fovea_hopper_kernels: for sm_90a alone.
file(GLOB cuda_sources CONFIGURE_DEPENDS src/kernels/cuda/*.cu src/kernels/cuda/layers/*.cu)
file(GLOB hopper_sources CONFIGURE_DEPENDS src/kernels/cuda/hopper/*.cu)
function(add_cuda_kernels name code sources)
  add_library(${name} OBJECT ${sources})
  target_compile_options(${name} PRIVATE ${code} ${cuda_flags})
  target_compile_definitions(${name} PRIVATE $<$<BOOL:${FOVEA_CUDA_EACH_ARRIVES}>:FOVEA_CUDA_EACH_ARRIVES=1>)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  set_target_properties(${name} PROPERTIES CUDA_VISIBILITY_PRESET hidden)
endfunction()
add_cuda_kernels(fovea_cuda_kernels "${cuda_code}" "${cuda_sources}")
set(cuda_objects $<TARGET_OBJECTS:fovea_cuda_kernels>)
set(has_90a 0)
if("90a" IN_LIST FOVEA_CUDA_ARCHITECTURES)
  add_cuda_kernels(fovea_hopper_kernels "${hopper_code}" "${hopper_sources}")
  list(APPEND cuda_objects $<TARGET_OBJECTS:fovea_hopper_kernels>)
  set(has_90a 1)
endif()

# The host part, and what it shares with the library.
file(GLOB cuda_host_sources CONFIGURE_DEPENDS src/kernels/cuda/*.c)
add_library(fovea_cuda MODULE ${cuda_host_sources} src/kvcache/kv_block_runs.c src/kvcache/kv_view.c src/core/dtype.c
  src/core/error.c ${cuda_objects})
target_compile_definitions(fovea_cuda PRIVATE FOVEA_CUDA_HAS_90A=${has_90a})
target_include_directories(fovea_cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(fovea_cuda PRIVATE fovea_flags CUDA::cudart_static)
# CMake adds -lstdc++ for the objects of nvcc, which need nothing of it: --as-needed leaves it out, and
# scripts/check_cuda.sh sees that.
target_link_options(fovea_cuda PRIVATE LINKER:--no-undefined LINKER:--as-needed LINKER:--exclude-libs,ALL
  LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/plugin.map -static-libgcc)
set_target_properties(fovea_cuda PROPERTIES
  PREFIX "lib" OUTPUT_NAME fovea-cuda LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR} LINKER_LANGUAGE C
  LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/plugin.map)
