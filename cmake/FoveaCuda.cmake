# libfovea-cuda.so, the plugin for NVIDIA GPUs: where nvcc is found. The CUDA run-time is linked statically and
# loads the driver itself, so that the plugin needs libc alone.
option(FOVEA_CUDA "Build the CUDA plugin where nvcc is found" ON)
set(FOVEA_CUDA_ARCHITECTURES "80;90a" CACHE STRING
  "GPUs that the plugin has machine code for, e.g. 80;86;89;90a; the last but letters is there as PTX too")

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

set(cuda_flags "")
foreach(architecture IN LISTS FOVEA_CUDA_ARCHITECTURES)
  list(APPEND cuda_flags -gencode=arch=compute_${architecture},code=sm_${architecture})
  string(REGEX REPLACE "[a-z]$" "" newest ${architecture})
endforeach()
list(APPEND cuda_flags -gencode=arch=compute_${newest},code=compute_${newest}) # for what comes after

# A kernel whose registers do not suffice is a fault, not a slow kernel.
list(APPEND cuda_flags -std=c++20 -Werror=all-warnings -Xptxas=-warn-spills,-warn-lmem-usage,-Werror
  -Xcompiler=-Wall,-Wextra,-Wshadow,-Wno-psabi,-Wno-missing-field-initializers,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics)

file(GLOB cuda_sources CONFIGURE_DEPENDS src/kernels/cuda/*.cu src/kernels/cuda/*/*.cu)
add_library(fovea_cuda_kernels OBJECT ${cuda_sources})
target_compile_options(fovea_cuda_kernels PRIVATE ${cuda_flags})
target_include_directories(fovea_cuda_kernels PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
set_target_properties(fovea_cuda_kernels PROPERTIES CUDA_VISIBILITY_PRESET hidden)

# The host part, and what it shares with the library.
file(GLOB cuda_host_sources CONFIGURE_DEPENDS src/kernels/cuda/*.c)
add_library(fovea_cuda MODULE ${cuda_host_sources} src/kvcache/kv_block_runs.c src/kvcache/kv_view.c src/core/dtype.c
  src/core/error.c $<TARGET_OBJECTS:fovea_cuda_kernels>)
if("90a" IN_LIST FOVEA_CUDA_ARCHITECTURES)
  target_compile_definitions(fovea_cuda PRIVATE FOVEA_CUDA_HAS_90A=1)
else()
  target_compile_definitions(fovea_cuda PRIVATE FOVEA_CUDA_HAS_90A=0)
endif()
target_include_directories(fovea_cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(fovea_cuda PRIVATE fovea_flags CUDA::cudart_static)
# CMake adds -lstdc++ for the objects of nvcc, which need nothing of it: --as-needed leaves it out, and
# scripts/check_cuda.sh sees that.
target_link_options(fovea_cuda PRIVATE LINKER:--no-undefined LINKER:--as-needed LINKER:--exclude-libs,ALL
  LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/plugin.map -static-libgcc)
set_target_properties(fovea_cuda PROPERTIES
  PREFIX "lib" OUTPUT_NAME fovea-cuda LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR} LINKER_LANGUAGE C
  LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/plugin.map)
