# Copyright 2026 The dualdecoder authors. SPDX-License-Identifier: Apache-2.0
#
# Install rules: one export set for each component, so that a program which wants core alone looks for nothing else; a CMake package and a
# pkg-config file.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/dualdecoder)

foreach(component IN ITEMS core cpu cuda dualdecoder)
  install(
    TARGETS dualdecoder_${component}
    EXPORT dualdecoder-${component}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    FILE_SET HEADERS
    DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  )
  install(
    EXPORT dualdecoder-${component}
    NAMESPACE dualdecoder::
    FILE dualdecoder-${component}-targets.cmake
    DESTINATION ${package_dir}
  )
endforeach()

configure_package_config_file(
  cmake/dualdecoder-config.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/dualdecoder-config.cmake INSTALL_DESTINATION ${package_dir}
)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/dualdecoder-config-version.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES ${CMAKE_CURRENT_BINARY_DIR}/dualdecoder-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/dualdecoder-config-version.cmake
  DESTINATION ${package_dir}
)

# The .pc file finds its prefix from where it lies; ".." as often as its folder is deep.
string(REGEX REPLACE "[^/]+" ".." pc_to_prefix "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
set(dualdecoder_pc_cuda "")
if(dualdecoder_has_cuda)
  string(REPLACE "CUDA::" " -l" cudart ${dualdecoder_cudart})
  set(dualdecoder_pc_cuda " -L${CUDAToolkit_LIBRARY_DIR}${cudart} -lcublas -ldl -lrt")
  if(dualdecoder_has_cusolver)
    string(APPEND dualdecoder_pc_cuda " -lcusolver")
  endif()
endif()
set(dualdecoder_pc_lapack "")
if(dualdecoder_has_lapack)
  list(JOIN LAPACK_LIBRARIES " " lapack) # BLAS among them
  set(dualdecoder_pc_lapack " ${lapack}")
endif()
configure_file(cmake/dualdecoder.pc.in dualdecoder.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/dualdecoder.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/dualdecoder)
