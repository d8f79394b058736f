# What `cmake --install` writes: libraries, headers, the program, pkg-config files, package config.
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fovea)
set(pkgconfig_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# Paths relative to the files themselves, so that an installed tree can be moved.
file(RELATIVE_PATH pc_prefix ${CMAKE_INSTALL_PREFIX}/${pkgconfig_dir} ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" pc_prefix "${pc_prefix}")

file(GLOB public_headers CONFIGURE_DEPENDS include/fovea/*.h)
if(NOT TARGET fovea_engine)
  list(FILTER public_headers EXCLUDE REGEX "/engine\\.h$")
endif()
install(FILES ${public_headers} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/fovea)

install(TARGETS fovea fovea_static EXPORT fovea-targets)
install(TARGETS fovea_program)
if(TARGET fovea_cuda) # beside the library, where the program looks, too
  install(TARGETS fovea_cuda LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
configure_file(cmake/fovea.pc.in fovea.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fovea.pc DESTINATION ${pkgconfig_dir})
if(TARGET fovea_engine)
  install(TARGETS fovea_engine EXPORT fovea-targets)
  configure_file(cmake/fovea-engine.pc.in fovea-engine.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/fovea-engine.pc DESTINATION ${pkgconfig_dir})
endif()

install(EXPORT fovea-targets NAMESPACE fovea:: DESTINATION ${package_dir})
configure_package_config_file(cmake/fovea-config.cmake.in fovea-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(fovea-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fovea-config.cmake ${PROJECT_BINARY_DIR}/fovea-config-version.cmake
  DESTINATION ${package_dir})

if(EXISTS ${PROJECT_SOURCE_DIR}/heuristics)
  install(DIRECTORY heuristics/ DESTINATION ${CMAKE_INSTALL_DATADIR}/fovea/heuristics)
endif()
