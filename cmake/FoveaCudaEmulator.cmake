# cuda-emulated/libfovea-cuda.so: the CUDA plugin for a GPU that is emulated on the CPU, to check the device code where
# there is none (tools/cuda_emulator). The plugin's own sources as g++ compiles them, the thin layer of PTX and the CUDA
# run-time by ours; of CUDA it takes the headers alone.
include(CheckCXXSourceCompiles)
include(CheckCXXSourceRuns)
include(CheckLanguage)
option(FOVEA_CUDA_EMULATOR "Build the CUDA plugin for an emulated GPU where CUDA's headers and Boost.Context are found" ON)

# Of no use but to tests. Sanitizers do not know its fibers.
if(NOT FOVEA_CUDA_EMULATOR OR NOT FOVEA_TESTS OR FOVEA_SANITIZE OR FOVEA_FUZZ OR CMAKE_CROSSCOMPILING)
  return()
endif()
if(NOT CMAKE_CXX_COMPILER)
  unset(CMAKE_CXX_COMPILER CACHE) # it may have come since
endif()
check_language(CXX)
find_path(FOVEA_CUDA_HEADERS cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS} /usr/local/cuda/include)
find_path(FOVEA_BOOST_HEADERS boost/context/detail/fcontext.hpp)
find_library(FOVEA_BOOST_CONTEXT NAMES libboost_context.a boost_context)
if(NOT CMAKE_CXX_COMPILER OR NOT FOVEA_CUDA_HEADERS OR NOT FOVEA_BOOST_HEADERS OR NOT FOVEA_BOOST_CONTEXT)
  message(STATUS "The emulated CUDA device is left out; for it install: g++, libboost-context-dev, CUDA's headers")
  return()
endif()
enable_language(CXX)
set(CMAKE_REQUIRED_INCLUDES ${FOVEA_CUDA_HEADERS})
check_cxx_source_compiles("
  #include <cublasLt.h>
  #include <cuda_fp8.h>
  #include <cudaTypedefs.h>
  #if CUDART_VERSION < 12040
  #error
  #endif
  int main() { return 0; }" FOVEA_CUDA_HEADERS_SUFFICE)
unset(CMAKE_REQUIRED_INCLUDES)
if(NOT FOVEA_CUDA_HEADERS_SUFFICE)
  message(STATUS "The emulated CUDA device is left out: CUDA's headers in ${FOVEA_CUDA_HEADERS} are not whole, or older than 12.4")
  return()
endif()
check_cxx_source_runs("
  int main()
  {
      return !(__builtin_cpu_supports(\"avx2\") && __builtin_cpu_supports(\"fma\") && __builtin_cpu_supports(\"bmi2\"));
  }" FOVEA_CPU_HAS_V3)

set(shadows ${PROJECT_SOURCE_DIR}/tools/cuda_emulator/include)
file(GLOB emulator_sources CONFIGURE_DEPENDS tools/cuda_emulator/*.cpp)
file(GLOB emulated_kernels CONFIGURE_DEPENDS src/kernels/cuda/*.cu src/kernels/cuda/layers/*.cu
  src/kernels/cuda/hopper/*.cu)
file(GLOB emulated_host_sources CONFIGURE_DEPENDS src/kernels/cuda/*.c)

# nvcc compiles the same files: here each is what a file of two lines includes.
set(emulated_sources "")
foreach(kernel IN LISTS emulated_kernels)
  file(RELATIVE_PATH name ${PROJECT_SOURCE_DIR}/src/kernels/cuda ${kernel})
  set(wrapper ${PROJECT_BINARY_DIR}/cuda-emulated/${name}.cpp)
  file(CONFIGURE OUTPUT ${wrapper} CONTENT "#include \"cuda_emulator/device_code.h\"\n#include \"kernels/cuda/${name}\"\n")
  list(APPEND emulated_sources ${wrapper})
endforeach()

# Vectors that this CPU has, for tests run where they are built; sums are fused as nvcc fuses them.
set(emulator_flags -O1 -Wall -Wextra -Wno-unknown-pragmas -Wno-psabi -Wno-unused-local-typedefs -Wno-sign-compare
  -Wno-deprecated-enum-enum-conversion -Wno-missing-field-initializers -fno-exceptions -fno-rtti -fno-strict-aliasing
  -fvisibility=hidden -ffp-contract=fast)
if(FOVEA_CPU_HAS_V3)
  list(APPEND emulator_flags -march=x86-64-v3 $<$<CXX_COMPILER_ID:GNU>:-mtls-dialect=gnu2>)
endif()

# The kernels are many instances, each soon compiled; these are where the time goes.
set_source_files_properties(${emulator_sources} PROPERTIES COMPILE_OPTIONS -O2)

add_library(fovea_cuda_emulated MODULE ${emulated_sources} ${emulator_sources} ${emulated_host_sources}
  src/kvcache/kv_block_runs.c src/kvcache/kv_view.c src/core/dtype.c src/core/error.c)
target_compile_definitions(fovea_cuda_emulated PRIVATE FOVEA_CUDA_HAS_90A=1
  $<$<BOOL:${FOVEA_CUDA_EACH_ARRIVES}>:FOVEA_CUDA_EACH_ARRIVES=1>)
target_compile_features(fovea_cuda_emulated PRIVATE cxx_std_20)
target_compile_options(fovea_cuda_emulated PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${emulator_flags}>")
target_include_directories(fovea_cuda_emulated BEFORE PRIVATE ${shadows})
target_include_directories(fovea_cuda_emulated PRIVATE
  ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tools)
target_include_directories(fovea_cuda_emulated SYSTEM PRIVATE ${FOVEA_CUDA_HEADERS} ${FOVEA_BOOST_HEADERS})
target_compile_definitions(fovea_cuda_emulated PRIVATE
  _GNU_SOURCE FV_VERSION="${PROJECT_VERSION}" FV_BUILD_ID="${PROJECT_VERSION}-${build_id}")
target_link_libraries(fovea_cuda_emulated PRIVATE ${FOVEA_BOOST_CONTEXT} Threads::Threads m ${CMAKE_DL_LIBS})
target_link_options(fovea_cuda_emulated PRIVATE LINKER:--no-undefined LINKER:--exclude-libs,ALL
  LINKER:--version-script=${PROJECT_SOURCE_DIR}/tools/cuda_emulator/plugin.map)
set_target_properties(fovea_cuda_emulated PROPERTIES
  PREFIX "lib" OUTPUT_NAME fovea-cuda LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/cuda-emulated CXX_EXTENSIONS ON
  LINK_DEPENDS ${PROJECT_SOURCE_DIR}/tools/cuda_emulator/plugin.map)
